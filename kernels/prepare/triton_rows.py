"""Pieces of the Triton quantizers: reading token rows, rotating them, rounding to codes."""

import functools

import torch
import triton
import triton.language as tl

from .. import formats

# 1.5 * 2^23: adding it leaves round-to-nearest-even of |x| < 2^22 in the low bits of the sum
ROUND_MAGIC = tl.constexpr(12582912.0)
ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
# 1.5 * 2^14: the same for multiples of 2^-9, E4M3's step below 2^-6
SUBNORMAL_MAGIC = tl.constexpr(24576.0)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@functools.cache
def rotation_signs(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """sqrt(D) times the rotation of C2: [D, D] of +1 and -1, exact in every format of a tensor core."""
    return formats.hadamard_matrix(head_dim).sign().to(dtype).to(device)


def exact_products(dtype: torch.dtype, layout: int = 0) -> bool:
    """Whether a tensor core multiplies values of dtype as they are; not after a rotary embedding (layout).

    fp32 goes in as a sum of two tf32. So does everything under the interpreter, whose bf16 dot is wrong.
    """
    return dtype != torch.float32 and layout == 0 and not INTERPRETED.value


@triton.jit
def round_to_int(x):
    """Round to nearest even, int32; |x| < 2^22."""
    return (x + ROUND_MAGIC).to(tl.int32, bitcast=True) - ROUND_MAGIC_BITS


@triton.jit
def to_e4m3(x):
    """E4M3 codes of x, round to nearest even, saturating."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if INTERPRETED:
        # the interpreter's cast loses the carry of 127 -> 128; a rounded value it casts exactly
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + SUBNORMAL_MAGIC) - SUBNORMAL_MAGIC, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def to_float(x, dtype: tl.constexpr):
    """fp32 to dtype (bf16, fp16 or fp32), round to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # the interpreter truncates to bf16
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_codes(x, FP8: tl.constexpr):
    """E4M3 or INT8 codes of values already divided by their scale (C3)."""
    if FP8:
        return to_e4m3(x)
    else:
        return round_to_int(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8)


@triton.jit
def largest_of(x, axis: tl.constexpr):
    """Largest |x|, NaN where there is one: its bits are above an infinity's, and a float maximum drops it."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(amax, top):
    """amax / top, 1 where amax is 0, NaN where it is not finite (C7)."""
    return tl.where(amax == 0.0, 1.0, tl.div_rn(amax, top) + amax * 0.0)


@triton.jit
def quotient(x, scale):
    """x / scale of broadcastable blocks, rounded as a division is: bf16 values make many exact ties (C3)."""
    if INTERPRETED:
        return x / scale
    else:
        # one reciprocal for a whole row, and its error taken back: a division is ten times as long
        inverse = tl.minimum(1.0 / scale, 3.0e38)
        y = x * inverse
        return tl.fma(tl.fma(-y, tl.broadcast_to(scale, x.shape), x), tl.broadcast_to(inverse, x.shape), y)


@triton.jit
def tokens_at(order, i_bh, o_key, m_key, lk, HAS_ORDER: tl.constexpr):
    """Token index of entries o_key of head i_bh's order, int64; 0 where masked."""
    if HAS_ORDER:
        return tl.load(order + i_bh * lk + o_key, mask=m_key, other=0).to(tl.int64)
    else:
        return tl.where(m_key, o_key, 0).to(tl.int64)


# x points at the head. cos, sin: [L, D/2] from element i_rope on. ROPE: 0 none, 1 interleaved, 2 half.
@triton.jit
def load_rows(x, stride, b_token, m_row, cos, sin, i_rope, D: tl.constexpr, ROPE: tl.constexpr):
    """Rows b_token of x, [R, D]; with a rotary embedding applied in fp32; zero where masked."""
    o_d = tl.arange(0, D)
    mask = m_row[:, None]
    row = x + b_token[:, None] * stride
    b_x = tl.load(row + o_d[None, :], mask=mask, other=0.0)
    if ROPE != 0:
        if ROPE == 1:
            partner = o_d ^ 1
            angle = o_d // 2
            first = o_d % 2 == 0
        else:
            partner = (o_d + D // 2) % D
            angle = o_d % (D // 2)
            first = o_d < D // 2
        # the pair's other channel again from memory (cached): a shuffle would depend on the layout
        b_y = tl.load(row + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        o_angle = i_rope + b_token[:, None] * (D // 2) + angle[None, :]
        b_cos = tl.load(cos + o_angle, mask=mask, other=0.0).to(tl.float32)
        b_sin = tl.load(sin + o_angle, mask=mask, other=0.0).to(tl.float32)
        b_x = b_x.to(tl.float32) * b_cos + tl.where(first[None, :], -b_y, b_y) * b_sin
    return b_x


@triton.jit
def rotate(b_x, b_h, root, EXACT: tl.constexpr):
    """Hadamard rotation (C2) of rows [R, D], fp32; b_h from rotation_signs, root = 1 / sqrt(D).

    EXACT: b_x and b_h are of one 16-bit dtype. Otherwise fp32, which a tensor core reads as tf32: b_x goes in
    as the sum of two.
    """
    if EXACT:
        b_y = tl.dot(b_x, b_h)
    else:
        b_high = (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_y = tl.dot(b_high, b_h, input_precision="tf32")
        b_y = tl.dot(b_x - b_high, b_h, acc=b_y, input_precision="tf32")
    return b_y * root
