"""V for the Triton kernels: gather, tile mean, residual, quantization, transposition (C5, F1, I1)."""

import torch
import triton
import triton.language as tl

from .. import formats
from .triton_rows import ROUND_MAGIC, largest_of, load_rows, quotient, scale_of, to_codes, to_float, tokens_at

ROUNDING_PRIOR = tl.constexpr(formats.ROUNDING_PRIOR)


# One program: one tile of one head. v_scale is read for E4M3 and written for INT8.
# Prefixes: o_ offsets, m_ masks, b_ blocks in registers, i_ indices.
@triton.jit(do_not_specialize=("lk", "n_tiles", "n_heads"))
def quantize_v_kernel(
    v, order, key_count, v_scale, codes, v_mean, v_sum,
    v_b, v_h, v_l, lk, n_heads, n_tiles,
    D: tl.constexpr, FP8: tl.constexpr, DEMEAN: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0) % n_tiles
    i_bh = (tl.program_id(0) // n_tiles).to(tl.int64)
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    count = lk
    if HAS_COUNT:
        count = tl.load(key_count + i_b)
    o_d = tl.arange(0, D)
    o_p = tl.arange(0, 128)
    # the key of triton_layout.key_of_v_column
    o_key = i_t * 128 + (((o_p >> 2) & 3) << 5 | ((o_p >> 4) & 7) << 2 | o_p & 3)
    m_key = o_key < count
    b_token = tokens_at(order, i_bh, o_key, m_key, lk, HAS_ORDER)
    b_v = load_rows(v + i_b * v_b + i_h * v_h, v_l, b_token, m_key, None, None, 0, D, 0).to(tl.float32)
    o_tile = (i_bh * n_tiles + i_t) * D + o_d
    if FP8:
        b_scale = tl.load(v_scale + i_bh * D + o_d)
    here = tl.maximum(tl.minimum(count - i_t * 128, 128), 1).to(tl.float32)
    if DEMEAN:
        b_mean = tl.div_rn(tl.sum(b_v, 0), tl.broadcast_to(here, [D]))
        if FP8:
            b_mean = tl.div_rn(b_mean, b_scale)
        b_stored = to_float(b_mean, v_mean.dtype.element_ty)
        tl.store(v_mean + o_tile, b_stored)
        # the residual is taken to the mean as it is stored and added back (C5)
        b_back = b_stored.to(tl.float32)
        if FP8:
            b_back = b_back * b_scale
        b_v = tl.where(m_key[:, None], b_v - b_back[None, :], 0.0)
    if not FP8:
        b_scale = scale_of(largest_of(b_v, 0), 127.0)
        tl.store(v_scale + o_tile, b_scale)
    b_v = quotient(b_v, b_scale[None, :])
    if not FP8:
        # I1: what rounding misses is to sum to little; absent keys stay 0, for it is less than half a step
        b_missed = tl.sum(b_v - ((b_v + ROUND_MAGIC) - ROUND_MAGIC), 0)
        b_v += tl.div_rn(b_missed, tl.broadcast_to(here + ROUNDING_PRIOR, [D]))[None, :]
    b_code = to_codes(b_v, FP8)
    if not FP8:
        tl.store(v_sum + o_tile, tl.sum(b_code.to(tl.int32), 0) * 128)
    o_code = (i_bh * n_tiles + i_t) * 128 * D + o_d[:, None] * 128 + o_p[None, :]
    tl.store(codes + o_code, tl.trans(b_code))


def quantize_v(v, recipe, order, key_count, scale):
    """(codes [B, H, T, D, 128], scale, mean or None, 128 * sum of codes or None) of TritonOperands.

    scale: fp32 [B, H, D] for E4M3, from statistics; None for INT8, which finds its own.
    """
    b, h, lk, d = v.shape
    tiles = formats.tile_count(lk)
    fp8 = recipe.value_format == "fp8"
    codes = v.new_empty(b, h, tiles, d, 128, dtype=torch.float8_e4m3fn if fp8 else torch.int8)
    mean = total = None
    if fp8:
        mean_dtype = torch.float16
    else:
        scale = v.new_empty(b, h, tiles, d, dtype=torch.float32)
        total = v.new_empty(b, h, tiles, d, dtype=torch.int32)
        mean_dtype = torch.float16 if v.dtype == torch.float16 else torch.bfloat16
    if recipe.demean:
        mean = v.new_empty(b, h, tiles, d, dtype=mean_dtype)
    quantize_v_kernel[(b * h * tiles,)](
        v, order, key_count, scale, codes, mean, total,
        *v.stride()[:3], lk, h, tiles,
        D=d, FP8=fp8, DEMEAN=recipe.demean,
        HAS_ORDER=order is not None, HAS_COUNT=key_count is not None, num_warps=8,
    )  # fmt: skip
    return codes, scale, mean, total
