"""Hopper's preparation for other cards: it compiles there; what it makes is tested on a GPU."""

import pytest
from comfyui_vc_attention.kernels.attend import cuda_build
from comfyui_vc_attention.kernels.prepare import cuda_mma, cuda_sm90

from ..attend.compiled import report

reason = cuda_build.why_no_build()


@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.parametrize(
    "case",
    ["sm_80 Bf16 1 0 1 1", "sm_86 Fp16 1 1 1 0", "sm_89 Bf16 0 0 1 1", "sm_120 float 0 1 0 0"],
    ids=lambda case: case.replace(" ", "-"),
)
def test_compiles(case):
    arch, *values = case.split()
    names = ("INPUT", "USE_INT8_VALUES", "USE_ROPE", "USE_WIDE", "USE_TENSOR_ROTATION")
    defines = tuple(f"{name}={value}" for name, value in zip(names, values, strict=True))
    kernels, _ = report(cuda_sm90.SOURCE, arch, (*defines, "USE_INT8_QK=1"))
    assert set(kernels) == {"statistics", "finish_statistics", "codes_q", "codes_k", "codes_v"}
    assert all(spilled <= 32 for _, spilled in kernels.values())


def test_card_in_the_compilers_words(monkeypatch):
    monkeypatch.setattr(cuda_mma.torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert cuda_mma.arch_of("cuda") == "sm_86"
