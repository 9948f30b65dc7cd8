"""The shared inputs have the properties they are named for."""

import pytest
import torch
from comfyui_vc_attention.kernels.testing import (
    KINDS,
    cosine,
    energy_removed,
    exact_attention,
    relative_l2,
    sample_qkv,
)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_seed(kind):
    q, k, v = sample_qkv(kind, (1, 2, 30, 64), keys=50, dtype=torch.float16, seed=3)
    assert q.shape == (1, 2, 30, 64) and k.shape == v.shape == (1, 2, 50, 64) and q.dtype == torch.float16
    assert torch.equal(v, sample_qkv(kind, (1, 2, 30, 64), keys=50, dtype=torch.float16, seed=3)[2])


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind must be one of gauss"):
        sample_qkv("uniform")


def test_exact_attention_is_torchs():
    q, k, v = (t.double() for t in sample_qkv(shape=(1, 2, 30, 64), keys=50))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(exact_attention(q, k, v)[0], expected)


def test_error_measures():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert relative_l2(x, x) == 0 and relative_l2(1.01 * x, x) == pytest.approx(0.01)
    assert cosine(3 * x, x) == pytest.approx(1.0)


def test_energy_removed():
    assert energy_removed(torch.ones(1, 1, 256, 8)) == pytest.approx(1.0)
    noise = torch.randn(1, 2, 1024, 64, generator=torch.Generator().manual_seed(0))
    assert energy_removed(noise) == pytest.approx(1 / 128, rel=0.1)
