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


@functools.cache
def rotation_factors(head_dim: int, device: torch.device) -> torch.Tensor:
    """What rotate_fp32 reads: the signs of C2 [D], then the Hadamard matrix of 16 without its scale."""
    corner = rotation_signs(head_dim, torch.float32, device)
    corner, signs = corner[:16, :16] * corner[:16, :1], corner[:, 0]
    # the interpreter's bf16 dot is wrong
    dtype = torch.float32 if INTERPRETED.value else torch.bfloat16
    return torch.cat([signs, corner.flatten()]).to(dtype)


def exact_products(dtype: torch.dtype, layout: int = 0) -> bool:
    """Whether a tensor core multiplies values of dtype as they are; not after a rotary embedding (layout).

    Nor is anything under the interpreter, whose bf16 dot is wrong.
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


# x points at the head. cos, sin: [L, D/2] from row i_rope on. ROPE: 0 none, 1 interleaved, 2 half.
@triton.jit
def load_rows(x, stride, b_token, m_row, cos, sin, i_rope, D: tl.constexpr, ROPE: tl.constexpr):
    """Rows b_token of x, [R, D]; with a rotary embedding applied in fp32; zero where masked."""
    o_d = tl.arange(0, D)
    mask = m_row[:, None]
    row = x + b_token[:, None] * stride
    if ROPE == 0:
        return tl.load(row + o_d[None, :], mask=mask, other=0.0)
    else:
        # every channel and every angle is read once, in whole vectors; both of a pair are in one thread
        R: tl.constexpr = b_token.shape[0]
        o_half = tl.arange(0, D // 2)
        o_angle = (i_rope + b_token[:, None]) * (D // 2) + o_half[None, :]
        b_cos = tl.load(cos + o_angle, mask=mask, other=0.0).to(tl.float32)
        b_sin = tl.load(sin + o_angle, mask=mask, other=0.0).to(tl.float32)
        if ROPE == 1:
            b_x = tl.load(row + o_d[None, :], mask=mask, other=0.0)
            b_a, b_b = tl.split(tl.reshape(b_x, [R, D // 2, 2]))
        else:
            # as many of x as of cos in a thread, so that they meet in one layout
            o_four = tl.max_contiguous(o_half, 4)
            b_a = tl.load(row + o_four[None, :], mask=mask, other=0.0)
            b_b = tl.load(row + (o_four + D // 2)[None, :], mask=mask, other=0.0)
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
        b_x = tl.join(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin)
        if ROPE == 2:
            b_x = tl.permute(b_x, [0, 2, 1])
        return tl.reshape(b_x, [R, D])


@triton.jit
def rotate(b_x, b_h, root):
    """Hadamard rotation (C2) of 16-bit rows [R, D], fp32; b_h from rotation_signs, root = 1 / sqrt(D)."""
    return tl.dot(b_x, b_h) * root


@triton.jit
def in_pairs(x, S: tl.constexpr):
    """x [M] with its entries S apart added and subtracted: a Hadamard matrix of 2 over that bit."""
    N: tl.constexpr = x.shape[0]
    a, b = tl.split(tl.permute(tl.reshape(x, [N // (2 * S), 2, S]), [0, 2, 1]))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [N])


@triton.jit
def rotate_fp32(b_x, factors, root, ROPE: tl.constexpr):
    """The same of fp32 rows; factors from rotation_factors.

    The matrix of D is one of D / 16, sums over channels that load_rows leaves in one thread, times one of 16
    over the others: a tensor core's product has 16 terms instead of D.
    """
    R: tl.constexpr = b_x.shape[0]
    D: tl.constexpr = b_x.shape[1]
    P: tl.constexpr = D // 16
    b_x = b_x * tl.load(factors + tl.arange(0, D)).to(tl.float32)[None, :]
    b_h = tl.load(factors + D + tl.arange(0, 256).reshape(16, 16))
    if ROPE == 2:
        b_x = tl.permute(tl.reshape(b_x, [R, 2, 16, P // 2]), [0, 2, 3, 1])
    b_x = tl.reshape(b_x, [R * D])
    b_x = in_pairs(b_x, 1)
    b_x = in_pairs(b_x, 2)
    if P == 8:
        b_x = in_pairs(b_x, 4)
    b_x = tl.reshape(tl.permute(tl.reshape(b_x, [R, 16, P]), [0, 2, 1]), [R * P, 16])
    if INTERPRETED:
        b_y = tl.dot(b_x, b_h)
    else:
        # 24 bits in three numbers of 8, the small ones summed first
        b_high = (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        b_rest = b_x - b_high
        b_middle = (b_rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        b_y = tl.dot((b_rest - b_middle).to(tl.bfloat16), b_h)
        b_y = tl.dot(b_middle.to(tl.bfloat16), b_h, acc=b_y)
        b_y = tl.dot(b_high.to(tl.bfloat16), b_h, acc=b_y)
    b_y = b_y * root
    if ROPE == 2:
        b_y = tl.permute(tl.reshape(b_y, [R, P // 2, 2, 16]), [0, 2, 3, 1])
    else:
        b_y = tl.permute(tl.reshape(b_y, [R, P, 16]), [0, 2, 1])
    return tl.reshape(b_y, [R, D])
