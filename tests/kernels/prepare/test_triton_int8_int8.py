"""Operands of int8_int8 against the reference, code by code."""

import dataclasses

import pytest
import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare.reference import prepare as reference_prepare
from comfyui_vc_attention.kernels.prepare.triton_int8_int8 import prepare
from comfyui_vc_attention.kernels.prepare.triton_layout import reference_layout
from comfyui_vc_attention.kernels.testing import sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("demean", [True, False])
def test_equals_the_reference(dtype, demean):
    q, k, v = sample_qkv("outlier_tokens", (1, 2, 40, 128), keys=300, dtype=dtype, device=DEVICE)
    recipe = dataclasses.replace(Recipe("int8_int8"), demean=demean)
    operands = prepare(q, k, v, recipe, softmax_scale=0.1)
    got, expected = reference_layout(operands), reference_prepare(q, k, v, recipe, softmax_scale=0.1)
    if demean:
        assert got.v_mean.dtype == expected.v_mean.dtype
        same = (got.v_mean == expected.v_mean).repeat_interleave(128, 2)[:, :, :300]
        assert same.float().mean() > 0.99
    else:
        same = torch.ones_like(got.v, dtype=torch.bool)
    # where a mean rounded to its other neighbour, all residuals of the channel move
    apart = (got.v.int() - expected.v.int()).abs()[same]
    assert apart.max() <= 1 and (apart > 0).float().mean() <= 1e-4
    torch.testing.assert_close(got.v_scale, expected.v_scale, rtol=0.02, atol=0)
    assert torch.equal(operands.v_sum, 128 * operands.v.int().sum(-1, dtype=torch.int32))
