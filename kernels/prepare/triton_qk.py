"""Q and K for the Triton kernels: rotary embedding, key smoothing, rotation, quantization (C1 to C3)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import formats
from .triton_rows import (
    exact_products,
    largest_of,
    load_rows,
    quotient,
    rotate,
    rotate_fp32,
    rotation_factors,
    rotation_signs,
    scale_of,
    to_codes,
    tokens_at,
)

# Rows a program quantizes at a time, how often, and its warps (measured). A matrix of D is read once for 256
# rows. Without one, one step needs half the registers of a loop; four warps took 3.5 ms where eight took 4.1
# (an H200, 40 heads of 75,600 tokens).
SHAPE_EXACT, SHAPE_FP32 = (64, 4, 4), (32, 1, 4)
STATISTICS_ROWS = 1024  # rows a program sums up (chosen)

ROPE_LAYOUTS = {"interleaved": 1, "half": 2}


# One program: STATISTICS_ROWS keys of one head. Sums of k and largest |v|, per channel.
# Here and below neighbouring programs are of other heads, which read the same of cos and sin.
# Prefixes: o_ offsets, m_ masks, b_ blocks in registers, i_ indices.
@triton.jit(do_not_specialize=("lk", "n_chunks", "rope_b", "n_heads", "n_bh"))
def statistics_kernel(
    k, v, order, key_count, cos, sin, k_sum, v_amax,
    k_b, k_h, k_l, v_b, v_h, v_l, rope_b, lk, n_heads, n_bh, n_chunks,
    D: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    i_bh = (tl.program_id(0) % n_bh).to(tl.int64)
    i_c = tl.program_id(0) // n_bh
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    count = lk
    if HAS_COUNT:
        count = tl.load(key_count + i_b)
    o_d = tl.arange(0, D)
    b_sum = tl.zeros([R, D], tl.float32)
    b_max = tl.zeros([R, D], tl.float32)
    for start in range(0, tl.minimum(CHUNK, count - i_c * CHUNK), R):
        o_key = i_c * CHUNK + start + tl.arange(0, R)
        m_key = o_key < count
        b_token = tokens_at(order, i_bh, o_key, m_key, lk, HAS_ORDER)
        if HAS_K:
            p_k = k + i_b * k_b + i_h * k_h
            b_sum += load_rows(p_k, k_l, b_token, m_key, cos, sin, i_b * rope_b, D, ROPE).to(tl.float32)
        if HAS_V:
            p_v = v + i_b * v_b + i_h * v_h
            b_v = load_rows(p_v, v_l, b_token, m_key, None, None, 0, D, 0).to(tl.float32)
            b_max = tl.maximum(b_max, tl.abs(b_v), propagate_nan=tl.PropagateNan.ALL)
    o_out = (i_bh * n_chunks + i_c) * D + o_d
    if HAS_K:
        tl.store(k_sum + o_out, tl.sum(b_sum, 0))
    if HAS_V:
        tl.store(v_amax + o_out, largest_of(b_max, 0))


# One program: one head. Channel means of k, plain and rotated, and the scales of v (F1).
@triton.jit(do_not_specialize=("lk", "n_chunks", "n_heads"))
def finish_statistics_kernel(
    k_sum, v_amax, key_count, signs, k_mean, k_mean_rotated, v_scale, lk, n_heads, n_chunks, root,
    D: tl.constexpr, R: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    count = lk
    if HAS_COUNT:
        count = tl.load(key_count + i_bh // n_heads)
    o_d = tl.arange(0, D)
    b_sum = tl.zeros([R, D], tl.float32)
    b_max = tl.zeros([R, D], tl.float32)
    for start in range(0, n_chunks, R):
        o_c = start + tl.arange(0, R)
        o_in = (i_bh * n_chunks + o_c[:, None]) * D + o_d[None, :]
        if HAS_K:
            b_sum += tl.load(k_sum + o_in, mask=(o_c < n_chunks)[:, None], other=0.0)
        if HAS_V:
            b_v = tl.load(v_amax + o_in, mask=(o_c < n_chunks)[:, None], other=0.0)
            b_max = tl.maximum(b_max, b_v, propagate_nan=tl.PropagateNan.ALL)
    if HAS_K:
        b_mean = tl.sum(b_sum, 0) / tl.maximum(count, 1).to(tl.float32)
        tl.store(k_mean + i_bh * D + o_d, b_mean)
        # rotated channel i is the mean times column i, and columns are read as rows for a sum over lanes
        b_h = tl.load(signs + o_d[None, :] * D + o_d[:, None])
        tl.store(k_mean_rotated + i_bh * D + o_d, tl.sum(b_h * b_mean[None, :], 1) * root)
    if HAS_V:
        tl.store(v_scale + i_bh * D + o_d, scale_of(largest_of(b_max, 0), 224.0))


# One program: STEPS blocks of R query rows of one head. signs as rotation_of says.
@triton.jit(do_not_specialize=("lq", "n_bh", "rope_b", "n_heads"))
def quantize_q_kernel(
    q, signs, cos, sin, k_mean, codes, scales, lse_shift,
    q_b, q_h, q_l, rope_b, lq, n_heads, n_bh, root, softmax_scale,
    D: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, ROPE: tl.constexpr,
    ROTATE: tl.constexpr, EXACT: tl.constexpr, FP8: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    i_bh = (tl.program_id(0) % n_bh).to(tl.int64)
    i_block = tl.program_id(0) // n_bh
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_d = tl.arange(0, D)
    if ROTATE and EXACT:
        b_h = tl.load(signs + o_d[:, None] * D + o_d[None, :])
    if HAS_SHIFT:
        b_mean = tl.load(k_mean + i_bh * D + o_d)
    p_q = q + i_b * q_b + i_h * q_h
    i_first = i_block * STEPS * R
    # one step that is known to be one is no loop
    stop = i_first + R if STEPS == 1 else tl.minimum(i_first + STEPS * R, lq)
    for start in range(i_first, stop, R):
        o_row = start + tl.arange(0, R)
        m_row = o_row < lq
        b_token = tl.where(m_row, o_row, 0).to(tl.int64)
        b_q = load_rows(p_q, q_l, b_token, m_row, cos, sin, i_b * rope_b, D, ROPE)
        if HAS_SHIFT:
            b_shift = softmax_scale * tl.sum(b_q.to(tl.float32) * b_mean[None, :], 1)
            tl.store(lse_shift + i_bh * lq + o_row, b_shift, mask=m_row)
        if ROTATE and EXACT:
            b_q = rotate(b_q, b_h, root)
        b_q = b_q.to(tl.float32)
        if ROTATE and not EXACT:
            b_q = rotate_fp32(b_q, signs, root, ROPE)
        b_scale = scale_of(largest_of(b_q, 1), 448.0 if FP8 else 127.0)
        b_code = to_codes(quotient(b_q, b_scale[:, None]), FP8)
        tl.store(scales + i_bh * lq + o_row, b_scale, mask=m_row)
        o_code = (i_bh * lq + o_row[:, None]) * D + o_d[None, :]
        tl.store(codes + o_code, b_code, mask=m_row[:, None])


# One program: STEPS blocks of R keys of one head, in tile order; R is whole groups of 32 keys. k_mean is
# rotated when k is rotated before it is subtracted, which is when EXACT.
@triton.jit(do_not_specialize=("lk", "n_bh", "n_tiles", "rope_b", "n_heads"))
def quantize_k_kernel(
    k, order, key_count, signs, cos, sin, k_mean, codes, scales,
    k_b, k_h, k_l, rope_b, lk, n_heads, n_bh, n_tiles, root,
    D: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, ROPE: tl.constexpr,
    ROTATE: tl.constexpr, EXACT: tl.constexpr, FP8: tl.constexpr, SMOOTH: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    i_bh = (tl.program_id(0) % n_bh).to(tl.int64)
    i_block = tl.program_id(0) // n_bh
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    count = lk
    if HAS_COUNT:
        count = tl.load(key_count + i_b)
    o_d = tl.arange(0, D)
    if ROTATE and EXACT:
        b_h = tl.load(signs + o_d[:, None] * D + o_d[None, :])
    if SMOOTH:
        b_mean = tl.load(k_mean + i_bh * D + o_d)
    p_k = k + i_b * k_b + i_h * k_h
    i_first = i_block * STEPS * R
    stop = i_first + R if STEPS == 1 else tl.minimum(i_first + STEPS * R, n_tiles * 128)
    for start in range(i_first, stop, R):
        o_key = start + tl.arange(0, R)
        m_key = o_key < count
        b_token = tokens_at(order, i_bh, o_key, m_key, lk, HAS_ORDER)
        b_k = load_rows(p_k, k_l, b_token, m_key, cos, sin, i_b * rope_b, D, ROPE)
        if ROTATE and EXACT:
            b_k = rotate(b_k, b_h, root)
        b_k = b_k.to(tl.float32)
        if SMOOTH:
            b_k = tl.where(m_key[:, None], b_k - b_mean[None, :], 0.0)
        if ROTATE and not EXACT:
            b_k = rotate_fp32(b_k, signs, root, ROPE)
        b_amax = largest_of(tl.reshape(largest_of(b_k, 1), [R // 32, 32]), 1)
        b_scale = scale_of(b_amax, 448.0 if FP8 else 127.0)
        b_row_scale = tl.reshape(tl.broadcast_to(b_scale[:, None], [R // 32, 32]), [R])
        b_code = to_codes(quotient(b_k, b_row_scale[:, None]), FP8)
        o_group = start // 32 + tl.arange(0, R // 32)
        # 0 also where all keys are 0: the largest of these scales bounds the queries' scales
        b_scale = tl.where((o_group * 32 < count) & (b_amax != 0.0), b_scale, 0.0)
        tl.store(scales + i_bh * n_tiles * 4 + o_group, b_scale)
        # the row of triton_layout.key_of_k_row that holds this key
        o_in = o_key % 128
        o_n = ((o_in >> 2) & 7) << 4 | ((o_in >> 1) & 1) << 3 | ((o_in >> 5) & 3) << 1 | o_in & 1
        o_row = i_bh * n_tiles * 128 + o_key // 128 * 128 + o_n
        tl.store(codes + o_row[:, None] * D + o_d[None, :], b_code)


def rope_arguments(rope, batch):
    """(cos, sin, rows from one batch entry to the next, layout number) for the kernels."""
    if rope is None:
        return None, None, 0, 0
    cos, sin, layout = rope
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.shape[1] if cos.dim() == 3 else 0, ROPE_LAYOUTS[layout]


def rotation_of(x, layout):
    """(EXACT, signs, shape) by which a kernel rotates rows of x after a rotary embedding of that layout."""
    if exact_products(x.dtype, layout):
        return True, rotation_signs(x.shape[-1], x.dtype, x.device), SHAPE_EXACT
    return False, rotation_factors(x.shape[-1], x.device), SHAPE_FP32


@dataclass(frozen=True)
class Statistics:
    """Per head and channel, fp32 [B, H, D], over the existing keys; None where not wanted."""

    k_mean: torch.Tensor | None
    k_mean_rotated: torch.Tensor | None
    v_scale: torch.Tensor | None  # largest |v| over 224, 1 where that is 0 (F1)


def statistics(k, v, order, key_count, rope, want_k, want_v) -> Statistics:
    """One pass over K (its mean, after the rotary embedding) and V (its scale)."""
    b, h, lk, d = k.shape
    n_chunks = triton.cdiv(lk, STATISTICS_ROWS)

    def empty(wanted, *shape):
        return k.new_empty(b, h, *shape, dtype=torch.float32) if wanted else None

    k_sum, v_amax = empty(want_k, n_chunks, d), empty(want_v, n_chunks, d)
    result = Statistics(empty(want_k, d), empty(want_k, d), empty(want_v, d))
    if not (want_k or want_v):
        return result
    cos, sin, rope_b, layout = rope_arguments(rope, b)
    has_count = key_count is not None
    statistics_kernel[(b * h * n_chunks,)](
        k, v, order, key_count, cos, sin, k_sum, v_amax,
        *k.stride()[:3], *v.stride()[:3], rope_b, lk, h, b * h, n_chunks,
        # all keys in any order have one sum: stream them
        D=d, CHUNK=STATISTICS_ROWS, R=32, ROPE=layout, HAS_ORDER=order is not None and has_count,
        HAS_COUNT=has_count, HAS_K=want_k, HAS_V=want_v, num_warps=4,
    )  # fmt: skip
    finish_statistics_kernel[(b * h,)](
        k_sum, v_amax, key_count, rotation_signs(d, torch.float32, k.device),
        result.k_mean, result.k_mean_rotated, result.v_scale, lk, h, n_chunks, d**-0.5,
        D=d, R=16, HAS_COUNT=has_count, HAS_K=want_k, HAS_V=want_v, num_warps=8,
    )  # fmt: skip
    return result


def quantize_q(q, recipe, rope, k_mean, softmax_scale):
    """Codes [B, H, Lq, D], scales fp32 [B, H, Lq], lse_shift fp32 [B, H, Lq] or None without k_mean."""
    b, h, lq, d = q.shape
    fp8 = recipe.numerics.startswith("fp8")
    codes = q.new_empty(b, h, lq, d, dtype=torch.float8_e4m3fn if fp8 else torch.int8)
    scales = q.new_empty(b, h, lq, dtype=torch.float32)
    shift = None if k_mean is None else torch.empty_like(scales)
    cos, sin, rope_b, layout = rope_arguments(rope, b)
    exact, signs, (rows, steps, warps) = rotation_of(q, layout)
    n_blocks = triton.cdiv(lq, rows * steps)
    quantize_q_kernel[(b * h * n_blocks,)](
        q, signs, cos, sin, k_mean, codes, scales, shift,
        *q.stride()[:3], rope_b, lq, h, b * h, d**-0.5, softmax_scale,
        D=d, R=rows, STEPS=steps, ROPE=layout, ROTATE=recipe.rotate_qk, EXACT=exact, FP8=fp8,
        HAS_SHIFT=shift is not None, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return codes, scales, shift


def quantize_k(k, recipe, order, key_count, rope, statistics: Statistics):
    """Codes [B, H, T, 128, D] placed as triton_layout says, scales fp32 [B, H, T, 4]."""
    b, h, lk, d = k.shape
    tiles = formats.tile_count(lk)
    fp8 = recipe.numerics.startswith("fp8")
    codes = k.new_empty(b, h, tiles, 128, d, dtype=torch.float8_e4m3fn if fp8 else torch.int8)
    scales = k.new_empty(b, h, tiles, 4, dtype=torch.float32)
    cos, sin, rope_b, layout = rope_arguments(rope, b)
    exact, signs, (rows, steps, warps) = rotation_of(k, layout)
    k_mean = statistics.k_mean_rotated if exact and recipe.rotate_qk else statistics.k_mean
    n_blocks = triton.cdiv(tiles * 128, rows * steps)
    quantize_k_kernel[(b * h * n_blocks,)](
        k, order, key_count, signs, cos, sin, k_mean, codes, scales,
        *k.stride()[:3], rope_b, lk, h, b * h, tiles, d**-0.5,
        D=d, R=rows, STEPS=steps, ROPE=layout, ROTATE=recipe.rotate_qk, EXACT=exact, FP8=fp8,
        SMOOTH=recipe.smooth_k, HAS_ORDER=order is not None, HAS_COUNT=key_count is not None,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return codes, scales
