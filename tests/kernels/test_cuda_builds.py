"""Every CUDA source compiles for every card it is for, with every NVRTC found here, within limits."""

from types import SimpleNamespace

import pytest
import torch
from comfyui_vc_attention.kernels.attend import cuda_build, cuda_int8_fp8_sm90, cuda_mma
from comfyui_vc_attention.kernels.config import resolve_recipe
from comfyui_vc_attention.kernels.cubin import resources
from comfyui_vc_attention.kernels.cuda_builds import GROUPING, builds
from comfyui_vc_attention.kernels.group import cuda_kmeans
from comfyui_vc_attention.kernels.prepare import cuda_sm90
from comfyui_vc_attention.kernels.registry import KERNELS
from comfyui_vc_attention.kernels.selftest import CASES, CLUSTERS, config_of
from comfyui_vc_attention.kernels.testing import sample_qkv

CARDS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
KB_OF_SHARED = {(8, 0): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}  # of a block; 99 elsewhere
STACK_BYTES = {"assign": 64}  # spilled registers, outside of loops; of the others at most 32
# with the build's memory
DYNAMIC = ("assign", "codes_v", "shape", "attend_e4m3", "attend_u8s8", "attend_nvfp4")
FULL_BLOCKS = ("attend_e4m3", "attend_u8s8", "attend_nvfp4", "codes_v")  # launched with the build's threads
NVRTCS = {f"{path.name}": path for path in reversed(cuda_build.nvrtc_paths()) if ".alt." not in path.name}


@pytest.fixture(params=sorted(NVRTCS) or [pytest.param("", marks=pytest.mark.skip(reason="needs NVRTC"))])
def nvrtc(request, monkeypatch):
    """Its version, in use instead of the usual one."""
    try:
        library = cuda_build._load_nvrtc(NVRTCS[request.param])
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cuda_build, "_nvrtc", lambda: library)
    return tuple(int(part) for part in cuda_build.nvrtc_version().split("."))


def rows_of(card, everything):
    """(build, kernel, what it costs) of all builds of a card."""
    for build in builds(card, everything=everything):
        cubin, _ = cuda_build.compile_cubin(build.source, build.arch, build.defines)
        for kernel, used in resources(cubin).items():
            yield build, kernel, used


@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"sm_{card[0]}{card[1]}")
def test_compiles_within_limits(card, nvrtc):
    if card in ((10, 3), (12, 1)) and nvrtc < (12, 9):
        pytest.skip("NVRTC 12.9 was the first to know this card")
    for build, kernel, used in rows_of(card, everything=True):
        where = f"{build.name}: {kernel}, {used}"
        assert used.stack_bytes <= STACK_BYTES.get(kernel, 32), where
        shared = used.shared_bytes + (build.shared_bytes if kernel in DYNAMIC else 0)
        # from sm_90 on a cubin's number has 1 KB that the system takes beside the limit
        assert shared <= KB_OF_SHARED.get(card, 99) * 1024 + 1024 * (card >= (9, 0)), where
        if kernel in FULL_BLOCKS:
            assert used.registers * build.threads <= 65536, where


def test_every_row_of_the_registry_has_its_builds():
    for spec in KERNELS:
        if spec.name.startswith("cuda"):
            found = [build for card in CARDS for build in builds(card, spec.name) if build.kernel != GROUPING]
            sources = {build.source.parent.parent.name for build in found}
            assert sources == {"attend", "prepare"}, spec.name


def test_every_source_is_built_for_some_card(pack_root):
    sources = {path.resolve() for path in (pack_root / "kernels").glob("*/csrc/*.cu")}
    assert {build.source for card in CARDS for build in builds(card, everything=True)} == sources


def test_the_recorded_table_knows_every_build(pack_root):
    table = (pack_root / "tests" / "data" / "compile_matrix.csv").read_text(encoding="utf-8").splitlines()
    recorded = {tuple(row.split(",")[1:3]) for row in table[1:]}
    for card in CARDS:
        for build in builds(card, everything=True):
            kernels = {name for name, arch in recorded if arch == build.arch}
            assert any(name.startswith(f"{build.source.stem} ") for name in kernels), (
                f"{build.source.name} for {build.arch}: run tests/kernels/compile_matrix.py"
            )


class NoModule:
    """A loaded module that launches nothing."""

    def launch(self, *args, **options):
        pass


ON_HOPPER = [s for s in KERNELS if any(build.kernel == s.name for build in builds((9, 0)))]


@pytest.mark.parametrize("spec", ON_HOPPER, ids=lambda spec: spec.name)
def test_all_that_a_self_test_loads_is_listed(spec, monkeypatch):
    loaded = set()

    def load_module(source, arch, device, defines=()):
        loaded.add((source, arch, defines))
        return NoModule()

    for module in (cuda_sm90, cuda_int8_fp8_sm90, cuda_mma, cuda_kmeans):
        monkeypatch.setattr(module, "load_module", load_module)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for case in CASES:
        config = config_of(spec, case)
        if config is None or case.shape[-1] != 128:
            continue
        q, k, v = sample_qkv("gauss", case.shape, min(case.keys, 2000), case.dtype)
        recipe = resolve_recipe(config, spec.numerics, (9, 0), exact=True)
        order = cuda_kmeans.group_tokens(v, CLUSTERS).order if case.means else None
        operands = spec.load().prepare(q, k, v, recipe, order=order, softmax_scale=1.0, want_lse=case.lse)
        spec.load().attend(operands)
    listed = {(build.source, build.arch, build.defines) for build in builds((9, 0), spec.name)}
    assert len(loaded) > 6 and loaded <= listed
