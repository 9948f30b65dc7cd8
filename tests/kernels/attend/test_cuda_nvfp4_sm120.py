"""The 4-bit kernel compiles for its cards and, with the instructions' twin, for others; the host agrees."""

import re

import pytest
import torch
from comfyui_vc_attention.kernels.attend import cuda_build, cuda_nvfp4_sm120
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.cuda_builds import builds
from comfyui_vc_attention.kernels.prepare import cuda_nvfp4

from .compiled import constant, packed_size, report, struct_size

reason = cuda_build.why_no_build()
needs_nvrtc = pytest.mark.skipif(reason is not None, reason=str(reason))


def needs(arch):
    """Skips where NVRTC does not know the card."""
    version = tuple(int(part) for part in cuda_build.nvrtc_version().split("."))
    first = {"sm_120a": (12, 8), "sm_121a": (12, 9)}.get(arch, (12, 0))
    if version < first:
        pytest.skip(f"NVRTC {first[0]}.{first[1]} was the first to know {arch}, got {version}")


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "twin", "means", "f16", "shift"),
    [
        ("sm_120a", 0, 1, 0, 1),
        ("sm_120a", 0, 1, 1, 0),
        ("sm_120a", 0, 0, 0, 1),
        ("sm_121a", 0, 1, 0, 1),
        ("sm_80", 1, 1, 0, 1),
        ("sm_90", 1, 1, 1, 0),
    ],
)
def test_compiles_without_spills(arch, twin, means, f16, shift):
    needs(arch)
    names = ("USE_TWIN", "USE_MEANS", "USE_F16_MEANS", "USE_SHIFT")
    defines = tuple(f"{name}={on}" for name, on in zip(names, (twin, means, f16, shift), strict=True))
    kernels, _ = report(cuda_nvfp4_sm120.SOURCE, arch, defines)
    assert set(kernels) == {"attend_nvfp4"} | ({"query_shift"} if shift else set())
    assert all(spilled == 0 for _, spilled in kernels.values())


@needs_nvrtc
def test_no_other_card_has_the_instructions():
    defines = ("USE_TWIN=0", "USE_MEANS=1", "USE_F16_MEANS=0", "USE_SHIFT=0")
    with pytest.raises(cuda_build.CudaBuildError):
        cuda_build.compile_cubin(cuda_nvfp4_sm120.SOURCE, "sm_90a", defines)


def test_host_and_device_agree():
    source = cuda_nvfp4_sm120.SOURCE.read_text()
    header = cuda_nvfp4_sm120.SOURCE.with_name("nvfp4.cuh").read_text()
    found = dict(
        re.findall(r"(\w+) = ([^;,]+)[;,]", " ".join(re.findall(r"constexpr int [^;]+;", header + source)))
    )
    values = {}
    for name, expression in found.items():
        values[name] = constant(expression, values)
    assert values["TILE_RECORD"] == cuda_nvfp4.TILE_RECORD
    assert values["STAGES"] * values["SLOT"] == cuda_nvfp4_sm120.SHARED_BYTES <= 99 * 1024
    assert values["THREADS"] == cuda_nvfp4_sm120.THREADS and values["UNIT"] == cuda_nvfp4_sm120.UNIT
    assert values["BLOCK_ROWS"] == cuda_nvfp4.BLOCK_ROWS
    assert packed_size(source, "Call") == struct_size(cuda_nvfp4_sm120.CALL)


class NoModule:
    """A loaded module that notes what it should launch."""

    def __init__(self):
        self.launches = []

    def launch(self, kernel, grid, threads, *params, shared=0):
        self.launches.append((kernel, grid, threads, shared))


@pytest.fixture
def modules(monkeypatch):
    """(source, arch, defines) -> NoModule of all that was loaded, on a card of sm_120."""
    loaded = {}

    def load_module(source, arch, device, defines=()):
        return loaded.setdefault((source, arch, defines), NoModule())

    for module in (cuda_nvfp4, cuda_nvfp4_sm120):
        monkeypatch.setattr(module, "load_module", load_module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    return loaded


def call(recipe, queries=300, keys=500, heads=3, dtype=torch.bfloat16):
    q, k = (torch.zeros(2, heads, length, 128, dtype=dtype) for length in (queries, keys))
    operands = cuda_nvfp4.prepare(q, k, k, recipe, softmax_scale=1.0, want_lse=True)
    return operands, *cuda_nvfp4_sm120.attend(operands)


@pytest.mark.parametrize("demean", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_that_a_call_loads_is_listed(modules, demean, dtype):
    _, out, lse = call(Recipe("nvfp4", demean=demean, smooth_q=True), dtype=dtype)
    assert out.shape == (2, 3, 300, 128) and lse.shape == (2, 3, 300)
    listed = {(b.source, b.arch, b.defines) for b in builds((12, 0), "cuda_nvfp4_sm120")}
    assert len(modules) == 2 and set(modules) <= listed
    launched = {launch[0] for module in modules.values() for launch in module.launches}
    assert launched == {
        "sum_k",
        "mean_k",
        "mean_q",
        "moments",
        "shape",
        "codes_q",
        "codes_k",
        "codes_v",
        "query_shift",
        "attend_nvfp4",
    }


def test_the_shifts_never_take_more_than_their_share(modules, monkeypatch):
    """N3: in parts of at most 64 MiB, that together are every block once."""
    monkeypatch.setattr(cuda_nvfp4_sm120, "SHIFT_BYTES", 5 * 16 * 512 * 4)
    operands, _, _ = call(Recipe("nvfp4", smooth_q=True), queries=5000, heads=2)
    launches = [x for m in modules.values() for x in m.launches if x[0] in ("query_shift", "attend_nvfp4")]
    units = 2 * 2 * -(-40 // 16)
    assert [grid for kernel, grid, _, _ in launches if kernel == "query_shift"] == [(4, 5), (4, 5), (4, 2)]
    assert sum(grid[0] for kernel, grid, _, _ in launches if kernel == "attend_nvfp4") == 16 * units
    assert operands.q_means.shape == (2, 2, 40, 128) and operands.k_centred.shape == (2, 2, 512, 128)


def test_a_call_without_smoothed_queries_is_one_launch(modules):
    operands, _, _ = call(Recipe("nvfp4"), queries=5000)
    launches = [x for m in modules.values() for x in m.launches if x[0] in ("query_shift", "attend_nvfp4")]
    assert len(launches) == 1 and operands.q_means is None and operands.k_centred is None
