"""Operands of fp8_fp8 against the reference."""

import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare.reference import prepare as reference_prepare
from comfyui_vc_attention.kernels.prepare.triton_fp8_fp8 import prepare
from comfyui_vc_attention.kernels.prepare.triton_layout import reference_layout
from comfyui_vc_attention.kernels.testing import sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_equals_the_reference():
    q, k, v = sample_qkv("clustered", (1, 2, 40, 128), keys=300, dtype=torch.bfloat16, device=DEVICE)
    recipe = Recipe("fp8_fp8")
    got = reference_layout(prepare(q, k, v, recipe, softmax_scale=0.1))
    expected = reference_prepare(q, k, v, recipe, softmax_scale=0.1)
    for name in ("q", "k"):
        codes, wanted = getattr(got, name), getattr(expected, name)
        assert codes.dtype == torch.float8_e4m3fn
        assert (codes.float() != wanted.float()).float().mean() <= 1e-4
        # neighbours, where they differ
        torch.testing.assert_close(codes.float(), wanted.float(), rtol=0.13, atol=2**-9)
    for name in ("q_scale", "k_scale"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=2e-6, atol=0)
