"""Every CUDA build for any NVIDIA card: what the dry run and the compile matrix use.

The host modules build what a call asks for; this is the list of what calls ask for. A test on a GPU holds the
two together: all that a self-test loaded is listed here.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from .attend import (
    cuda_int8_fp8_sm89,
    cuda_int8_fp8_sm90,
    cuda_int8_int8,
    cuda_int8_int8_sm90,
    cuda_mma,
    cuda_nvfp4_sm120,
)
from .group import cuda_kmeans
from .prepare import cuda_nvfp4, cuda_sm90
from .registry import MMA_FP8_CARDS

GROUPING = "grouping"  # what builds are for that every row uses
NODE_INPUTS = ("Bf16", "Fp16")  # what ComfyUI's models compute in


@dataclass(frozen=True)
class CudaBuild:
    """One source with one set of switches."""

    source: Path
    arch: str  # as NVRTC takes it, "sm_90a"
    defines: tuple[str, ...]
    threads: int  # of a block, at most
    shared_bytes: int = 0  # dynamic, of a block
    kernel: str = GROUPING  # the registry's row

    @property
    def name(self) -> str:
        return f"{self.source.stem} {' '.join(self.defines)}"


def builds(capability: tuple[int, int], kernel: str | None = None, everything: bool = False):
    """What a card needs for a row of the registry and its grouping, or for all rows.

    everything: also what only the Python API asks for (float32, rotary embedding, odd strides).
    """
    found = list(grouping_builds(f"sm_{capability[0]}{capability[1]}", everything))
    if capability == (9, 0):
        found += hopper_builds(everything)
    if capability >= (8, 0) and capability != (10, 3):
        found += mma_builds(capability, everything)
    if capability in cuda_nvfp4.NATIVE:
        found += nvfp4_builds(cuda_nvfp4.arch_of(capability)[0], 0, everything)
    return [build for build in found if kernel is None or build.kernel in (kernel, GROUPING)]


def grouping_builds(arch: str, everything: bool):
    shapes = [(value_type, 128, 1) for value_type in NODE_INPUTS]
    if everything:
        # more clusters than these do not fit the shared memory of consumer cards (registry.load_grouping)
        shapes += [("float", 192, 0), ("Bf16", 16, 0), ("Bf16", 64, 1)]  # 64: a short clip's
    for (value_type, clusters, wide), update in itertools.product(shapes, (1, 0)):
        switches = {"INPUT": value_type, "CLUSTERS": clusters, "USE_UPDATE": update, "USE_WIDE": wide}
        shared = cuda_kmeans._shared_bytes(clusters, bool(update))
        yield CudaBuild(cuda_kmeans.SOURCE, arch, defines(switches), 1024, shared)


def hopper_builds(everything: bool):
    for qk, expcast, means in itertools.product((1, 0), repeat=3):
        switches = {"USE_INT8_QK": qk, "USE_EXPCAST": expcast, "USE_MEANS": means}
        yield hopper_attend(cuda_int8_fp8_sm90.SOURCE, switches, f"cuda_{'int8' if qk else 'fp8'}_fp8_sm90")
    for means, f16 in ((1, 0), (1, 1), (0, 0)):
        switches = {"USE_MEANS": means, "USE_F16_MEANS": f16}
        yield hopper_attend(cuda_int8_int8_sm90.SOURCE, switches, "cuda_int8_int8_sm90")
    for qk, values in ((1, 0), (0, 0), (1, 1)):
        row = f"cuda_{'int8' if qk else 'fp8'}_{'int8' if values else 'fp8'}_sm90"
        yield from preparation_builds(cuda_sm90.ARCH, qk, values, row, everything)


def mma_builds(capability: tuple[int, int], everything: bool):
    arch = f"sm_{capability[0]}{capability[1]}"
    for means, f16 in ((1, 0), (1, 1), (0, 0)):
        switches = {"USE_MEANS": means, "USE_F16_MEANS": f16}
        shared = cuda_int8_int8.SHARED_BYTES
        yield CudaBuild(
            cuda_int8_int8.SOURCE, arch, defines(switches), cuda_mma.THREADS, shared, "cuda_int8_int8"
        )
    yield from preparation_builds(arch, 1, 1, "cuda_int8_int8", everything)
    if capability not in MMA_FP8_CARDS:
        return
    row = "cuda_int8_fp8_sm89"
    for expcast, means in itertools.product((1, 0), repeat=2):
        switches = {"USE_EXPCAST": expcast, "USE_MEANS": means}
        source, shared = cuda_int8_fp8_sm89.SOURCE, cuda_int8_fp8_sm89.SHARED_BYTES
        yield CudaBuild(source, arch, defines(switches), cuda_mma.THREADS, shared, row)
    yield from preparation_builds(arch, 1, 0, row, everything)


def preparation_builds(arch: str, qk: int, values: int, row: str, everything: bool):
    """qk, values: 1 for INT8, 0 for E4M3."""
    inputs = [(value_type, 0, 1, 1) for value_type in NODE_INPUTS]
    if everything:
        inputs += [("Bf16", 1, 1, 0), ("Fp16", 0, 0, 1), ("float", 1, 0, 0)]
    for value_type, rope, wide, tensor in inputs:
        switches = {
            "INPUT": value_type,
            "USE_INT8_QK": qk,
            "USE_INT8_VALUES": values,
            "USE_ROPE": rope,
            "USE_WIDE": wide,
            "USE_TENSOR_ROTATION": tensor,
        }
        shared = 128 * 128 * (4 if value_type == "float" else 2)
        yield CudaBuild(cuda_sm90.SOURCE, arch, defines(switches), 256, shared, row)


def nvfp4_builds(arch: str, twin: int, everything: bool):
    """twin: 1 for a card without the instructions, where tests run their software twin."""
    row = "cuda_nvfp4_sm120"
    for (means, f16), shift in itertools.product(((1, 0), (1, 1), (0, 0)), (1, 0)):
        if not (shift or everything):
            continue
        switches = {"USE_TWIN": twin, "USE_MEANS": means, "USE_F16_MEANS": f16, "USE_SHIFT": shift}
        source, shared = cuda_nvfp4_sm120.SOURCE, cuda_nvfp4_sm120.SHARED_BYTES
        yield CudaBuild(source, arch, defines(switches), cuda_nvfp4_sm120.THREADS, shared, row)
    inputs = [(value_type, 0, 1) for value_type in NODE_INPUTS]
    if everything:
        inputs += [("Bf16", 1, 0), ("float", 1, 1)]
    for value_type, rope, wide in inputs:
        switches = {"USE_TWIN": twin, "INPUT": value_type, "USE_ROPE": rope, "USE_WIDE": wide}
        yield CudaBuild(cuda_nvfp4.SOURCE, arch, defines(switches), 512, cuda_nvfp4.SHAPE_BYTES, row)


def hopper_attend(source: Path, switches: dict, row: str) -> CudaBuild:
    threads, shared = cuda_int8_fp8_sm90.THREADS, cuda_int8_fp8_sm90.SHARED_BYTES
    return CudaBuild(source, cuda_sm90.ARCH, defines(switches), threads, shared, row)


def defines(switches: dict) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in switches.items())
