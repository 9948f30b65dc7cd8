"""Every Triton kernel for any NVIDIA card, compiled without one: for the dry run and the compile matrix."""

from dataclasses import dataclass, field

from .attend.cuda_build import jobs

BULK_FROM = 90  # bulk copies; older cards load through pointers
FP8_FROM = 89  # older cards have no E4M3: the registry offers them triton_int8_int8 only
KERNELS = ("triton_int8_fp8", "triton_fp8_fp8", "triton_int8_int8")
INT8_QK, FP8_QK = ("triton_int8_fp8", "triton_int8_int8"), ("triton_fp8_fp8",)
INT8_VALUES, FP8_VALUES = ("triton_int8_int8",), ("triton_int8_fp8", "triton_fp8_fp8")
INT8_FP8 = ("triton_int8_fp8",)

FLAGS = {
    "HAS_ORDER": True, "HAS_COUNT": True, "HAS_LSE": True, "HAS_MEAN": True, "DEMEAN": True, "ROTATE": True,
    "EXACT": True, "SMOOTH": True, "HAS_SHIFT": True, "HAS_K": True, "HAS_V": True,
}  # fmt: skip
ATTEND = {"D": 128, "BULK": False}
ROWS = {"D": 128, "R": 64, "STEPS": 4, "ROPE": 0, "EXACT": True}
FP32 = {**ROWS, "R": 32, "STEPS": 1, "ROPE": 1, "EXACT": False}
HALF = {**FP32, "ROPE": 2}
KMEANS = {"D": 128, "CB": 64, "R": 128, "W": 256, "HAS_MASK": True}


@dataclass(frozen=True)
class TritonBuild:
    """One Triton function with one set of compile-time arguments."""

    name: str
    function: object  # as @triton.jit made it
    warps: int
    arguments: dict = field(repr=False)
    kernels: tuple[str, ...] = KERNELS  # the registry's rows that launch it


def builds(arch: int, kernel: str | None = None) -> list[TritonBuild]:
    """What sm_<arch> needs for a row of the registry, or for all rows that it is offered. Imports Triton."""
    from .attend.triton_int8_fp8 import attend_fp8_values_kernel as fp8_values
    from .attend.triton_int8_int8 import attend_int8_values_kernel as int8_values
    from .group import triton_kmeans as group
    from .prepare import triton_qk as qk
    from .prepare.triton_values import quantize_v_kernel as v

    fp8 = {**ATTEND, "EXPCAST": True, "ASM": True, "BULK": True}
    plain = {**fp8, "ASM": False, "BULK": False}
    rows = (
        TritonBuild("statistics", qk.statistics_kernel, 4, {**FP32, "CHUNK": 1024}),
        TritonBuild("finish", qk.finish_statistics_kernel, 8, {"D": 128, "R": 16}),
        TritonBuild("q int8", qk.quantize_q_kernel, 4, {**ROWS, "FP8": False}, INT8_QK),
        TritonBuild("q int8 rope", qk.quantize_q_kernel, 4, {**FP32, "FP8": False}, INT8_QK),
        TritonBuild("q int8 half", qk.quantize_q_kernel, 4, {**HALF, "FP8": False}, INT8_QK),
        TritonBuild("q fp8", qk.quantize_q_kernel, 4, {**ROWS, "FP8": True}, FP8_QK),
        TritonBuild("k int8", qk.quantize_k_kernel, 4, {**ROWS, "FP8": False}, INT8_QK),
        TritonBuild("k int8 rope", qk.quantize_k_kernel, 4, {**FP32, "FP8": False}, INT8_QK),
        TritonBuild("k int8 half", qk.quantize_k_kernel, 4, {**HALF, "FP8": False}, INT8_QK),
        TritonBuild("k fp8", qk.quantize_k_kernel, 4, {**ROWS, "FP8": True}, FP8_QK),
        TritonBuild("v int8", v, 8, {"D": 128, "FP8": False}, INT8_VALUES),
        TritonBuild("v fp8", v, 8, {"D": 64, "FP8": True}, FP8_VALUES),
        TritonBuild("assign", group.assign_kernel, 8, {**KMEANS, "HAS_HISTOGRAM": True}),
        TritonBuild("sum", group.sum_clusters_kernel, 4, {**KMEANS, "R": 64}),
        TritonBuild("move", group.move_centroids_kernel, 4, {**KMEANS, "HAS_SUMS": True}),
        TritonBuild("scan", group.scan_kernel, 8, {**KMEANS, "R": 16}),
        TritonBuild("scatter", group.scatter_kernel, 4, KMEANS),
        TritonBuild("attend int8_int8", int8_values, 4, ATTEND, INT8_VALUES),
        TritonBuild("attend int8_fp8", fp8_values, 4, {**fp8, "FP8_QK": False}, INT8_FP8),
        TritonBuild("attend int8_fp8 plain", fp8_values, 4, {**plain, "FP8_QK": False}, INT8_FP8),
        TritonBuild(
            "attend int8_fp8 exp2", fp8_values, 4, {**plain, "FP8_QK": False, "EXPCAST": False}, INT8_FP8
        ),
        TritonBuild("attend fp8_fp8", fp8_values, 4, {**fp8, "D": 64, "FP8_QK": True}, FP8_QK),
    )
    offered = {kernel} if kernel else offered_to(arch)
    return [row for row in rows if offered & set(row.kernels)]


def threads() -> int:
    """How many kernels may compile at once; Triton is made for threads since it has a mode for them."""
    import triton

    return jobs() if hasattr(triton, "AsyncCompileMode") else 1


def offered_to(arch: int) -> set[str]:
    """The registry's Triton rows that run on sm_<arch>."""
    if arch == 103:  # no INT8 tensor cores
        return {"triton_fp8_fp8"}
    return set(KERNELS if arch >= FP8_FROM else INT8_VALUES)


def pointer_format(kernel, name, fp8, exact):
    """Triton's type of a kernel argument that is a tensor, None for an integer or float."""
    values_fp8 = kernel == "attend_fp8_values_kernel"
    return {
        "signs": "*fp32" if kernel.startswith("finish") else "*bf16",
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


def compile_build(build: TritonBuild, arch: int):
    """Triton's compiled kernel for sm_<arch>. Raises what Triton or ptxas raises."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_triton

    from .attend.triton_frame import launch_shape

    kernel, arguments = build.function, dict(build.arguments)
    if arch < FP8_FROM:
        arguments["ASM"] = False
    fp8 = arguments.get("FP8", arguments.get("FP8_QK", False))
    bulk = arguments.get("BULK") and arch >= BULK_FROM
    stages = 1
    if kernel.__name__.startswith("attend"):
        values_fp8 = kernel.__name__ == "attend_fp8_values_kernel"
        arguments["M"], stages = launch_shape((arch // 10, arch % 10), values_fp8)
    arguments |= {"BULK": bulk, "STAGES": stages}
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
    options = {"num_warps": build.warps, "num_stages": stages}
    return compile_triton(source, target=GPUTarget("cuda", arch, 32), options=options)
