"""What a row of the registry costs on any card, by compiling all of it; nothing is run."""

import functools
from concurrent.futures import ThreadPoolExecutor

from . import cuda_builds, triton_builds
from .attend.cuda_build import compile_cubin, jobs, why_no_build
from .cubin import Resources, resources


def compiled(kernel: str, capability: tuple[int, int]) -> list[Resources]:
    """Of every build's every kernel, in no order. Raises what the compilers raise."""
    arch = 10 * capability[0] + capability[1]
    # Triton's rows, too, are grouped in CUDA where NVRTC is there
    sources = [] if why_no_build() else cuda_builds.builds(capability, kernel)
    with ThreadPoolExecutor(jobs()) as pool:
        cubins = list(pool.map(lambda one: _cubin(one.source, one.arch, one.defines), sources))
    if kernel.startswith("triton"):
        functions = triton_builds.builds(arch, kernel)
        with ThreadPoolExecutor(triton_builds.threads()) as pool:
            made = pool.map(lambda one: triton_builds.compile_build(one, arch), functions)
            cubins += [one.asm["cubin"] for one in made]
    return [used for cubin in cubins for used in resources(cubin).values()]


@functools.cache
def _cubin(source, arch, defines):
    """Rows share the grouping; Triton remembers by itself."""
    return compile_cubin(source, arch, defines)[0]
