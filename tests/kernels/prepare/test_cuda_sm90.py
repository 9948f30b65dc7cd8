"""The Hopper preparation compiles for every input and its host layout is the reference's."""

import pytest
import torch
from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.attend import cuda_build
from comfyui_vc_attention.kernels.prepare import cuda_sm90

from ..attend.compiled import packed_size, report, struct_size

reason = cuda_build.why_no_build()


@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.parametrize(
    "case",
    ["Bf16 1 0 0 1 1", "Fp16 0 0 1 1 0", "Fp16 0 1 0 0 1", "float 1 1 0 0 0"],
    ids=lambda case: case.replace(" ", "-"),
)
def test_compiles(case):
    names = ("INPUT", "USE_INT8_QK", "USE_INT8_VALUES", "USE_ROPE", "USE_WIDE", "USE_TENSOR_ROTATION")
    defines = tuple(f"{name}={value}" for name, value in zip(names, case.split(), strict=True))
    kernels, _ = report(cuda_sm90.SOURCE, "sm_90a", defines)
    assert set(kernels) == {"statistics", "finish_statistics", "codes_q", "codes_k", "codes_v"}
    assert all(spilled <= 32 for _, spilled in kernels.values())


def test_host_packs_the_device_struct():
    assert packed_size(cuda_sm90.SOURCE.read_text(), "Job") == struct_size(cuda_sm90.JOB)


def test_rounding_prior_is_the_formats():
    rows = cuda_sm90.SOURCE.with_name("rows.cuh").read_text()
    assert f"missed = quad_total(missed) / (float)(count + {formats.ROUNDING_PRIOR});" in rows


def test_sign_words_are_the_formats():
    words = cuda_sm90._sign_words()
    signs = [-1.0 if words[c // 32] >> c % 32 & 1 else 1.0 for c in range(128)]
    assert tuple(signs) == formats.hadamard_signs(128)


@pytest.mark.parametrize(
    ("rows", "wide"), [(torch.empty(2, 3, 4, 128), True), (torch.empty(2, 3, 4, 129)[..., :128], False)]
)
def test_wide_rows(rows, wide):
    assert cuda_sm90._is_wide(rows) is wide


@pytest.mark.parametrize("place", ["whole", "strided", "offset"])
def test_angles_are_whole_and_on_16_bytes(place):
    whole = torch.arange(2 * 5 * 64, dtype=torch.float32).view(2, 5, 64)
    angles = whole
    if place == "strided":
        angles = torch.zeros(2, 5, 65)[..., 1:].copy_(whole)
    if place == "offset":
        angles = torch.zeros(whole.numel() + 1)[1:].view_as(whole).copy_(whole)
    (_, _, batch, layout), tables = cuda_sm90._rope_fields((angles, angles, "half"))
    assert (batch, layout) == (5 * 64, 2)
    for table in tables:
        assert table.is_contiguous() and table.data_ptr() % 16 == 0 and torch.equal(table, whole)
