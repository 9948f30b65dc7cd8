"""The mma.sync kernels against the reference stages, on the codes of their own preparation."""

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, vc_attention
from comfyui_vc_attention.kernels.attend import cuda_int8_fp8_sm89, cuda_int8_int8
from comfyui_vc_attention.kernels.attend import cuda_mma as attend_mma
from comfyui_vc_attention.kernels.attend import reference as attend_reference
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.cuda_builds import MMA_FP8_CARDS
from comfyui_vc_attention.kernels.prepare import cuda_mma, cuda_sm90
from comfyui_vc_attention.kernels.prepare import reference as prepare_reference
from comfyui_vc_attention.kernels.selftest import poison_free_memory
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2

from tests.evidence.bounds import bound, row_of

from .hopper_layout import reference_layout
from .test_cuda_sm90 import by_size, name, poison_absent, sample, scaled, some_order

CARD = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(CARD < (8, 0) or CARD == (10, 3), reason="needs sm_80")]
ATTEND = {"int8_int8": cuda_int8_int8.attend, "int8_fp8": cuda_int8_fp8_sm89.attend}
RECIPES = [Recipe("int8_int8", demean=demean) for demean in (True, False)]
if CARD in MMA_FP8_CARDS:
    RECIPES += [Recipe("int8_fp8", expcast=e, demean=d) for e in (True, False) for d in (True, False)]
# On the same codes. Folded scales move a few codes in 10^4 by one; f16 sums lose 2^-11 a step of 32 keys.
TOLERANCE = {"int8_fp8": 4e-3, "int8_int8": 5e-4}

# What 1024 keys may hold. fp8 sums codes; int8 sums values in fp32 (I4), as PyTorch's attention does, so that
# keys * max |v| has to stay under 3.4e38.
LARGEST_VALUE = {"int8_fp8": 1e36, "int8_int8": 1e35}

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=name)
integers = [recipe for recipe in RECIPES if recipe.numerics == "int8_int8"]
integer_recipes = pytest.mark.parametrize("recipe", integers, ids=name)


@pytest.fixture(autouse=True)
def poisoned_memory():
    if torch.cuda.is_available():
        poison_free_memory(torch.device("cuda"))


def attend(q, k, v, recipe, **options):
    return ATTEND[recipe.numerics](cuda_mma.prepare(q, k, v, recipe, **scaled(q) | options))


def both(q, k, v, recipe, **options):
    """(out, lse) of the kernel, and of the reference on the same codes."""
    operands = cuda_mma.prepare(q, k, v, recipe, **scaled(q) | options)
    return ATTEND[recipe.numerics](operands), attend_reference.attend(reference_layout(operands))


def agrees(result, expected, recipe):
    out, lse = result
    assert out.dtype == expected[0].dtype and out.shape == expected[0].shape
    assert out.transpose(1, 2)[0].is_contiguous()
    rounding = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 0.0}[out.dtype]
    assert relative_l2(out, expected[0]) < TOLERANCE[recipe.numerics] + rounding
    if expected[1] is not None:
        # a code moved by one weighs in a row of few keys
        difference = (lse - expected[1]).abs()
        assert difference.max() < 0.06 and difference.mean() < 2e-3


@every_recipe
@pytest.mark.parametrize("queries", [1, 9, 65, 129, 503])
@pytest.mark.parametrize("keys", [1, 9, 63, 65, 127, 129, 1001, 2175])
def test_lengths(recipe, queries, keys):
    q, k, v = sample("clustered", (2, 3, queries, 128), keys)
    result, expected = both(q, k, v, recipe, order=some_order(k), want_lse=True)
    agrees(result, expected, recipe)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["gauss", "outlier_tokens", "peaked"])
def test_inputs(recipe, dtype, kind):
    q, k, v = sample(kind, (1, 2, 400, 128), 1100, dtype)
    agrees(*both(q, k, v, recipe, want_lse=True), recipe)


@every_recipe
def test_is_attention(recipe):
    q, k, v = sample("gauss", (1, 2, 256, 128), 8192)
    out, lse = attend(q, k, v, recipe, want_lse=True)
    exact, exact_lse = exact_attention(q, k, v)
    assert relative_l2(out, exact) < bound(row_of(recipe))
    torch.testing.assert_close(lse.double(), exact_lse, atol=0.02, rtol=0)


@every_recipe
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("rotate_qk", [True, False])
def test_switches(recipe, smooth_k, rotate_qk):
    recipe = Recipe(recipe.numerics, recipe.expcast, recipe.demean, rotate_qk, smooth_k)
    q, k, v = sample("k_outlier_channels", (1, 2, 200, 128), 700)
    agrees(*both(q, k, v, recipe, want_lse=True), recipe)


@every_recipe
def test_absent_keys_do_not_exist(recipe):
    """Masked equals removed, bit for bit; an item of no keys gives zeros."""
    q, k, v = sample("clustered", (3, 2, 130, 128), 1000)
    counts = torch.tensor([1000, 0, 261], dtype=torch.int32, device="cuda")
    order = some_order(k)
    result, expected = both(q, k, v, recipe, order=order, key_count=counts, want_lse=True)
    assert not result[0][1].any() and (result[1][1] == -torch.inf).all()
    agrees(*[(t[0][::2], t[1][::2]) for t in (result, expected)], recipe)
    left = order[2:, :, :261].long()[..., None].expand(-1, -1, -1, 128)
    out, lse = attend(q[2:], k[2:].gather(2, left), v[2:].gather(2, left), recipe, want_lse=True)
    assert torch.equal(result[0][2:], out) and torch.equal(result[1][2:], lse)


@every_recipe
def test_absent_keys_may_hold_anything(recipe):
    q, k, v = sample("clustered", (2, 2, 70, 128), 500)
    counts = torch.tensor([129, 400], dtype=torch.int32, device="cuda")
    options = {"order": some_order(k), "key_count": counts}
    clean = attend(q, k, v, recipe, **options)[0]
    k, v = (poison_absent(x, options["order"], counts) for x in (k, v))
    assert torch.equal(attend(q, k, v, recipe, **options)[0], clean)


@every_recipe
def test_strides(recipe):
    """Views of one fused projection, whose rows start on odd elements."""
    generator = torch.Generator("cuda").manual_seed(5)
    big = torch.randn(2, 333, 3, 131, device="cuda", generator=generator).bfloat16()
    q, k, v = (big[:, :, :, s : s + 128].transpose(1, 2) for s in (0, 1, 3))
    options = {"want_lse": True, "order": some_order(k)}
    agrees(*both(q, k, v, recipe, **options), recipe)
    whole = attend(*(t.contiguous() for t in (q, k, v)), recipe, **options)
    strided = attend(q, k, v, recipe, **options)
    assert torch.equal(strided[0], whole[0]) and torch.equal(strided[1], whole[1])


@every_recipe
def test_writes_some_heads_of_a_given_output(recipe):
    q, k, v = sample("clustered", (2, 3, 200, 128), 300)
    out = torch.full((2, 200, 7, 128), torch.nan, dtype=q.dtype, device="cuda")
    operands = cuda_mma.prepare(q, k, v, recipe, **scaled(q))
    expected = ATTEND[recipe.numerics](operands)[0]
    ATTEND[recipe.numerics](operands, out[:, :, 2:5].transpose(1, 2))
    assert torch.equal(out[:, :, 2:5].transpose(1, 2), expected)
    assert out[:, :, :2].isnan().all() and out[:, :, 5:].isnan().all()


@every_recipe
@pytest.mark.parametrize("ramp", [(0.0, 6.0), (6.0, 0.0), (-40.0, 40.0), (-30.0, -5.0)])
def test_maxima_that_move(recipe, ramp):
    """Scores that rise, fall or stay negative along the keys, with nothing centred."""
    recipe = Recipe(recipe.numerics, recipe.expcast, recipe.demean, smooth_k=False)
    q, k, v = sample("gauss", (1, 2, 192, 128), 3000)
    direction = torch.randn(128, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    slope = torch.linspace(*ramp, 3000, device="cuda")[None, None, :, None] / 11.3
    q, k = (q + direction).bfloat16(), (k + slope * direction).bfloat16()
    agrees(*both(q, k, v, recipe, want_lse=True), recipe)


@every_recipe
def test_equal_runs_are_equal(recipe):
    q, k, v = sample("clustered", (1, 8, 1000, 128), 5000)
    runs = [attend(q, k, v, recipe)[0] for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)


@every_recipe
@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_huge_logits(recipe, size):
    q, k, v = sample("gauss", (1, 2, 128, 128), 1000)
    q, k = (size * q).bfloat16(), (size * k).bfloat16()
    k[:, :, 500:628] = q
    out, lse = attend(q, k, v, recipe, want_lse=True)
    own = v[:, :, 500:628].float()
    assert out.isfinite().all() and lse.isfinite().all()
    assert (((out.float() - own).norm(dim=-1) / own.norm(dim=-1)) < 0.1).float().mean() > 0.99


@every_recipe
@pytest.mark.parametrize("spread", ["equal", "halves", "one of many"])
@pytest.mark.parametrize("largest", [False, True])
def test_no_value_overflows(recipe, spread, largest):
    """All keys alike, so every probability is the largest, and values at the ends of their codes."""
    size = LARGEST_VALUE[recipe.numerics] if largest else 1.0
    q, k, _ = sample("gauss", (1, 1, 130, 128), 1024)
    v = torch.full_like(k, size)
    if spread == "halves":
        v[:, :, ::2] = -size
    if spread == "one of many":
        v[:, :, ::128] = -size
    out = attend(0 * q, k, v, recipe)[0].float()
    assert out.isfinite().all()
    exact = (v.float() / size).mean(2, keepdim=True)
    assert ((out / size - exact).abs() < 0.02).all()


def older_way(operands, **switches):
    """cuda_int8_int8 with what sm_80 and sm_86 do otherwise."""
    switches = {"USE_MEANS": operands.recipe.demean, "USE_F16_MEANS": False} | switches
    source, shared = cuda_int8_int8.SOURCE, cuda_int8_int8.SHARED_BYTES
    return attend_mma.run(operands, source, "attend_u8s8", switches, shared, 1.0)[0]


@integer_recipes
def test_polled_barriers_change_nothing(recipe):
    q, k, v = sample("clustered", (1, 2, 300, 128), 1001)
    operands = cuda_mma.prepare(q, k, v, recipe, **scaled(q))
    assert torch.equal(older_way(operands, USE_TRY_WAIT=False), cuda_int8_int8.attend(operands)[0])


@integer_recipes
@pytest.mark.parametrize("kind", ["gauss", "clustered", "peaked"])
def test_packing_as_older_cards_do(recipe, kind):
    """By f16's smallest steps. The exponents lie 24 octaves lower, where floats are further apart.

    So bits differ: worked out step by step, one code in 20,000 by one, and relative L2 at most 1.4e-4.
    """
    q, k, v = sample(kind, (1, 2, 300, 128), 1001, torch.float32)
    operands = cuda_mma.prepare(q, k, v, recipe, **scaled(q))
    older = older_way(operands, USE_F16_PACK=True)
    assert relative_l2(older, cuda_int8_int8.attend(operands)[0]) < 4e-4
    expected = attend_reference.attend(reference_layout(operands))
    agrees((older, None), (expected[0], None), recipe)


@pytest.mark.parametrize("recipe", RECIPES[::3], ids=name)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope(recipe, layout):
    q, k, v = sample("gauss", (2, 2, 333, 128), 400)
    angle = 6 * torch.rand(400, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    options = {"rope": (angle.cos(), angle.sin(), layout), "order": some_order(k), "want_lse": True}
    agrees(*both(q, k, v, recipe, **options), recipe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_integer_codes_are_the_references(dtype, monkeypatch):
    recipe = Recipe("int8_int8")
    q, k, v = sample("outlier_tokens", (2, 2, 200, 128), 1016, dtype)
    options = {"order": some_order(k), "want_lse": True} | scaled(q)
    ours = reference_layout(cuda_mma.prepare(q, k, v, recipe, **options))
    options["order"] = by_size(k, recipe, options["order"])
    monkeypatch.setattr(prepare_reference, "K_GROUP", 16)
    expected = prepare_reference.prepare(q, k, v, recipe, **options)
    for field in ("q", "k", "v"):
        difference = (getattr(ours, field).int() - getattr(expected, field).int()).abs()
        assert difference.max() <= 1 and (difference > 0).float().mean() <= 1e-4, field
    for field in ("q_scale", "k_scale", "v_scale", "lse_shift"):
        torch.testing.assert_close(getattr(ours, field), getattr(expected, field), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.v_mean, expected.v_mean, rtol=2e-3, atol=2e-2)


@pytest.mark.skipif(CARD not in MMA_FP8_CARDS, reason="needs E4M3 products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_codes_are_hoppers_over_256(dtype):
    """F6: the scale is 256 times that of F1, so codes are a 256th, exact where both are normal numbers."""
    recipe = Recipe("int8_fp8")
    q, k, v = sample("outlier_tokens", (2, 2, 200, 128), 1016, dtype)
    options = {"order": some_order(k)} | scaled(q)
    small = reference_layout(cuda_mma.prepare(q, k, v, recipe, **options))
    target = cuda_sm90.Target(cuda_mma.arch_of(q.device), 224.0)
    rest = {"key_count": None, "rope": None, "want_lse": False}
    usual = reference_layout(cuda_sm90.quantize(q, k, v, recipe, target, **options, **rest))
    torch.testing.assert_close(small.v_scale, 256 * usual.v_scale, rtol=1e-6, atol=0)
    small, usual = 256 * small.v.float(), usual.v.float()
    normal = usual.abs() >= 8
    assert small.abs().max() <= 448
    assert (small[normal] != usual[normal]).float().mean() <= 1e-3
    assert (small - usual).abs()[~normal].max() <= 0.5


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.demean], ids=name)
def test_long_clip(recipe):
    q, k, v = sample("clustered", (1, 1, 256, 128), 299_520)
    agrees(*both(q, k, v, recipe, want_lse=True), recipe)


def test_by_name_with_its_own_grouping():
    q, k, v = sample("clustered", (1, 2, 600, 128), 1000)
    out = vc_attention(q, k, v, VCConfig(value_format="int8"), kernel="cuda_int8_int8")
    assert relative_l2(out, exact_attention(q, k, v)[0]) < bound("int8_int8, means, sequence")
