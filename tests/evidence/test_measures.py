"""Measures against cases whose answer is known."""

import pytest
import torch
from comfyui_vc_attention.kernels.testing import sample_qkv
from evidence import measures
from evidence.methods import Parts


def test_exact_rows_are_attention():
    q, k, v = sample_qkv("peaked", (1, 2, 32, 64), keys=100)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(measures.exact_rows(q, k, v), expected, atol=1e-5, rtol=1e-4)


def test_terms_of_eq_2_add_up():
    expected = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    probability, value = 0.03 * torch.ones_like(expected), torch.zeros_like(expected)
    value[..., 0] = 0.16
    v = torch.ones(1, 1, 4, 16)
    parts = Parts(expected + probability + value, expected + probability, v + 0.1, v)
    found = measures.of_output(parts, expected)
    size = expected.norm().item()
    assert found["probability_term"] == pytest.approx(0.03 * 128**0.5 / size, rel=1e-5)
    assert found["value_share"] == pytest.approx(0.16**2 * 8 / (0.16**2 * 8 + 0.03**2 * 128), rel=1e-5)
    assert found["value_error"] == pytest.approx(0.1, rel=1e-5)


def test_coherence_tells_a_shift_from_noise():
    expected = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    noise = 0.1 * torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(1))
    assert measures.coherence(expected + torch.linspace(0, 1, 32), expected) > 0.99
    assert measures.coherence(expected + noise, expected) < 0.15


def test_rows_without_underflow_keep_the_bound_of_eq_8():
    u = -14 * torch.rand(64, 500, generator=torch.Generator().manual_seed(0))
    u[:, 0] = 0
    variation, tail = measures.total_variation(u, "expcast")
    assert tail.max() == 0 and variation.mean() > 0.005 and variation.max() < measures.ROW_BOUND
    assert measures.total_variation(u, "exp")[0].mean() < variation.mean()


def test_rows_with_underflow_keep_the_bound_of_eq_14():
    u = -30 * torch.rand(64, 500, generator=torch.Generator().manual_seed(1)) ** 0.3
    u[:, 0] = 0
    variation, tail = measures.total_variation(u, "expcast")
    assert tail.max() > 0
    assert (variation < measures.ROW_BOUND + tail).all()


def test_probability_error_on_attention_rows():
    q, k, v = sample_qkv("clustered", (1, 1, 64, 128), keys=600)
    found = measures.probability_error(q, k)
    assert found["rows"] == 64
    assert found["exp"]["mean"] < found["expcast"]["mean"] < 0.03
    assert found["expcast"]["largest_over_bound"] < 0
    assert measures.diameter_bound(q, k, v) < 1


def test_gmsd_of_equal_and_of_blurred_pictures():
    picture = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.avg_pool2d(picture, 5, 1, 2)
    assert measures.gmsd(picture, picture).max() == 0
    assert measures.gmsd(picture, blurred).min() > 0.05
    noisy = (picture + 0.01 * torch.randn_like(picture)).clamp(0, 1)
    assert (measures.gmsd(picture, noisy) < measures.gmsd(picture, blurred)).all()
