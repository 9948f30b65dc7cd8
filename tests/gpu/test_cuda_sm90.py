"""The Hopper kernels against the reference stages: one truth table for every recipe they compute."""

import pytest
import torch
from comfyui_vc_attention.kernels.attend import cuda_int8_fp8_sm90, cuda_int8_int8_sm90
from comfyui_vc_attention.kernels.attend import reference as attend_reference
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare import cuda_sm90
from comfyui_vc_attention.kernels.prepare import reference as prepare_reference
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import bound, row_of

from .hopper_layout import ones_rows, reference_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
ATTEND = {
    "int8_fp8": cuda_int8_fp8_sm90.attend,
    "fp8_fp8": cuda_int8_fp8_sm90.attend,
    "int8_int8": cuda_int8_int8_sm90.attend,
}
RECIPES = [
    Recipe(numerics, expcast=expcast, demean=demean)
    for numerics in ("int8_fp8", "fp8_fp8")
    for expcast in (True, False)
    for demean in (True, False)
] + [Recipe("int8_int8", demean=demean) for demean in (True, False)]
# On the same codes. Folding the scales into the multiply-add moves 3 in 10^4 of the fp8 probabilities by one
# code (F2); the integer recipe moves as few by one step of 255. E4M3 scores come out of a 14-bit accumulator.
LSE_TOLERANCE = {"int8_fp8": 2e-3, "fp8_fp8": 5e-3, "int8_int8": 2e-3}
TOLERANCE = {"int8_fp8": 3e-3, "fp8_fp8": 0.02, "int8_int8": 5e-4}


def name(recipe):
    return f"{recipe.numerics}{'-expcast' * recipe.expcast}{'-means' * recipe.demean}"


every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=name)


def sample(kind="gauss", shape=(1, 2, 300, 128), keys=None, dtype=torch.bfloat16, seed=0):
    return sample_qkv(kind, shape, keys, dtype, "cuda", seed)


def scaled(q):
    return {"softmax_scale": q.shape[-1] ** -0.5}


def both(q, k, v, recipe, **options):
    """(out, lse) of the kernel, and of the reference on the same codes."""
    operands = cuda_sm90.prepare(q, k, v, recipe, **scaled(q) | options)
    return ATTEND[recipe.numerics](operands), attend_reference.attend(reference_layout(operands))


def by_size(k, recipe, order=None):
    """order with the keys of each whole tile by falling size, as the integer kernel takes them (C3)."""
    keys = k.shape[2]
    order = torch.arange(keys, device=k.device).expand(k.shape[:3]) if order is None else order
    k = prepare_reference.in_tile_order(k.float(), order, None)
    k = k - k.mean(2, keepdim=True) if recipe.smooth_k else k
    k = prepare_reference.rotate(k) if recipe.rotate_qk else k
    size = prepare_reference.in_tiles(k.abs().amax(-1, keepdim=True))[..., 0]
    places = size.argsort(dim=-1, descending=True, stable=True)
    places += torch.arange(places.shape[2], device=k.device)[:, None] * 128
    return order.long().gather(2, places.flatten(2)[:, :, :keys]).int()


def agrees(result, expected, recipe):
    out, lse = result
    assert out.dtype == expected[0].dtype and out.shape == expected[0].shape
    assert out.transpose(1, 2)[0].is_contiguous()
    rounding = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 0.0}[out.dtype]
    assert relative_l2(out, expected[0]) < TOLERANCE[recipe.numerics] + rounding
    if expected[1] is not None:
        # a code moved by one weighs in a row of few keys; 14 bits of a large score are not much
        difference = (lse - expected[1]).abs() / expected[1].abs().clamp_min(20.0) * 20.0
        assert difference.max() < 0.06 and difference.mean() < LSE_TOLERANCE[recipe.numerics]


def some_order(k, seed=3):
    noise = torch.rand(k.shape[:3], device=k.device, generator=torch.Generator(k.device).manual_seed(seed))
    return noise.argsort(-1).int()


@every_recipe
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 129), (2, 31), (63, 127), (64, 128), (192, 256), (193, 2049), (300, 2175), (577, 4113)],
)
def test_lengths(recipe, queries, keys):
    q, k, v = sample("clustered", (2, 3, queries, 128), keys)
    result, expected = both(q, k, v, recipe, order=some_order(k), want_lse=True)
    agrees(result, expected, recipe)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["gauss", "outlier_tokens", "peaked"])
def test_inputs(recipe, dtype, kind):
    q, k, v = sample(kind, (1, 2, 400, 128), 1100, dtype)
    result, expected = both(q, k, v, recipe, want_lse=True)
    agrees(result, expected, recipe)


@every_recipe
def test_is_attention(recipe):
    q, k, v = sample("gauss", (1, 2, 256, 128), 8192)
    result, _ = both(q, k, v, recipe, want_lse=True)
    exact, lse = exact_attention(q, k, v)
    assert relative_l2(result[0], exact) < bound(row_of(recipe))
    torch.testing.assert_close(result[1].double(), lse, atol=0.02, rtol=0)


@every_recipe
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("rotate_qk", [True, False])
def test_switches(recipe, smooth_k, rotate_qk):
    recipe = Recipe(recipe.numerics, recipe.expcast, recipe.demean, rotate_qk, smooth_k)
    q, k, v = sample("k_outlier_channels", (1, 2, 200, 128), 700)
    agrees(*both(q, k, v, recipe, want_lse=True), recipe)


@every_recipe
def test_absent_keys_do_not_exist(recipe):
    """Masked equals removed, bit for bit, whatever the masked keys hold."""
    q, k, v = sample("clustered", (3, 2, 130, 128), 1000)
    counts = torch.tensor([1000, 0, 261], dtype=torch.int32, device="cuda")
    order = some_order(k)
    result, expected = both(q, k, v, recipe, order=order, key_count=counts, want_lse=True)
    assert not result[0][1].any() and (result[1][1] == -torch.inf).all()
    agrees(*[(t[0][::2], t[1][::2]) for t in (result, expected)], recipe)
    left = order[2:, :, :261].long()[..., None].expand(-1, -1, -1, 128)
    short = cuda_sm90.prepare(
        q[2:], k[2:].gather(2, left), v[2:].gather(2, left), recipe, **scaled(q), want_lse=True
    )
    out, lse = ATTEND[recipe.numerics](short)
    for counted, removed in ((result[0][2:], out), (result[1][2:], lse)):
        assert torch.equal(counted, removed)


def poison_absent(x, order, counts):
    gone = order.long()[..., None].expand_as(x)
    mask = torch.arange(x.shape[2], device=x.device)[None] >= counts[:, None]
    return x.scatter(
        2, gone, torch.where(mask[:, None, :, None], torch.nan, x.gather(2, gone).float()).to(x.dtype)
    )


@every_recipe
def test_absent_keys_may_hold_anything(recipe):
    q, k, v = sample("clustered", (2, 2, 70, 128), 500)
    counts = torch.tensor([129, 400], dtype=torch.int32, device="cuda")
    order = some_order(k)
    options = {"order": order, "key_count": counts, **scaled(q)}
    clean = ATTEND[recipe.numerics](cuda_sm90.prepare(q, k, v, recipe, **options))[0]
    k, v = poison_absent(k, order, counts), poison_absent(v, order, counts)
    assert torch.equal(ATTEND[recipe.numerics](cuda_sm90.prepare(q, k, v, recipe, **options))[0], clean)


@every_recipe
def test_strides(recipe):
    """Rows that start on odd elements, heads inside rows, batches apart."""
    big = torch.randn(
        2, 333, 3, 131, device="cuda", generator=torch.Generator("cuda").manual_seed(5)
    ).bfloat16()
    q, k, v = (big[:, :, :, s : s + 128].transpose(1, 2) for s in (0, 1, 3))
    options = {"want_lse": True, "order": some_order(k)}
    agrees(*both(q, k, v, recipe, **options), recipe)
    strided = ATTEND[recipe.numerics](cuda_sm90.prepare(q, k, v, recipe, **scaled(q), **options))
    q, k, v = (t.contiguous() for t in (q, k, v))
    whole = ATTEND[recipe.numerics](cuda_sm90.prepare(q, k, v, recipe, **scaled(q), **options))
    assert torch.equal(strided[0], whole[0]) and torch.equal(strided[1], whole[1])


@every_recipe
@pytest.mark.parametrize("ramp", [(0.0, 6.0), (-6.0, 0.0), (6.0, 0.0), (-40.0, 40.0), (-30.0, -5.0)])
def test_maxima_that_move(recipe, ramp):
    """Scores that rise, fall or stay negative along the keys, with nothing centred."""
    recipe = Recipe(recipe.numerics, recipe.expcast, recipe.demean, smooth_k=False)
    q, k, v = sample("gauss", (1, 2, 192, 128), 3000)
    direction = torch.randn(128, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    slope = torch.linspace(*ramp, 3000, device="cuda")[None, None, :, None] / 11.3
    q, k = (q + direction).bfloat16(), (k + slope * direction).bfloat16()
    agrees(*both(q, k, v, recipe, want_lse=True), recipe)


@every_recipe
def test_one_late_key_takes_all(recipe):
    q, k, v = sample("gauss", (1, 1, 100, 128), 2048)
    k[:, :, 2047] = 20 * q[:, :, :1].mean(2)
    agrees(*both(q, k, v, recipe, want_lse=True), recipe)


@every_recipe
def test_equal_runs_are_equal(recipe):
    q, k, v = sample("clustered", (1, 8, 1000, 128), 5000)
    runs = [ATTEND[recipe.numerics](cuda_sm90.prepare(q, k, v, recipe, **scaled(q))) for _ in range(5)]
    assert all(torch.equal(run[0], runs[0][0]) for run in runs)


def many_blocks(heads=8, keys=20_000):
    """More query blocks than multiprocessors, ten groups of tile means, a last tile of 32 keys."""
    generator = torch.Generator("cuda").manual_seed(7)
    q, k, v = (
        torch.randn(1, keys, heads, 128, device="cuda", generator=generator).bfloat16().transpose(1, 2)
        for _ in range(3)
    )
    k += torch.randn(1, heads, 1, 128, device="cuda", generator=generator).bfloat16()
    return q, k, v, some_order(k)


def prepared(q, k, v, recipe, order, **options):
    return cuda_sm90.prepare(q, k, v, recipe, order=order, **scaled(q), **options)


def bytes_of(operands):
    parts = {name: getattr(operands, name) for name in ("q", "q_scale", "k", "v", "v_scale", "means")}
    return {name: part.contiguous().view(torch.uint8) for name, part in parts.items() if part is not None}


@every_recipe
def test_operands_do_not_depend_on_strides_or_memory(recipe):
    """Whatever lay in the memory before, and wherever q, k and v lie."""
    q, k, v, order = many_blocks()
    first = bytes_of(prepared(q, k, v, recipe, order))
    for case in ("again", "contiguous", "poisoned"):
        if case == "contiguous":
            q, k, v = (x.contiguous() for x in (q, k, v))
        if case == "poisoned":
            torch.cuda.empty_cache()
            torch.full(
                (1 << 28,), torch.nan, device="cuda"
            )  # 1 GiB, from which the allocator cuts what follows
        for field, found in bytes_of(prepared(q, k, v, recipe, order)).items():
            assert torch.equal(found, first[field]), (case, field)


@every_recipe
def test_blocks_that_take_turns_are_equal(recipe):
    """Every multiprocessor takes several blocks: runs are equal, and equal to one block a multiprocessor."""
    q, k, v, order = many_blocks()
    operands = prepared(q, k, v, recipe, order, want_lse=True)
    out, lse = ATTEND[recipe.numerics](operands)
    for _ in range(100):  # what this found in one kernel was one run in three
        for found, first in zip(ATTEND[recipe.numerics](operands), (out, lse), strict=True):
            assert torch.equal(found, first)
    for head in range(8):
        part = slice(head, head + 1)
        alone = prepared(q[:, part], k[:, part], v[:, part], recipe, order[:, part])
        assert torch.equal(ATTEND[recipe.numerics](alone)[0], out[:, part]), head


@every_recipe
def test_long_calls_repeat(recipe):
    """Bits that depend on when a copy lands differ once in millions of tiles: short calls hide it."""
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    q, k, v, order = many_blocks(40, 75_600)
    operands = prepared(q, k, v, recipe, order)
    first = ATTEND[recipe.numerics](operands)[0]
    for _ in range(3):
        assert torch.equal(ATTEND[recipe.numerics](operands)[0], first)


@every_recipe
def test_many_blocks_agree(recipe):
    q, k, v, order = many_blocks(3)
    q = torch.cat([q] * 2, 2)[:, :, :30_000]
    operands = prepared(q, k, v, recipe, order)
    out = ATTEND[recipe.numerics](operands)[0]
    rows = torch.arange(0, 30_000, 7, device="cuda")
    expected = attend_reference.attend(reference_layout(prepared(q[:, :, rows], k, v, recipe, order)))[0]
    assert relative_l2(out[:, :, rows], expected) < TOLERANCE[recipe.numerics] + 2e-3


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.numerics == "int8_int8"], ids=name)
@pytest.mark.parametrize("value", [0.0, 0.75])
def test_channels_of_one_value_are_exact(recipe, value):
    """Zeros stay zeros: no rounding of an accumulator's conversion reaches them."""
    q, k, v = sample("gauss", (1, 2, 200, 128), 1000)
    v[..., ::3] = value
    out = ATTEND[recipe.numerics](prepared(q, k, v, recipe, None))[0]
    assert (out[..., ::3] - value).abs().max() <= value / 128


@every_recipe
@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_huge_logits(recipe, size):
    """Scores of up to 1e10 octaves: no code leaves its range, rows whose best key is clear get its value."""
    q, k, v = sample("gauss", (1, 2, 128, 128), 1000)
    q, k = (size * q).bfloat16(), (size * k).bfloat16()
    k[:, :, 500:628] = q
    result, expected = both(q, k, v, recipe, want_lse=True)
    assert result[0].isfinite().all() and result[1].isfinite().all()
    own = v[:, :, 500:628].float()
    for out in (result[0], expected[0]):
        assert (((out.float() - own).norm(dim=-1) / own.norm(dim=-1)) < 0.1).float().mean() > 0.99


@pytest.mark.parametrize("numerics", sorted(ATTEND))
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("angles", ["shared", "of each batch", "off 16 bytes", "of some keys"])
def test_rope(numerics, layout, angles):
    """Codes are those of what the reference turns; over several chunks of statistics."""
    recipe = Recipe(numerics)
    q, k, v = sample("gauss", (2, 3, 333, 128), 2100)
    rope, options = rope_and_options(k, layout, angles)
    ours = cuda_sm90.prepare(q, k, v, recipe, rope=rope, **options, **scaled(q))
    turned = (prepare_reference.apply_rope(t.float(), *rope) for t in (q, k))
    same_codes(ours, cuda_sm90.prepare(*turned, v, recipe, **options, **scaled(q)))
    agrees(ATTEND[numerics](ours), attend_reference.attend(reference_layout(ours)), recipe)


def rope_and_options(k, layout, angles):
    """(angles of that kind, order and keys that exist)."""
    generator = torch.Generator("cuda").manual_seed(2)
    shape = (len(k), k.shape[2], 64) if angles == "of each batch" else (k.shape[2], 64)
    angle = 6 * torch.rand(shape, device="cuda", generator=generator)
    tables = angle.cos(), angle.sin()
    if angles == "off 16 bytes":
        tables = (angle.new_empty(angle.numel() + 1)[1:].view_as(t).copy_(t) for t in tables)
    options = {"order": some_order(k), "want_lse": True}
    if angles == "of some keys":
        options["key_count"] = torch.tensor([k.shape[2], 1300], dtype=torch.int32, device="cuda")
    return (*tables, layout), options


def same_codes(ours, theirs):
    """But for what fp32 rounds otherwise: a code in thousands, with INT8 values two keys of like size."""
    many = 0.02 if ours.recipe.value_format == "int8" else 1e-3
    ours, theirs = reference_layout(ours), reference_layout(theirs)
    for field in ("q", "k", "v"):
        a, b = (getattr(each, field).view(torch.uint8) for each in (ours, theirs))
        assert (a != b).float().mean() <= many, field
    for field in ("q_scale", "k_scale", "lse_shift"):
        a, b = (getattr(each, field)[:1] for each in (ours, theirs))  # the clip whose keys all exist
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numerics", sorted(ATTEND))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_the_references(numerics, dtype, monkeypatch):
    recipe = Recipe(numerics)
    q, k, v = sample("outlier_tokens", (2, 2, 200, 128), 1016, dtype)
    options = {"order": some_order(k), "want_lse": True} | scaled(q)
    operands = cuda_sm90.prepare(q, k, v, recipe, **options)
    ours, expected = reference_layout(operands), prepare_reference.prepare(q, k, v, recipe, **options)
    if numerics == "int8_int8":
        options["order"] = by_size(k, recipe, options["order"])
        monkeypatch.setattr(prepare_reference, "K_GROUP", 16)
        expected = prepare_reference.prepare(q, k, v, recipe, **options)
    # two keys of one size but for rounding may have changed places
    placed = (ours.k.view(torch.uint8) == expected.k.view(torch.uint8)).float().mean(-1) > 0.5
    assert placed.float().mean() > (0.99 if numerics == "int8_int8" else 0.9999)
    for field in ("q", "k", "v"):
        got, want = getattr(ours, field), getattr(expected, field)
        if field != "q":
            got, want = got[placed], want[placed]
        assert (got.view(torch.uint8) != want.view(torch.uint8)).float().mean() <= 1e-4, field
        if got.dtype == torch.int8:
            assert (got.int() - want.int()).abs().max() <= 1
    for field in ("q_scale", "k_scale", "v_scale", "lse_shift"):
        torch.testing.assert_close(getattr(ours, field), getattr(expected, field), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.v_mean, expected.v_mean, rtol=2e-3, atol=2e-2)
    if recipe.value_format == "fp8":
        ones = ones_rows(operands).flatten(-1)
        assert (ones[:, :, :7] == 0x38).all() and (ones[:, :, 7, :, : 1016 - 896] == 0x38).all()
        assert not ones[:, :, 7, :, 1016 - 896 :].any()


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.expcast or r.numerics == "int8_int8"], ids=name)
def test_long_clip(recipe):
    q, k, v = sample("clustered", (1, 1, 256, 128), 299_520)
    result, expected = both(q, k, v, recipe, want_lse=True)
    agrees(result, expected, recipe)
