"""The 4-bit preparation compiles for its cards and, with the instruction's twin, for others."""

import pytest
from comfyui_vc_attention.kernels.attend import cuda_build
from comfyui_vc_attention.kernels.prepare import cuda_nvfp4

from ..attend.compiled import packed_size, report, struct_size
from ..attend.test_cuda_nvfp4_sm120 import needs

reason = cuda_build.why_no_build()


@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.parametrize(
    ("arch", "case"),
    [
        ("sm_120a", "0 Bf16 0 1"),
        ("sm_120a", "0 float 1 0"),
        ("sm_121a", "0 Fp16 0 1"),
        ("sm_80", "1 Fp16 1 0"),
        ("sm_90", "1 Bf16 0 1"),
    ],
    ids=lambda x: x.replace(" ", "-"),
)
def test_compiles_without_spills(arch, case):
    needs(arch)
    names = ("USE_TWIN", "INPUT", "USE_ROPE", "USE_WIDE")
    defines = tuple(f"{name}={value}" for name, value in zip(names, case.split(), strict=True))
    kernels, _ = report(cuda_nvfp4.SOURCE, arch, defines)
    assert set(kernels) == {
        *("sum_k", "mean_k", "mean_q", "moments", "shape"),
        *("codes_q", "codes_k", "codes_v"),
    }
    assert all(spilled == 0 for _, spilled in kernels.values())


def test_host_packs_the_device_struct():
    assert packed_size(cuda_nvfp4.SOURCE.read_text(), "Job") == struct_size(cuda_nvfp4.JOB)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((12, 0), ("sm_120a", 0)), ((12, 1), ("sm_121a", 0)), ((9, 0), ("sm_90", 1)), ((10, 0), ("sm_100", 1))],
)
def test_only_cards_with_the_instructions_use_them(capability, expected):
    assert cuda_nvfp4.arch_of(capability) == expected
