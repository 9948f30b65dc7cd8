"""attend() with E4M3 probabilities and value residuals: INT8 QK (the paper's recipe), or E4M3 QK.

One program walks all tiles of one head for M query rows. Per tile: QK, the running maximum, probability
codes (F2), PV into a fresh accumulator that is added in fp32 (two-level accumulation, F3). The row sum of
the decoded codes is a product with ones; 16 of them wait in registers, then one fp16 product restores 16
tile means and the same rounded sums enter the normalizer, so that a common mean cancels exactly.
"""

import torch
import triton
import triton.language as tl

from .. import formats
from ..prepare.triton_layout import TritonOperands
from ..prepare.triton_rows import to_e4m3
from .triton_frame import (
    capability_of,
    copy_descriptors,
    has_packing_casts,
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

CODE_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: puts round-to-nearest-even into the low bits
# four fp32 to four rounded, saturated bytes; NaN and everything negative give 0
PACK_CODES = tl.constexpr("""{
    .reg .s32 a0, a1, a2, a3, high;
    cvt.rni.s32.f32 a0, $1;
    cvt.rni.s32.f32 a1, $2;
    cvt.rni.s32.f32 a2, $3;
    cvt.rni.s32.f32 a3, $4;
    cvt.pack.sat.u8.s32.b32 high, a3, a2, 0;
    cvt.pack.sat.u8.s32.b32 $0, a1, a0, high;
}""")


@triton.jit
def expcast(b_x, ASM: tl.constexpr):
    """E4M3 probabilities of b_x = 8 u + 119.65 by Eq. 7; -inf and NaN give 0.

    ASM leaves out the upper clip, which b_x under 120.5 does not need (formats.LARGEST_SCORE_LOG2).
    """
    if ASM:
        b_code = tl.inline_asm_elementwise(
            PACK_CODES, "=r,f,f,f,f", [b_x], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        b_code = tl.minimum(tl.maximum(b_x, 0.0), 120.0) + CODE_MAGIC
        b_code = b_code.to(tl.int32, bitcast=True).to(tl.uint8)
    return b_code.to(tl.float8e4nv, bitcast=True)


@triton.jit
def load_tile(k, v, i_tile, j, D: tl.constexpr, BULK: tl.constexpr):
    """K [128, D] and transposed V [D, 128]: tile i_tile of all heads from descriptors, or j of this head."""
    if BULK:
        i_row = i_tile.to(tl.int32)
        b_k = k.load([i_row * 128, 0])
        b_v = v.load([i_row * D, 0])
    else:
        b_k = tl.load(k + j * (128 * D))
        b_v = tl.load(v + j * (128 * D))
    return b_k, b_v


@triton.jit
def add_tile(
    b_q, b_qs, b_acc, b_rho, b_m, b_ones, b_k, b_v, p_ks, slot, left,
    M: tl.constexpr, FP8_QK: tl.constexpr, EXPCAST: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile into numerator, waiting row sums (column `slot`) and running maximum."""
    UNITS: tl.constexpr = 8.0 if EXPCAST else 1.0
    b_s, b_scale = tile_scores(b_q, b_qs, b_k, p_ks, M, FP8_QK)
    b_max = tl.maximum(b_m, tile_maximum(b_s, b_scale, left, M, FP8_QK, MASKED))
    b_alpha = tl.exp2((b_m - b_max) / UNITS)
    if EXPCAST:
        b_p = expcast(scaled_scores(b_s, b_scale, 119.65 - b_max, left, M, MASKED), ASM)
    else:
        b_p = to_e4m3(tl.exp2(scaled_scores(b_s, b_scale, 8.0 - b_max, left, M, MASKED)))
    b_pv = tl.dot(b_p, tl.trans(b_v))
    b_sum = tl.dot(b_p, b_ones)
    b_acc = b_acc * b_alpha[:, None] + b_pv
    b_rho = tl.where(tl.arange(0, 16)[None, :] == slot, b_sum, b_rho * b_alpha[:, None])
    return b_acc, b_rho, b_max


@triton.jit
def restore_means(
    b_acc, b_l, b_rho, b_m, b_m_then, p_mean, i_first, n_tiles,
    D: tl.constexpr, UNITS: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """The waiting row sums of tiles i_first to i_first + 15 into numerator (Eq. 6) and normalizer."""
    b_sum = b_rho.to(tl.float16)
    if HAS_MEAN:
        o_t = i_first + tl.arange(0, 16)
        p_mean = p_mean + o_t[:, None] * D + tl.arange(0, D)[None, :]
        b_acc = tl.dot(b_sum, tl.load(p_mean, mask=(o_t < n_tiles)[:, None], other=0.0), acc=b_acc)
    b_rescale = tl.where(b_m > float("-inf"), tl.exp2((b_m_then - b_m) / UNITS), 0.0)
    return b_acc, b_l * b_rescale + tl.sum(b_sum.to(tl.float32), 1)


# All tensors contiguous. Prefixes: p_ pointers, o_ offsets, b_ blocks in registers, i_ indices.
@triton.jit(do_not_specialize=("lq", "lk", "n_heads", "out_heads"))
def attend_fp8_values_kernel(
    q, k, v, ones, q_scale, k_scale, k_scale_max, v_scale, v_mean, key_count, lse_shift, out, lse,
    lq, lk, n_heads, out_heads, score_scale, largest, l_unit,
    D: tl.constexpr, M: tl.constexpr, FP8_QK: tl.constexpr, EXPCAST: tl.constexpr, ASM: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_LSE: tl.constexpr, STAGES: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = 8.0 if EXPCAST else 1.0
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
    b_q, b_qs = load_queries(q, q_scale, k_scale_max, i_bh, o_m, lq, largest, score_scale * UNITS, D, M)
    b_ones = tl.trans(tl.load(ones + tl.arange(0, 16)[:, None] * 128 + o_n[None, :]))
    p_k = k
    p_v = v
    if not BULK:
        p_k = k + i_tile * 128 * D + o_n[:, None] * D + o_d[None, :]
        p_v = v + i_tile * 128 * D + o_d[:, None] * 128 + o_n[None, :]
    p_ks = k_scale + i_tile * 4
    p_mean = v_mean
    if HAS_MEAN:
        p_mean = v_mean + i_tile * D
    b_acc = tl.zeros([M, D], tl.float32)
    b_rho = tl.zeros([M, 16], tl.float32)
    b_l = tl.zeros([M], tl.float32)
    b_m = tl.full([M], float("-inf"), tl.float32)
    b_m_then = b_m
    for j in tl.range(0, n_whole, num_stages=STAGES):
        b_k, b_v = load_tile(p_k, p_v, i_tile + j, j, D, BULK)
        b_acc, b_rho, b_m = add_tile(
            b_q, b_qs, b_acc, b_rho, b_m, b_ones, b_k, b_v, p_ks, j % 16, 128,
            M, FP8_QK, EXPCAST, ASM, False,
        )  # fmt: skip
        p_ks += 4
        if j % 16 == 15:
            b_acc, b_l = restore_means(
                b_acc, b_l, b_rho, b_m, b_m_then, p_mean, j - 15, j + 1, D, UNITS, HAS_MEAN
            )
            b_m_then = b_m
            b_rho = tl.zeros([M, 16], tl.float32)
    if left > 0:
        b_k, b_v = load_tile(p_k, p_v, i_tile + n_whole, n_whole, D, BULK)
        b_acc, b_rho, b_m = add_tile(
            b_q, b_qs, b_acc, b_rho, b_m, b_ones, b_k, b_v, p_ks, n_whole % 16, left,
            M, FP8_QK, EXPCAST, ASM, True,
        )  # fmt: skip
    b_acc, b_l = restore_means(
        b_acc, b_l, b_rho, b_m, b_m_then, p_mean, n_whole // 16 * 16, tl.cdiv(count, 128), D, UNITS, HAS_MEAN
    )
    b_vs = tl.load(v_scale + i_bh * D + o_d)
    b_out = tl.where((b_l == 0.0)[:, None], 0.0, b_acc / b_l[:, None]) * b_vs[None, :]
    store_rows(b_out, out, i_bh, o_m, lq, n_heads, out_heads, D)
    if HAS_LSE:
        store_lse(b_m, b_l * l_unit, lse, lse_shift, i_bh, o_m, lq, UNITS)


def attend(operands: TritonOperands, out=None):
    """Attention output and log-sum-exp of one prepared call.

    Returns out [B, H, Lq, D] in operands.out_dtype, memory laid out as [B, Lq, H, D], and lse fp32
    [B, H, Lq] (natural log, of the true scores) or None when prepare was not asked for it. out: where to
    write, some heads of memory [B, Lq, R, D]; new memory if None.
    """
    return launch(operands, out)


def launch(operands: TritonOperands, out=None, rows=None, warps=4, stages=None, asm=None, bulk=True):
    """attend() with the launch shape and the ways to load tiles and write codes, for benchmarks."""
    b, h, lq, d = operands.q.shape
    out, out_heads, lse = outputs(operands, out)
    recipe = operands.recipe
    usual = launch_shape(capability_of(operands.q.device), fp8_values=True)
    rows, stages = rows or usual[0], stages or usual[1]
    # 0x38 is E4M3's 1
    ones = operands.v.new_empty(16, 128, dtype=operands.v.dtype)
    ones.view(torch.uint8).fill_(0x38)
    unit = formats.P_FP8_SCALE * (formats.EXPCAST_MEAN_RATIO if recipe.expcast else 1.0)
    copies = copy_descriptors(operands) if bulk else None
    k, v = copies or (operands.k, operands.v)
    attend_fp8_values_kernel[(b * h * triton.cdiv(lq, rows),)](
        operands.q, k, v, ones, operands.q_scale, operands.k_scale, operands.k_scale_max,
        operands.v_scale, operands.v_mean, operands.key_count, operands.lse_shift, out, lse,
        lq, operands.keys, h, out_heads, operands.score_scale,
        largest_factor(operands, formats.EXPCAST_SLOPE if recipe.expcast else 1.0), 1.0 / unit,
        D=d, M=rows, FP8_QK=recipe.numerics.startswith("fp8"), EXPCAST=recipe.expcast,
        ASM=has_packing_casts(operands.q.device) if asm is None else asm,
        HAS_MEAN=operands.v_mean is not None, HAS_COUNT=operands.key_count is not None,
        HAS_LSE=lse is not None, STAGES=stages, BULK=copies is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse
