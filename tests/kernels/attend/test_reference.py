"""The online softmax with mean restoration (Eq. 1, 6), each recipe's error, and the claims of the method."""

import math

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.attend.reference import OnlineSoftmax, attend, scores
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.formats import LOG2E
from comfyui_vc_attention.kernels.prepare.reference import prepare, residuals, tile_means
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import HARD, bound, row_of

RECIPES = {
    "int8_int8": Recipe("int8_int8"),
    "int8_fp8": Recipe("int8_fp8"),
    "int8_fp8+expcast": Recipe("int8_fp8", expcast=True),
    "fp8_fp8+expcast": Recipe("fp8_fp8", expcast=True),
    "nvfp4": Recipe("nvfp4", rotate_qk=False),
}
BOUND = {name: bound(row_of(recipe)) for name, recipe in RECIPES.items()}  # relative L2 on N(0, 1)
# chosen, no table has them: mean distance in natural logarithms
LSE_BOUND = {name: 0.02 for name in RECIPES} | {"fp8_fp8+expcast": 0.05, "nvfp4": 0.1}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def run(name, q, k, v, **options):
    scale = q.shape[-1] ** -0.5
    return attend(prepare(q, k, v, RECIPES[name], softmax_scale=scale, want_lse=True, **options))


def test_mean_restoration_is_exact_without_quantization():
    """Eq. 6 in float64: residual product plus row sum times mean is P V, to float epsilon."""
    q, k, v = (t.double() for t in sample_qkv("clustered", (1, 2, 50, 64), keys=300))
    v = v + 100
    means = tile_means(v)
    residual = residuals(v, means)
    softmax = OnlineSoftmax((1, 2, 50), 64, torch.float64, "cpu")
    for j in range(3):
        rows = slice(128 * j, 128 * j + 128)
        t = q @ k[:, :, rows].transpose(-1, -2) / 8 * math.log2(math.e)
        softmax.raise_maximum(t.amax(-1))
        p = torch.exp2(t - softmax.maximum[..., None])
        mass = p.sum(-1)
        softmax.add(p @ residual[:, :, rows] + mass[..., None] * means[:, :, j, None], mass)
    exact, lse = exact_attention(q, k, v)
    torch.testing.assert_close(softmax.result(), exact, atol=1e-12, rtol=1e-13)
    torch.testing.assert_close(math.log(2) * (softmax.maximum + softmax.normalizer.log2()), lse)


@every_recipe
@pytest.mark.parametrize(("lq", "lk"), [(1, 1), (9, 63), (65, 127), (128, 129), (200, 503), (64, 1001)])
def test_error_within_the_format(name, lq, lk):
    q, k, v = sample_qkv(shape=(2, 2, lq, 128), keys=lk, dtype=torch.bfloat16, seed=lk)
    out, lse = run(name, q, k, v)
    exact, exact_lse = exact_attention(q, k, v)
    assert out.dtype == torch.bfloat16 and out.shape == q.shape and out.transpose(1, 2).is_contiguous()
    assert relative_l2(out, exact) < BOUND[name]
    assert (lse - exact_lse).abs().mean() < LSE_BOUND[name] + (0.08 if lk < 100 else 0.0)


@every_recipe
def test_permuting_keys_and_values_changes_nothing_but_rounding(name):
    q, k, v = sample_qkv(shape=(1, 2, 64, 64), keys=384)
    order = torch.stack([torch.randperm(384, generator=torch.Generator().manual_seed(s)) for s in (1, 2)])
    out, lse = run(name, q, k, v, order=order[None].int())
    exact, _ = exact_attention(q, k, v)
    assert relative_l2(out, exact) < 1.1 * BOUND[name]  # 64 channels: fewer to average over
    index = order[None, ..., None].expand(-1, -1, -1, 64)
    again, lse_again = run(name, q, k.gather(2, index), v.gather(2, index))
    assert relative_l2(again, out) < 1e-5 and (lse - lse_again).abs().max() < 1e-4


@every_recipe
def test_a_key_constant_changes_nothing(name):
    """Field fault N10: softmax does not see a per-channel constant on K."""
    q, k, v = sample_qkv(shape=(1, 1, 64, 64), keys=256)
    base, _ = run(name, q, k, v)
    shift = 100 * torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(5))
    moved, moved_lse = run(name, q, k + shift, v)
    exact, exact_lse = exact_attention(q, k + shift, v)
    assert relative_l2(moved, exact) < 1.1 * relative_l2(base, exact_attention(q, k, v)[0])
    assert (moved_lse - exact_lse).abs().mean() < LSE_BOUND[name] + 1e-3


@every_recipe
def test_without_keys_the_row_is_zero(name):
    q, k, v = sample_qkv(shape=(2, 1, 8, 64), keys=130)
    out, lse = run(name, q, k, v, key_count=torch.tensor([130, 0]).int())
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert out[0].any() and lse[0].isfinite().all()


@every_recipe
@pytest.mark.parametrize("value", [1e-6, 1.0, 3e5])
def test_constant_values_come_back(name, value):
    q, k, _ = sample_qkv(shape=(1, 1, 32, 64), keys=300)
    out, _ = run(name, q, k, torch.full((1, 1, 300, 64), value))
    torch.testing.assert_close(out, torch.full_like(out, value), rtol=4e-3, atol=0)


@every_recipe
def test_huge_logits(name):
    q, k, v = sample_qkv(shape=(1, 1, 64, 64), keys=300)
    out, lse = run(name, 300 * q, 3 * k, v)
    assert out.isfinite().all() and lse.isfinite().all()


def rising_scores(steps):
    """A row whose maximum grows by one octave in each of `steps` tiles."""
    q = torch.zeros(1, 1, 4, 64)
    q[..., 0] = 8.0
    k = torch.zeros(1, 1, 128 * steps, 64)
    k[..., 0] = torch.arange(128 * steps).div(128, rounding_mode="floor") * math.log(2)
    return q, k


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
def test_rising_maxima(name):
    q, k = rising_scores(9)
    v = torch.randn(1, 1, k.shape[2], 64, generator=torch.Generator().manual_seed(7))
    out, _ = run(name, q, k, v)
    # one tile of the last keys has most of the weight
    assert relative_l2(out, exact_attention(q, k, v)[0]) < bound(row_of(RECIPES[name]), margin=HARD)


def test_grouping_helps_when_values_cluster():
    q, k, v = sample_qkv("clustered", (1, 2, 256, 128), keys=4096)
    exact, _ = exact_attention(q, k, v)
    for config in (VCConfig(), VCConfig(expcast="on"), VCConfig("4-bit")):
        grouped = relative_l2(
            vc_attention(q, k, v, config, grouping=group_tokens(v, 64), kernel="reference"), exact
        )
        plain = relative_l2(vc_attention(q, k, v, config, kernel="reference"), exact)
        assert grouped < plain


def test_int8_survives_value_outliers():
    """The reason for a scale per tile and channel: a spike spoils one tile, not the sequence."""
    q, k, v = sample_qkv("outlier_tokens", (1, 2, 128, 128), keys=4096)
    exact, _ = exact_attention(q, k, v)
    grouping = group_tokens(v, 128)
    int8 = relative_l2(vc_attention(q, k, v, grouping=grouping, kernel="reference"), exact)
    fp8 = relative_l2(
        vc_attention(q, k, v, VCConfig(expcast="on"), grouping=grouping, kernel="reference"), exact
    )
    assert int8 < 0.6 * fp8


def one_key_among_its_tile(demean):
    """Output and exact output where one key outweighs the others, which round to nothing."""
    q, k, v = torch.zeros(1, 1, 1, 128), torch.zeros(1, 1, 128, 128), torch.ones(1, 1, 128, 128)
    q[..., 0], k[..., 0, 0] = 8.0, 9.0
    v[:, :, 0] = 0.0
    recipe = Recipe("int8_int8", demean=demean, rotate_qk=False, smooth_k=False)
    out, _ = attend(prepare(q, k, v, recipe, softmax_scale=128**-0.5))
    return out, exact_attention(q, k, v)[0]


def test_int8_returns_what_rounding_takes_as_the_mean_of_the_tile():
    out, exact = one_key_among_its_tile(demean=True)
    assert relative_l2(out, exact) < 0.02
    assert relative_l2(one_key_among_its_tile(demean=False)[0], exact) > 0.9


def test_int8_without_means_keeps_constant_values():
    q, k, _ = sample_qkv("peaked", (1, 1, 32, 64), keys=300)
    recipe = Recipe("int8_int8", demean=False)
    out, _ = attend(prepare(q, k, torch.full((1, 1, 300, 64), 3.0), recipe, softmax_scale=0.125))
    torch.testing.assert_close(out, torch.full_like(out, 3.0), rtol=1e-5, atol=0)


def test_rotation_helps_outlier_channels_of_k():
    q, k, v = sample_qkv("k_outlier_channels", (1, 2, 128, 128), keys=2048)
    exact, _ = exact_attention(q, k, v)
    rotated, plain = (
        relative_l2(vc_attention(q, k, v, VCConfig(rotate_qk=on), kernel="reference"), exact)
        for on in (True, False)
    )
    assert rotated < 0.7 * plain


def test_absent_lse_is_none():
    q, k, v = sample_qkv(shape=(1, 1, 8, 64))
    assert attend(prepare(q, k, v, RECIPES["int8_int8"], softmax_scale=0.125))[1] is None


@pytest.mark.parametrize("queries", [1, 130, 300])
def test_smoothed_queries_keep_what_their_block_shares(queries):
    """N3: a mean that many times outweighs what tells queries apart costs their codes nothing."""
    q, k, v = sample_qkv("clustered", (1, 2, queries, 128), keys=400, dtype=torch.float32)
    exact, exact_lse = exact_attention(q + 3.0, k, v)
    errors = []
    for smooth_q in (True, False):
        recipe = Recipe("nvfp4", rotate_qk=False, smooth_q=smooth_q)
        out, lse = attend(prepare(q + 3.0, k, v, recipe, softmax_scale=128**-0.5, want_lse=True))
        errors.append(relative_l2(out, exact))
        if smooth_q:
            assert (lse - exact_lse).abs().mean() < 0.1
    assert errors[0] < 0.75 * errors[1]


def test_smoothed_queries_change_no_exact_score():
    q, k, v = (t.double() for t in sample_qkv("clustered", (1, 2, 200, 128), keys=300))
    recipe = Recipe("nvfp4", rotate_qk=True, smooth_q=True)
    operands = prepare(q, k, v, recipe, softmax_scale=1.0)
    centred = k - k.mean(2, keepdim=True)
    torch.testing.assert_close(operands.k_centred, centred)
    torch.testing.assert_close(operands.q_means[:, :, 1], q[:, :, 128:].mean(2))
    one = prepare(q[:, :, :1], k, v, recipe, softmax_scale=1.0)  # its mean is the query: all of it is exact
    expected = q[:, :, :1] @ centred.transpose(-1, -2) * LOG2E
    torch.testing.assert_close(scores(one, 0, torch.float64), expected[..., :128])
