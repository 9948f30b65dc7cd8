"""Every Triton kernel compiles for every card it is offered on, without one: types, layouts, ptxas limits."""

import importlib
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ARCHES = (80, 86, 89, 90, 100, 120)
BULK_FROM = 90  # bulk copies; older cards load through pointers
FP8_FROM = 89  # older cards have no E4M3: the registry offers them triton_int8_int8 only

FLAGS = {
    "HAS_ORDER": True, "HAS_COUNT": True, "HAS_LSE": True, "HAS_MEAN": True, "DEMEAN": True, "ROTATE": True,
    "EXACT": True, "SMOOTH": True, "HAS_SHIFT": True, "HAS_K": True, "HAS_V": True,
}  # fmt: skip
ATTEND = {"D": 128, "M": 64, "STAGES": None, "BULK": False}
ROWS = {"D": 128, "R": 64, "STEPS": 4, "ROPE": 0, "EXACT": True}
TF32 = {**ROWS, "R": 32, "ROPE": 1, "EXACT": False}
KMEANS = {"D": 128, "CB": 64, "R": 128, "W": 256, "HAS_MASK": True}

# name: (module, kernel, needs E4M3, warps, compile-time arguments)
VARIANTS = {
    "statistics": ("prepare.triton_qk", "statistics_kernel", False, 4, {**TF32, "CHUNK": 1024}),
    "finish": ("prepare.triton_qk", "finish_statistics_kernel", False, 8, {"D": 128, "R": 16}),
    "q int8": ("prepare.triton_qk", "quantize_q_kernel", False, 4, {**ROWS, "FP8": False}),
    "q int8 rope": ("prepare.triton_qk", "quantize_q_kernel", False, 8, {**TF32, "FP8": False}),
    "q fp8": ("prepare.triton_qk", "quantize_q_kernel", True, 4, {**ROWS, "FP8": True}),
    "k int8": ("prepare.triton_qk", "quantize_k_kernel", False, 4, {**ROWS, "FP8": False}),
    "k int8 rope": ("prepare.triton_qk", "quantize_k_kernel", False, 8, {**TF32, "FP8": False}),
    "k fp8": ("prepare.triton_qk", "quantize_k_kernel", True, 4, {**ROWS, "FP8": True}),
    "v int8": ("prepare.triton_values", "quantize_v_kernel", False, 8, {"D": 128, "FP8": False}),
    "v fp8": ("prepare.triton_values", "quantize_v_kernel", True, 8, {"D": 64, "FP8": True}),
    "assign": ("group.triton_kmeans", "assign_kernel", False, 8, {**KMEANS, "HAS_HISTOGRAM": True}),
    "sum": ("group.triton_kmeans", "sum_clusters_kernel", False, 4, {**KMEANS, "R": 64}),
    "move": ("group.triton_kmeans", "move_centroids_kernel", False, 4, {**KMEANS, "HAS_SUMS": True}),
    "scan": ("group.triton_kmeans", "scan_kernel", False, 8, {**KMEANS, "R": 16}),
    "scatter": ("group.triton_kmeans", "scatter_kernel", False, 4, KMEANS),
    "attend int8_int8": ("attend.triton_int8_int8", "attend_int8_values_kernel", False, 4, ATTEND),
    "attend int8_fp8": (
        "attend.triton_int8_fp8", "attend_fp8_values_kernel", True, 4,
        {**ATTEND, "FP8_QK": False, "EXPCAST": True, "ASM": True, "BULK": True},
    ),
    "attend int8_fp8 plain": (
        "attend.triton_int8_fp8", "attend_fp8_values_kernel", True, 4,
        {**ATTEND, "FP8_QK": False, "EXPCAST": True, "ASM": False},
    ),
    "attend int8_fp8 exp2": (
        "attend.triton_int8_fp8", "attend_fp8_values_kernel", True, 4,
        {**ATTEND, "FP8_QK": False, "EXPCAST": False, "ASM": False},
    ),
    "attend fp8_fp8": (
        "attend.triton_int8_fp8", "attend_fp8_values_kernel", True, 4,
        {**ATTEND, "D": 64, "FP8_QK": True, "EXPCAST": True, "ASM": True, "BULK": True},
    ),
}  # fmt: skip


def pointer_format(kernel, name, fp8, exact):
    """Triton's type of a kernel argument that is a tensor, None for an integer or float."""
    values_fp8 = kernel == "attend_fp8_values_kernel"
    return {
        "signs": "*bf16" if exact else "*fp32",
        "q": ("*fp8e4nv" if fp8 else "*i8") if kernel.startswith("attend") else "*bf16",
        "k": ("*fp8e4nv" if fp8 else "*i8") if kernel.startswith("attend") else "*bf16",
        "v": ("*fp8e4nv" if values_fp8 else "*i8") if kernel.startswith("attend") else "*bf16",
        "codes": "*fp8e4nv" if fp8 else "*i8", "ones": "*fp8e4nv", "out": "*bf16",
        "v_mean": "*fp16" if fp8 or values_fp8 else "*bf16", "v_sum": "*i32",
        "order": "*i32", "key_count": "*i32",
        "cos": "*fp32", "sin": "*fp32", "k_mean": "*fp32", "k_mean_rotated": "*fp32", "k_sum": "*fp32",
        "v_amax": "*fp32", "scales": "*fp32", "lse": "*fp32", "lse_shift": "*fp32",
        "centroids": "*fp32", "moved": "*fp32", "half_norms": "*fp32", "sums": "*fp32", "counts": "*fp32",
        "labels": "*i16", "listed": "*i32", "histogram": "*i32", "starts": "*i32",
        "q_scale": "*fp32", "k_scale": "*fp32", "k_scale_max": "*fp32", "v_scale": "*fp32",
    }.get(name)  # fmt: skip


FLOAT_ARGUMENTS = {"root", "softmax_scale", "score_scale", "largest", "l_unit"}


def compile_kernel(kernel, arguments, warps, arch):
    """One kernel with these compile-time arguments, compiled for sm_<arch>."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fp8 = arguments.get("FP8", arguments.get("FP8_QK", False))
    bulk = arguments.get("BULK") and arch >= BULK_FROM
    # as pipeline_stages chooses them
    stages = (3 if arch in (90, 100) else 2) if "STAGES" in arguments else 1
    arguments = {**arguments, "BULK": bulk, "STAGES": stages}
    constants = {n: arguments.get(n, FLAGS.get(n)) for n in kernel.arg_names if n.isupper()}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        pointer = pointer_format(kernel.__name__, name, fp8, arguments.get("EXACT", False))
        if name in constants:
            signature[name] = "constexpr"
        elif bulk and name in ("k", "v"):
            rows = (128, arguments["D"]) if name == "k" else (arguments["D"], 128)
            signature[name] = f"tensordesc<{pointer[1:]}[{rows[0]},{rows[1]}]>"
        elif pointer:
            signature[name] = pointer
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOAT_ARGUMENTS else "i32"
            if name[1:] in ("_b", "_h", "_l"):  # strides, as real tensors have them
                attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_all(arch):
    """Compile every variant that sm_<arch> is offered; raises what Triton or ptxas raises."""
    for name, (module, kernel, needs_e4m3, warps, arguments) in VARIANTS.items():
        if needs_e4m3 and arch < FP8_FROM:
            continue
        module = importlib.import_module(f"comfyui_vc_attention.kernels.{module}")
        arguments = dict(arguments)
        if arch < FP8_FROM:
            arguments["ASM"] = False
        compiled = compile_kernel(getattr(module, kernel), arguments, warps, arch)
        print(f"sm_{arch} {name}: {compiled.metadata.shared} bytes of shared memory")


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles(arch):
    # in a process of its own: this one may have loaded the kernels for the interpreter
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, __file__, str(arch)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    limit = 227 if arch in (90, 100) else 163 if arch == 80 else 99
    used = [int(line.split()[-5]) for line in done.stdout.splitlines()]
    assert used and max(used) <= limit * 1024, done.stdout


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import conftest  # noqa: F401, gives the checkout its import name

    compile_all(int(sys.argv[1]))
