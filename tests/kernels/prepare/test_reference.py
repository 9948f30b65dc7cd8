"""Each preparation step, and the paper's identities about tile means (Eq. 3 to 5)."""

import pytest
import torch
from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare import reference
from comfyui_vc_attention.kernels.testing import sample_qkv

LENGTHS = [1, 63, 127, 128, 129, 300]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_energy_identity_of_the_mean():
    """Eq. 5: any vector c leaves |R|^2 + B_v |c - mu|^2, and the mean leaves the least."""
    v = torch.randn(1, 1, 128, 64, dtype=torch.float64, generator=generator())
    c = torch.randn(64, dtype=torch.float64, generator=generator(1))
    mean = reference.tile_means(v)[0, 0, 0]
    residual = ((v - mean) ** 2).sum()
    torch.testing.assert_close(((v - c) ** 2).sum(), residual + 128 * ((c - mean) ** 2).sum())
    torch.testing.assert_close(residual, (v**2).sum() - 128 * (mean**2).sum())


@pytest.mark.parametrize("length", LENGTHS)
def test_values_are_mean_plus_residual(length):
    v = torch.randn(2, 3, length, 64, dtype=torch.float64, generator=generator(length))
    means = reference.tile_means(v)
    residual = reference.residuals(v, means)
    restored = residual + means.repeat_interleave(128, 2)[:, :, :length]
    torch.testing.assert_close(restored, v, atol=1e-15, rtol=1e-15)


def test_a_short_last_tile_averages_its_real_keys_only():
    v = torch.ones(1, 1, 130, 4)
    assert reference.tile_means(v).tolist() == [[[[1.0] * 4] * 2]]
    counted = reference.tile_means(reference.existing(v, torch.tensor([3])), torch.tensor([3]))
    assert counted[0, 0].tolist() == [[1.0] * 4, [0.0] * 4]


def test_key_mean_counts_existing_keys_only():
    k = torch.randn(2, 1, 10, 4, generator=generator())
    counts = torch.tensor([10, 4])
    mean = reference.key_mean(reference.existing(k, counts), counts)
    torch.testing.assert_close(mean[1, 0, 0], k[1, 0, :4].mean(0))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_rotates_pairs(layout):
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, generator=generator())
    angle = torch.rand(5, 4, dtype=torch.float64, generator=generator(1))
    out = reference.apply_rope(x, angle.cos(), angle.sin(), layout)
    pairs = (
        (lambda t: (t[..., 0::2], t[..., 1::2])) if layout == "interleaved" else (lambda t: t.chunk(2, -1))
    )
    expected = torch.complex(*pairs(x)) * torch.exp(1j * angle)
    a, b = pairs(out)
    torch.testing.assert_close(torch.complex(a, b), expected)


@pytest.mark.parametrize("top", [formats.INT8_MAX, formats.E4M3_MAX])
@pytest.mark.parametrize("length", LENGTHS)
def test_group_scales(length, top):
    cast = formats.to_int8 if top == formats.INT8_MAX else formats.to_e4m3
    x = torch.randn(1, 2, length, 64, generator=generator(length))
    codes, scale = reference.quantize_qk(x, 32, top, cast)
    assert codes.shape == x.shape and scale.shape == (1, 2, -(-length // 32))
    for group in range(scale.shape[2]):
        rows = x[:, :, 32 * group : 32 * group + 32]
        torch.testing.assert_close(scale[:, :, group], rows.abs().amax((2, 3)) / top)
        error = (
            codes[:, :, 32 * group : 32 * group + 32].float() * scale[:, :, group, None, None] - rows
        ).abs()
        assert (error <= scale[:, :, group, None, None] * (0.5 if top == 127 else 16) * 1.001).all()


def test_zero_rows_have_scale_one():
    codes, scale = reference.quantize_qk(torch.zeros(1, 1, 2, 64), 1, formats.INT8_MAX, formats.to_int8)
    assert scale.tolist() == [[[1.0, 1.0]]] and not codes.any()


def test_int8_values_use_the_stored_mean():
    """C5: against the unrounded mean the error of N(50, 1) values would be half their spread."""
    v = 50 + torch.randn(1, 1, 128, 64, generator=generator())
    parts = reference.values_int8(v, reference.tile_means(v), torch.bfloat16, None)
    restored = parts["v"].float() * parts["v_scale"][:, :, 0, None] + parts["v_mean"][:, :, 0, None].float()
    assert ((restored - v).norm() / (v - v.mean()).norm()).item() < 0.02


@pytest.mark.parametrize(("keys", "left"), [(128, 0.5), (64, 0.6), (1, 1.01)])
def test_int8_rounding_errors_sum_to_little(keys, left):
    """I1: weights that are alike see little of what rounding missed; a lone key has what it had."""
    v = torch.randn(1, 64, keys, 128, generator=generator(keys))
    parts = reference.values_int8(v, None, torch.bfloat16, None)
    steps = v / parts["v_scale"]
    missed = (steps - parts["v"].float()).sum(2).square().mean()
    assert (parts["v"].abs() <= 127).all() and (steps - parts["v"].float()).abs().max() < 0.7
    assert missed <= left**2 * (steps - torch.round(steps)).sum(2).square().mean() + 1e-9


def test_fp8_values_cannot_saturate():
    """F1: the scale comes from |v|, so a residual is at most 2 amax = 448 scales."""
    v = torch.cat([torch.full((1, 1, 127, 4), -3.0), torch.full((1, 1, 1, 4), 3.0)], 2)
    parts = reference.values_fp8(v, reference.tile_means(v), torch.bfloat16, None)
    restored = (parts["v"].float() + parts["v_mean"][:, :, 0, None].float()) * parts["v_scale"][:, :, None]
    assert ((restored - v).abs() / v.abs()).max() < 0.07


def test_fp8_means_are_in_units_of_the_scale():
    v = 2.5 * torch.ones(1, 1, 128, 8)
    parts = reference.values_fp8(v, reference.tile_means(v), torch.bfloat16, None)
    assert parts["v_mean"].unique().tolist() == [224.0] and not parts["v"].float().any()


def test_nvfp4_microscales():
    x = torch.randn(1, 2, 7, 64, generator=generator())
    g = reference._nvfp4_global(x)
    codes, sigma = reference.microscaled(x, g[..., None])
    values = (
        formats.from_e2m1(codes).unflatten(-1, (-1, 16)) * (sigma.float() * g[..., None, None])[..., None]
    )
    assert codes.shape == x.shape and sigma.shape == (1, 2, 7, 4) and sigma.dtype == torch.float8_e4m3fn
    assert ((values.flatten(-2) - x).norm() / x.norm()).item() < 0.12
    zero, zero_sigma = reference.microscaled(torch.zeros(1, 16), torch.ones(1))
    assert not zero.any() and not zero_sigma.float().any()


@pytest.mark.parametrize("numerics", ["int8_int8", "int8_fp8", "fp8_fp8", "nvfp4"])
def test_absent_keys_leave_no_trace(numerics):
    """Codes, scales and means of a call whose key_count is short are those of the shorter call."""
    q, k, v = sample_qkv(shape=(2, 2, 40, 64), keys=300)
    k[:, :, 200:], v[:, :, 200:] = torch.nan, torch.inf
    counted = reference.prepare(
        q, k, v, Recipe(numerics), key_count=torch.tensor([200, 200]), softmax_scale=0.1, want_lse=True
    )
    short = reference.prepare(
        q, k[:, :, :200], v[:, :, :200], Recipe(numerics), softmax_scale=0.1, want_lse=True
    )
    assert torch.equal(counted.q.float(), short.q.float())
    assert (
        torch.equal(counted.k[:, :, :200].float(), short.k.float())
        and not counted.k[:, :, 200:].float().any()
    )
    torch.testing.assert_close(counted.lse_shift, short.lse_shift)
    tiles = short.v_mean.shape[2]
    assert torch.equal(counted.v_mean[:, :, :tiles], short.v_mean) and not counted.v_mean[:, :, tiles:].any()
    if numerics == "nvfp4":
        assert torch.equal(counted.v[:, :, :tiles], short.v) and not counted.v[:, :, tiles:].any()
    else:
        assert torch.equal(counted.v[:, :, :200].float(), short.v.float())
        assert not counted.v[:, :, 200:].float().any()


def test_16_bit_means_follow_the_input():
    q, k, v = sample_qkv(shape=(1, 1, 8, 64), dtype=torch.float16)
    assert reference.prepare(q, k, v, Recipe("int8_int8"), softmax_scale=1.0).v_mean.dtype == torch.float16
    q, k, v = sample_qkv(shape=(1, 1, 8, 64), dtype=torch.bfloat16)
    assert reference.prepare(q, k, v, Recipe("int8_int8"), softmax_scale=1.0).v_mean.dtype == torch.bfloat16


def test_demean_off_stores_no_mean():
    q, k, v = sample_qkv(shape=(1, 1, 8, 64))
    assert reference.prepare(q, k, v, Recipe("int8_int8", demean=False), softmax_scale=1.0).v_mean is None
