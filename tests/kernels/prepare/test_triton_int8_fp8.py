"""The Triton preparation against the reference, code by code."""

import dataclasses

import pytest
import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare import triton_qk
from comfyui_vc_attention.kernels.prepare.reference import prepare as reference_prepare
from comfyui_vc_attention.kernels.prepare.triton_int8_fp8 import prepare
from comfyui_vc_attention.kernels.prepare.triton_layout import reference_layout
from comfyui_vc_attention.kernels.testing import sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = Recipe("int8_fp8")
CODE_STEPS = 1e-4  # share of codes that may differ, by one step (NUMERICS F2, I6)


def steps_apart(codes, expected):
    """|difference| in codes, as integers; E4M3 bytes are ordered by magnitude."""

    def ordinal(x):
        if x.dtype == torch.int8:
            return x.int()
        byte = x.view(torch.uint8).int()
        return torch.where(byte > 127, 128 - byte, byte)

    return (ordinal(codes) - ordinal(expected)).abs()


def assert_same_operands(operands, expected, share=CODE_STEPS):
    """Equal up to one code on `share` of the entries (and one entry), scales and means to float epsilon."""
    operands = reference_layout(operands)
    for name in ("q", "k", "v"):
        apart = steps_apart(getattr(operands, name), getattr(expected, name))
        assert apart.max() <= 1, name
        assert (apart > 0).sum() <= max(1, share * apart.numel()), name
    for name in ("q_scale", "k_scale", "v_scale"):
        torch.testing.assert_close(getattr(operands, name), getattr(expected, name), rtol=2e-6, atol=0)
    assert (operands.v_mean is None) == (expected.v_mean is None)
    if expected.v_mean is not None:
        got, want = operands.v_mean.float(), expected.v_mean.float()
        # a 16-bit mean may round to the neighbour: at most one in a hundred, by one unit
        torch.testing.assert_close(got, want, rtol=8e-3, atol=1e-6)
        assert (got != want).float().mean() <= 0.01
    assert operands.key_count is expected.key_count
    if expected.lse_shift is not None:
        torch.testing.assert_close(operands.lse_shift, expected.lse_shift, rtol=1e-4, atol=1e-5)


def both(q, k, v, recipe=RECIPE, **options):
    options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    return prepare(q, k, v, recipe, **options), reference_prepare(q, k, v, recipe, **options)


def shuffled(b, h, keys, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(b, h, keys, generator=generator).argsort(-1).int().to(DEVICE)


@pytest.mark.parametrize("keys", [1, 9, 63, 65, 127, 128, 129, 503])
def test_lengths(keys):
    q, k, v = sample_qkv("clustered", (1, 2, 70, 128), keys=keys, device=DEVICE)
    assert_same_operands(*both(q, k, v, order=shuffled(1, 2, keys), want_lse=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dtypes_and_head_dims(dtype, head_dim):
    q, k, v = sample_qkv("k_outlier_channels", (2, 1, 100, head_dim), keys=200, dtype=dtype, device=DEVICE)
    assert_same_operands(*both(q, k, v, want_lse=True))


@pytest.mark.parametrize("switch", ["demean", "rotate_qk", "smooth_k"])
def test_switches(switch):
    q, k, v = sample_qkv("outlier_tokens", (1, 2, 65, 128), keys=150, device=DEVICE)
    recipe = dataclasses.replace(RECIPE, **{switch: False})
    assert_same_operands(*both(q, k, v, recipe, order=shuffled(1, 2, 150), want_lse=True))


@pytest.mark.parametrize("switch", ["", "smooth_k", "rotate_qk"])
def test_sixteen_bit_products(switch, monkeypatch):
    """The GPU's path for bf16 and fp16; the interpreter can take it in fp16 only."""
    monkeypatch.setattr(triton_qk, "exact_products", lambda dtype, layout: layout == 0)
    q, k, v = sample_qkv("clustered", (1, 2, 70, 128), keys=200, dtype=torch.float16, device=DEVICE)
    recipe = dataclasses.replace(RECIPE, **({switch: False} if switch else {}))
    count = torch.tensor([150], dtype=torch.int32, device=DEVICE)
    options = {"order": shuffled(1, 2, 200), "key_count": count, "want_lse": True}
    # the key mean is subtracted after the rotation: a few codes on the border move
    assert_same_operands(*both(q, k, v, recipe, **options), share=3e-4)


def test_absent_keys_are_never_read():
    q, k, v = sample_qkv("clustered", (2, 2, 10, 128), keys=300, device=DEVICE)
    order = shuffled(2, 2, 300)
    count = torch.tensor([300, 131], dtype=torch.int32, device=DEVICE)
    expected = reference_prepare(q, k, v, RECIPE, order=order, key_count=count, softmax_scale=0.1)
    for h in range(2):
        gone = order[1, h, 131:].long()
        k[1, h, gone], v[1, h, gone] = float("nan"), float("nan")
    got = prepare(q, k, v, RECIPE, order=order, key_count=count, softmax_scale=0.1)
    assert_same_operands(got, expected)
    assert (got.k.view(torch.uint8)[1, :, 2] == 0).all() and (got.v.view(torch.uint8)[1, :, 2] == 0).all()


def test_no_key_at_all():
    q, k, v = sample_qkv("gauss", (1, 1, 4, 128), keys=130, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert_same_operands(*both(q, k, v, key_count=count))


every_layout = pytest.mark.parametrize("layout", ["interleaved", "half"])


def rope_of(length, layout, *batch, head_dim=128):
    angles = torch.rand(*batch, length, head_dim // 2, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    return (angles * 6.28).cos(), (angles * 6.28).sin(), layout


@every_layout
@pytest.mark.parametrize("batched", [False, True])
def test_rotary_embedding(layout, batched):
    q, k, v = sample_qkv("clustered", (2, 2, 140, 128), keys=140, dtype=torch.bfloat16, device=DEVICE)
    rope = rope_of(150, layout, *((2,) if batched else ()))
    assert_same_operands(*both(q, k, v, order=shuffled(2, 2, 140), rope=rope, want_lse=True))


@every_layout
@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64)])
def test_rotary_embedding_of_dtypes_and_head_dims(layout, dtype, head_dim):
    q, k, v = sample_qkv("clustered", (1, 2, 33, head_dim), keys=140, dtype=dtype, device=DEVICE)
    assert_same_operands(*both(q, k, v, rope=rope_of(140, layout, head_dim=head_dim)))


@every_layout
def test_rotary_embedding_of_rows_at_odd_strides(layout):
    count = torch.tensor([101], dtype=torch.int32, device=DEVICE)
    tensors = sample_qkv("clustered", (1, 2, 130, 131), dtype=torch.float16, device=DEVICE)
    q, k, v = (x[..., 3:] for x in tensors)
    assert q.stride(2) == 131
    options = {"order": shuffled(1, 2, 130), "key_count": count, "rope": rope_of(130, layout)}
    assert_same_operands(*both(q, k, v, **options))


@every_layout
@pytest.mark.parametrize("switch", ["rotate_qk", "smooth_k"])
def test_rotary_embedding_without_a_step(layout, switch):
    q, k, v = sample_qkv("clustered", (1, 2, 40, 128), keys=150, dtype=torch.float16, device=DEVICE)
    recipe = dataclasses.replace(RECIPE, **{switch: False})
    assert_same_operands(*both(q, k, v, recipe, rope=rope_of(150, layout), want_lse=True))


def test_views_of_one_fused_tensor():
    fused = sample_qkv("gauss", (1, 1, 130, 3 * 56 * 128), dtype=torch.bfloat16, device=DEVICE)[0]
    q, k, v = fused.view(1, 130, 3, 56, 128).permute(2, 0, 3, 1, 4)[:, :, 10:12]
    assert q.stride(2) == 21504
    views = prepare(q, k, v, RECIPE, softmax_scale=0.1)
    copies = prepare(q.contiguous(), k.contiguous(), v.contiguous(), RECIPE, softmax_scale=0.1)
    for name in ("q", "k", "v"):
        assert torch.equal(*(getattr(x, name).view(torch.uint8) for x in (views, copies)))


def test_a_channel_offset_on_keys_costs_no_codes():
    q, k, v = sample_qkv("gauss", (1, 1, 8, 128), keys=256, dtype=torch.bfloat16, device=DEVICE)
    got, expected = both(q, k + 20, v)
    # float32 leaves 20 * 2^-24 of each difference k - mean
    assert_same_operands(got, expected, share=1e-3)


def test_all_zero_input_has_scale_one():
    zero = torch.zeros(1, 1, 130, 128, device=DEVICE)
    operands = prepare(zero, zero, zero, RECIPE, softmax_scale=0.1)
    assert operands.q_scale.eq(1).all() and operands.v_scale.eq(1).all()
    assert_same_operands(*both(zero, zero, zero))
