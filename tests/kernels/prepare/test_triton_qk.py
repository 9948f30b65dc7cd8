"""Statistics and scales of Q and K; the codes are checked in test_triton_int8_fp8.py."""

import dataclasses

import torch
from comfyui_vc_attention.kernels.attend.triton_int8_fp8 import attend
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare.reference import key_mean, rotate
from comfyui_vc_attention.kernels.prepare.triton_int8_fp8 import prepare
from comfyui_vc_attention.kernels.prepare.triton_qk import Statistics, quantize_k, quantize_q, statistics
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import HARD, bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = Recipe("int8_fp8")


def test_statistics_over_several_chunks():
    _, k, v = sample_qkv("clustered", (2, 1, 1, 64), keys=2100, device=DEVICE)
    found = statistics(k, v, None, None, None, True, True)
    mean = key_mean(k)
    torch.testing.assert_close(found.k_mean, mean[:, :, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.k_mean_rotated, rotate(mean)[:, :, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.v_scale, v.abs().amax(2) / 224, rtol=2e-7, atol=0)


def test_statistics_see_existing_keys_only():
    _, k, v = sample_qkv("clustered", (2, 1, 1, 64), keys=300, device=DEVICE)
    order = torch.rand(2, 1, 300, device=DEVICE).argsort(-1).int()
    count = torch.tensor([120, 0], dtype=torch.int32, device=DEVICE)
    found = statistics(k, v, order, count, None, True, True)
    kept = order[0, 0, :120].long()
    torch.testing.assert_close(found.k_mean[0, 0], k[0, 0, kept].mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.v_scale[0, 0], v[0, 0, kept].abs().amax(0) / 224, rtol=2e-7, atol=0)
    assert (found.k_mean[1] == 0).all() and (found.v_scale[1] == 1).all()


def test_one_scale_per_query():
    q = sample_qkv("gauss", (1, 2, 300, 128), device=DEVICE)[0]
    codes, scales, shift = quantize_q(q, Recipe("int8_fp8", rotate_qk=False), None, None, 1.0)
    assert shift is None
    torch.testing.assert_close(scales, q.abs().amax(-1) / 127)
    assert codes.abs().amax(-1).eq(127).all()


def test_a_k_scale_never_spans_more_than_32_keys():
    k = sample_qkv("gauss", (1, 1, 1, 128), keys=160, device=DEVICE)[1]
    k[:, :, 40] *= 50
    _, scales = quantize_k(
        k, Recipe("int8_fp8", smooth_k=False), None, None, None, Statistics(None, None, None)
    )
    large = scales > 5 * scales[0, 0, 0, 0]
    assert large.nonzero()[:, 2:].tolist() == [[0, 1]]
    assert (scales[0, 0, 1, 1:] == 0).all()  # no such keys


def test_keys_of_zeros_do_not_bound_the_queries():
    q, k, v = sample_qkv("gauss", (1, 1, 20, 64), keys=160, device=DEVICE)
    q, k = q * 20, k / 50
    k[:, :, 32:64] = 0
    operands = prepare(q, k, v, Recipe("int8_fp8", smooth_k=False), softmax_scale=1.0)
    assert operands.k_scale[0, 0, 0, 1] == 0 and operands.k_scale_max < 0.01
    exact = exact_attention(q, k, v, scale=1.0)[0]
    limit = bound("int8_fp8, means, sequence", margin=HARD)  # few keys, and scores that peak
    assert relative_l2(attend(operands)[0], exact) < limit
    # what a scale of 1 for the zeros would do: scores a fifth of what they are
    bounded = dataclasses.replace(operands, k_scale_max=torch.ones_like(operands.k_scale_max))
    assert relative_l2(attend(bounded)[0], exact) > 0.5
