"""The E4M3-value Triton kernel against the reference on the same operands, and against exact attention."""

import dataclasses

import pytest
import torch
from comfyui_vc_attention.kernels.attend import triton_int8_fp8
from comfyui_vc_attention.kernels.attend.reference import attend as reference_attend
from comfyui_vc_attention.kernels.attend.triton_int8_fp8 import attend, expcast, launch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.formats import expcast_codes
from comfyui_vc_attention.kernels.operands import TokenGrouping
from comfyui_vc_attention.kernels.prepare.triton_int8_fp8 import prepare
from comfyui_vc_attention.kernels.prepare.triton_layout import reference_layout
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import bound, row_of

triton = pytest.importorskip("triton")
tl = triton.language
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = Recipe("int8_fp8", expcast=True)
# against the reference: fp16 row sums at the means; on Hopper also 14-bit accumulators within a tile
TOLERANCE = 2e-3 if DEVICE == "cuda" else 3e-4
LSE_TOLERANCE = 2e-3
EXACT_TOLERANCE = bound(row_of(RECIPE))


def shuffled(b, h, keys, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(b, h, keys, generator=generator).argsort(-1).int().to(DEVICE)


def check(q, k, v, recipe=RECIPE, exact_tolerance=EXACT_TOLERANCE, exact_lse=0.05, **options):
    """Kernel and reference agree on the same operands, and both are near exact attention."""
    operands = prepare(q, k, v, recipe, softmax_scale=q.shape[-1] ** -0.5, want_lse=True, **options)
    out, lse = attend(operands)
    expected, expected_lse = reference_attend(reference_layout(operands))
    assert out.shape == q.shape and out.dtype == q.dtype and out.transpose(1, 2).is_contiguous()
    rounding = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 4e-3}[q.dtype]
    assert relative_l2(out, expected) < TOLERANCE + rounding
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=LSE_TOLERANCE)
    if exact_tolerance:
        exact, true_lse = exact_attention(q, k, v)
        assert relative_l2(out, exact) < exact_tolerance
        torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=exact_lse)
    return out


@pytest.mark.parametrize("keys", [1, 9, 63, 65, 127, 129, 503])
def test_lengths(keys):
    q, k, v = sample_qkv("clustered", (1, 2, 40, 128), keys=keys, device=DEVICE)
    check(q, k, v, order=shuffled(1, 2, keys))


def test_more_than_sixteen_tiles():
    q, k, v = sample_qkv("clustered", (1, 1, 20, 128), keys=128 * 18 + 5, device=DEVICE)
    check(q, k, v)


def test_exactly_sixteen_tiles():
    q, k, v = sample_qkv("clustered", (1, 1, 20, 128), keys=128 * 16, device=DEVICE)
    check(q, k, v)


@pytest.mark.parametrize("recipe", [
    dataclasses.replace(RECIPE, expcast=False),
    dataclasses.replace(RECIPE, demean=False),
    dataclasses.replace(RECIPE, smooth_k=False, rotate_qk=False),
], ids=["exp2", "no means", "plain qk"])  # fmt: skip
def test_recipes(recipe):
    q, k, v = sample_qkv("gauss", (2, 1, 65, 128), keys=260, device=DEVICE)
    check(q, k, v, recipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dtypes_and_head_dims(dtype, head_dim):
    q, k, v = sample_qkv("clustered", (1, 2, 70, head_dim), keys=200, dtype=dtype, device=DEVICE)
    check(q, k, v)


def test_absent_keys_are_removed_keys():
    q, k, v = sample_qkv("clustered", (2, 1, 30, 128), keys=300, device=DEVICE)
    order = shuffled(2, 1, 300)
    count = torch.tensor([300, 131], dtype=torch.int32, device=DEVICE)
    whole, _ = attend(prepare(q, k, v, RECIPE, order=order, key_count=count, softmax_scale=0.1))
    kept = order[1:, :, :131].long()[..., None].expand(-1, -1, -1, 128)
    alone, _ = attend(prepare(q[1:], k[1:].gather(2, kept), v[1:].gather(2, kept), RECIPE, softmax_scale=0.1))
    # the key mean is summed in another order, the rest is bit for bit the same
    assert relative_l2(whole[1:], alone) < 2e-3


def test_no_key_gives_zero_and_minus_infinity():
    q, k, v = sample_qkv("gauss", (2, 1, 5, 128), keys=140, device=DEVICE)
    count = torch.tensor([0, 140], dtype=torch.int32, device=DEVICE)
    out, lse = attend(prepare(q, k, v, RECIPE, key_count=count, softmax_scale=0.1, want_lse=True))
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("direction", [1, -1], ids=["rising", "falling"])
def test_maximum_that_moves_from_tile_to_tile(direction):
    q, k, v = sample_qkv("clustered", (1, 1, 20, 128), keys=640, device=DEVICE)
    k += torch.linspace(-direction, direction, 640, device=DEVICE)[None, None, :, None] * q.mean(
        2, keepdim=True
    )
    # INT8 scores of this size put the reference's log-sum-exp 0.02 to 0.083 off (12 draws)
    check(q * 3, k, v, exact_lse=0.15)


def test_values_far_from_zero_keep_their_spread():
    q, k, v = sample_qkv("gauss", (1, 1, 20, 128), keys=1030, device=DEVICE)
    out = check(q, k, v + 50, exact_tolerance=None)
    exact, _ = exact_attention(q, k, v + 50)
    assert (out - exact).norm() / exact.std() / exact.numel() ** 0.5 < 0.8


def test_logits_past_float32_resolution_give_no_nan():
    # the same draw everywhere: 1 in 100 rows has two scores so near that both keys count
    q, k, v = (x.to(DEVICE) for x in sample_qkv("gauss", (1, 1, 20, 128), keys=300))
    out, _ = attend(prepare(q * 3e4, k * 3e4, v, RECIPE, softmax_scale=0.1))
    # one-hot rows: each is one value, up to E4M3's rounding
    nearest = torch.cdist(out[0, 0], v[0, 0]).amin(-1)
    assert (nearest < 0.1 * v.norm(dim=-1).mean()).all()


def test_permuting_the_keys_changes_only_rounding():
    q, k, v = sample_qkv("clustered", (1, 2, 30, 128), keys=400, device=DEVICE)
    grouping = TokenGrouping(shuffled(1, 2, 400), None)
    assert relative_l2(check(q, k, v), check(q, k, v, order=grouping.order)) < EXACT_TOLERANCE


def test_bulk_copies_load_the_same_tiles(monkeypatch):
    q, k, v = sample_qkv("clustered", (1, 2, 70, 128), keys=300, device=DEVICE)
    operands = prepare(q, k, v, RECIPE, softmax_scale=0.1)
    expected = launch(operands, bulk=False)[0]

    def descriptors(operands):
        return (
            TensorDescriptor.from_tensor(operands.k.view(-1, 128), [128, 128]),
            TensorDescriptor.from_tensor(operands.v.view(-1, 128), [128, 128]),
        )

    if DEVICE == "cpu":
        monkeypatch.setattr(triton_int8_fp8, "copy_descriptors", descriptors)
    assert torch.equal(launch(operands, bulk=True)[0], expected)


def test_expcast_codes_are_equation_7():
    @triton.jit
    def codes_kernel(u, codes, N: tl.constexpr, ASM: tl.constexpr):
        o_n = tl.program_id(0) * N + tl.arange(0, N)
        b_p = expcast(tl.fma(tl.load(u + o_n), 8.0, 119.65), ASM)
        tl.store(codes + o_n, b_p.to(tl.uint8, bitcast=True))

    u = torch.cat([torch.linspace(-17, 0, 4095), torch.tensor([-torch.inf])]).to(DEVICE)
    for asm in (False, True) if DEVICE == "cuda" else (False,):
        codes = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
        codes_kernel[(4,)](u, codes, N=1024, ASM=asm)
        apart = (codes.int() - expcast_codes(u).int()).abs()
        # fused here, rounded twice in the reference
        assert apart.max() <= 1 and (apart > 0).sum() <= 1
    # a score that rounding put above the maximum; the assembly relies on formats.LARGEST_SCORE_LOG2 instead
    codes_kernel[(1,)](torch.full((1024,), 1.5, device=DEVICE), codes, N=1024, ASM=False)
    assert (codes[:1024] == 120).all()
