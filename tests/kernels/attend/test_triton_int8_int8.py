"""Exact integer products: within I6 of the reference, and three times nearer to exact attention than E4M3."""

import dataclasses

import pytest
import torch
from comfyui_vc_attention.kernels.attend.reference import attend as reference_attend
from comfyui_vc_attention.kernels.attend.triton_int8_int8 import attend
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare.triton_int8_int8 import prepare
from comfyui_vc_attention.kernels.prepare.triton_layout import reference_layout
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import HARD, bound, row_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = Recipe("int8_int8")
TOLERANCE = 2e-3  # I6
EXACT_TOLERANCE = bound(row_of(RECIPE), margin=HARD)  # few keys, and rows that are peaked


def check(q, k, v, recipe=RECIPE, **options):
    operands = prepare(q, k, v, recipe, softmax_scale=q.shape[-1] ** -0.5, want_lse=True, **options)
    out, lse = attend(operands)
    expected, expected_lse = reference_attend(reference_layout(operands))
    rounding = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 4e-3}[q.dtype]
    assert relative_l2(out, expected) < TOLERANCE + rounding
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    exact, exact_lse = exact_attention(q, k, v)
    assert relative_l2(out, exact) < EXACT_TOLERANCE
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=0.03)


@pytest.mark.parametrize("keys", [1, 9, 63, 65, 127, 129, 503])
def test_lengths(keys):
    check(*sample_qkv("clustered", (1, 2, 40, 128), keys=keys, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dtypes_and_head_dims(dtype, head_dim):
    check(*sample_qkv("clustered", (1, 2, 70, head_dim), keys=200, dtype=dtype, device=DEVICE))


def test_without_means():
    recipe = dataclasses.replace(RECIPE, demean=False)
    check(*sample_qkv("gauss", (1, 1, 65, 128), keys=260, device=DEVICE), recipe)


def test_maximum_that_falls_from_tile_to_tile():
    q, k, v = sample_qkv("clustered", (1, 1, 20, 128), keys=640, device=DEVICE)
    k -= torch.linspace(-1, 1, 640, device=DEVICE)[None, None, :, None] * q.mean(2, keepdim=True)
    check(q * 2, k, v)


def test_no_key_gives_zero_and_minus_infinity():
    q, k, v = sample_qkv("gauss", (2, 1, 5, 128), keys=140, device=DEVICE)
    count = torch.tensor([0, 140], dtype=torch.int32, device=DEVICE)
    out, lse = attend(prepare(q, k, v, RECIPE, key_count=count, softmax_scale=0.1, want_lse=True))
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_codes_of_the_residual_sum_up():
    q, k, v = sample_qkv("clustered", (1, 1, 4, 128), keys=200, device=DEVICE)
    operands = prepare(q, k, v, RECIPE, softmax_scale=0.1)
    assert torch.equal(operands.v_sum, 128 * operands.v.int().sum(-1, dtype=torch.int32))
