"""attend() with exact integer products: INT8 QK, and unsigned INT8 P times INT8 value residuals (I1 to I5).

P spans 0 to 255 of its own tile's maximum in every row, so no tile is lost in a lower range; tiles meet in
fp32. A dot takes one dtype, so P enters it as p - 128 and 128 times the sum of the residual codes comes
back from the preparation.
"""

import triton
import triton.language as tl

from ..prepare.triton_layout import TritonOperands
from .triton_frame import (
    capability_of,
    largest_factor,
    launch_shape,
    load_queries,
    outputs,
    scaled_scores,
    store_lse,
    store_rows,
    tile_maximum,
    tile_scores,
)

# 1.5 * 2^23, less 128: p added to it has the bits of 1.5 * 2^23 plus RNE(p) - 128
SIGNED_MAGIC = tl.constexpr(12582784.0)
ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
HALF_RANGE_SUM = tl.constexpr(128 * 128)  # 128 keys, each 128 too low


@triton.jit
def add_tile(
    b_q, b_qs, b_acc, b_l, b_m, p_k, p_ks, p_v, p_vs, p_sum, p_mean, left,
    M: tl.constexpr, HAS_MEAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile into numerator, normalizer and running maximum."""
    b_s, b_scale = tile_scores(b_q, b_qs, tl.load(p_k), p_ks, M, False)
    b_tile = tile_maximum(b_s, b_scale, left, M, False, MASKED)
    b_max = tl.maximum(b_m, b_tile)
    b_alpha = tl.exp2(b_m - b_max)
    b_w = tl.exp2(b_tile - b_max) * (1.0 / 255.0)
    b_e = tl.exp2(scaled_scores(b_s, b_scale, -b_tile, left, M, MASKED)) * 255.0
    b_p = (b_e + SIGNED_MAGIC).to(tl.int32, bitcast=True) - ROUND_MAGIC_BITS
    # I3: with means, what rounding takes from the tile comes back as its mean
    b_rho = tl.sum(b_e, 1) if HAS_MEAN else (tl.sum(b_p, 1) + HALF_RANGE_SUM).to(tl.float32)
    b_n = tl.dot(b_p.to(tl.int8), tl.trans(tl.load(p_v)), out_dtype=tl.int32) + tl.load(p_sum)[None, :]
    b_n = b_n.to(tl.float32) * tl.load(p_vs)[None, :]
    if HAS_MEAN:
        b_n += b_rho[:, None] * tl.load(p_mean).to(tl.float32)[None, :]
    return b_acc * b_alpha[:, None] + b_n * b_w[:, None], b_l * b_alpha + b_w * b_rho, b_max


# All tensors contiguous. Prefixes: p_ pointers, o_ offsets, b_ blocks in registers, i_ indices.
@triton.jit(do_not_specialize=("lq", "lk", "n_heads", "out_heads"))
def attend_int8_values_kernel(
    q, k, v, q_scale, k_scale, k_scale_max, v_scale, v_sum, v_mean, key_count, lse_shift, out, lse,
    lq, lk, n_heads, out_heads, score_scale, largest,
    D: tl.constexpr, M: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_COUNT: tl.constexpr,
    HAS_LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(lq, M)
    i_bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    o_m = tl.program_id(0) % n_blocks * M + tl.arange(0, M)
    o_d = tl.arange(0, D)
    o_n = tl.arange(0, 128)
    i_tile = i_bh * tl.cdiv(lk, 128)
    count = lk
    if HAS_COUNT:
        count = tl.load(key_count + i_bh // n_heads)
    n_whole = count // 128
    left = count % 128
    b_q, b_qs = load_queries(q, q_scale, k_scale_max, i_bh, o_m, lq, largest, score_scale, D, M)
    p_k = k + i_tile * 128 * D + o_n[:, None] * D + o_d[None, :]
    p_v = v + i_tile * 128 * D + o_d[:, None] * 128 + o_n[None, :]
    p_ks = k_scale + i_tile * 4
    p_vs = v_scale + i_tile * D + o_d
    p_sum = v_sum + i_tile * D + o_d
    p_mean = v_mean
    if HAS_MEAN:
        p_mean = v_mean + i_tile * D + o_d
    b_acc = tl.zeros([M, D], tl.float32)
    b_l = tl.zeros([M], tl.float32)
    b_m = tl.full([M], float("-inf"), tl.float32)
    for _ in tl.range(0, n_whole, num_stages=STAGES):
        b_acc, b_l, b_m = add_tile(
            b_q, b_qs, b_acc, b_l, b_m, p_k, p_ks, p_v, p_vs, p_sum, p_mean, 128, M, HAS_MEAN, False
        )
        p_k += 128 * D
        p_v += 128 * D
        p_ks += 4
        p_vs += D
        p_sum += D
        if HAS_MEAN:
            p_mean += D
    if left > 0:
        b_acc, b_l, b_m = add_tile(
            b_q, b_qs, b_acc, b_l, b_m, p_k, p_ks, p_v, p_vs, p_sum, p_mean, left, M, HAS_MEAN, True
        )
    b_out = tl.where((b_l == 0.0)[:, None], 0.0, b_acc / b_l[:, None])
    store_rows(b_out, out, i_bh, o_m, lq, n_heads, out_heads, D)
    if HAS_LSE:
        store_lse(b_m, b_l, lse, lse_shift, i_bh, o_m, lq, 1.0)


def attend(operands: TritonOperands, out=None):
    """Attention output and log-sum-exp of one prepared call; contract as triton_int8_fp8's attend."""
    return launch(operands, out)


def launch(operands: TritonOperands, out=None, rows=None, warps=4, stages=None):
    """attend() with the launch shape as arguments, for benchmarks."""
    b, h, lq, d = operands.q.shape
    out, out_heads, lse = outputs(operands, out)
    usual = launch_shape(capability_of(operands.q.device), fp8_values=False)
    rows, stages = rows or usual[0], stages or usual[1]
    attend_int8_values_kernel[(b * h * triton.cdiv(lq, rows),)](
        operands.q, operands.k, operands.v, operands.q_scale, operands.k_scale, operands.k_scale_max,
        operands.v_scale, operands.v_sum, operands.v_mean, operands.key_count, operands.lse_shift, out, lse,
        lq, operands.keys, h, out_heads, operands.score_scale, largest_factor(operands, 1.0),
        D=d, M=rows, HAS_MEAN=operands.v_mean is not None, HAS_COUNT=operands.key_count is not None,
        HAS_LSE=lse is not None, STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse
