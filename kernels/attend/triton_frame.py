"""What the Triton attention kernels share: scores with their scales, the masked last tile, output and lse.

Scores, maxima and offsets are in units of 1/UNITS octave: UNITS is 8 for ExpCast, whose code is then one
multiply-add away from the integer score, and 1 otherwise.
"""

import torch
import triton
import triton.language as tl

from .. import formats
from ..operands import heads_in_a_row, new_results
from ..prepare.triton_layout import TritonOperands
from ..prepare.triton_rows import to_float


@triton.jit
def load_queries(
    q, q_scale, k_scale_max, i_bh, o_m, lq, largest, score_scale, D: tl.constexpr, M: tl.constexpr
):
    """Codes [M, D] and the factor [M] from a K-scaled score to score units; rows past lq are zero.

    largest: bound on q_scale * k_scale times the factor that keeps scores representable. A scale that is NaN
    stays so, and one of K makes them all NaN (C7).
    """
    m_m = o_m < lq
    o_row = i_bh * lq + o_m
    b_q = tl.load(q + o_row[:, None] * D + tl.arange(0, D)[None, :], mask=m_m[:, None], other=0.0)
    b_scale = tl.load(q_scale + o_row, mask=m_m, other=1.0) * score_scale
    b_most = largest / tl.load(k_scale_max + i_bh)
    return b_q, tl.minimum(b_scale, b_most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_scores(b_q, b_qs, b_k, p_ks, M: tl.constexpr, FP8: tl.constexpr):
    """Raw scores of one tile b_k [128, D], [M, a, t, b, c] (see triton_layout), and their scale [M, t]."""
    b_s = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float32 if FP8 else tl.int32)
    b_s = tl.permute(tl.reshape(b_s, [M, 8, 2, 4, 2]), [0, 1, 3, 2, 4])
    return b_s, b_qs[:, None] * tl.load(p_ks + tl.arange(0, 4))[None, :]


@triton.jit
def exists_in_tile(left):
    """[1, a, t, b, c]: whether the key at this place of a tile is among the first `left`."""
    o_a, o_t, o_2 = tl.arange(0, 8), tl.arange(0, 4), tl.arange(0, 2)
    o_key = tl.expand_dims(o_a, [1, 2, 3]) * 4 + tl.expand_dims(o_t, [0, 2, 3]) * 32
    o_key = o_key + tl.expand_dims(o_2, [0, 1, 3]) * 2 + tl.expand_dims(o_2, [0, 1, 2])
    return tl.expand_dims(o_key < left, 0)


@triton.jit
def tile_maximum(b_s, b_scale, left, M: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr):
    """Largest score of each row after scales, [M]. A lane's keys share one scale: raw maxima come first."""
    if MASKED:
        b_s = tl.where(exists_in_tile(left), b_s, -3.0e38 if FP8 else -(1 << 24))
    b_max = tl.max(tl.reshape(tl.permute(b_s, [0, 2, 1, 3, 4]), [M, 4, 32]), 2).to(tl.float32) * b_scale
    if MASKED:
        b_max = tl.where((tl.arange(0, 4) * 32 < left)[None, :], b_max, float("-inf"))
    return tl.max(b_max, 1)


@triton.jit
def scaled_scores(b_s, b_scale, b_offset, left, M: tl.constexpr, MASKED: tl.constexpr):
    """Scores times scale plus offset, [M, 128] in the places of V's columns; -inf where no key is."""
    b_x = b_s.to(tl.float32) * tl.expand_dims(b_scale, [1, 3, 4]) + tl.expand_dims(b_offset, [1, 2, 3, 4])
    if MASKED:
        b_x = tl.where(exists_in_tile(left), b_x, float("-inf"))
    return tl.reshape(b_x, [M, 128])


@triton.jit
def store_rows(b_out, out, i_bh, o_m, lq, n_heads, out_heads, D: tl.constexpr):
    """Rows [M, D] of head i_bh into out, memory [B, Lq, out_heads, D]."""
    o_row = ((i_bh // n_heads) * lq + o_m) * out_heads + i_bh % n_heads
    p_out = out + o_row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(p_out, to_float(b_out, out.dtype.element_ty), mask=(o_m < lq)[:, None])


@triton.jit
def store_lse(b_m, b_l, lse, lse_shift, i_bh, o_m, lq, UNITS: tl.constexpr):
    """Natural-log log-sum-exp of the true scores (C6); b_l in probability 1 units. -inf without keys."""
    o_row = i_bh * lq + o_m
    b_shift = tl.load(lse_shift + o_row, mask=o_m < lq, other=0.0)
    b_lse = 0.6931471805599453 * (b_m / UNITS + tl.log2(b_l)) + b_shift
    tl.store(lse + o_row, tl.where(b_l == 0.0, float("-inf"), b_lse), mask=o_m < lq)


def largest_factor(operands: TritonOperands, units: float) -> float:
    """load_queries' `largest`: formats.LARGEST_SCORE_LOG2 over the largest raw score."""
    top = formats.E4M3_MAX if operands.q.dtype == torch.float8_e4m3fn else formats.INT8_MAX
    return formats.LARGEST_SCORE_LOG2 * units / (top * top * operands.q.shape[-1])


def outputs(operands: TritonOperands, out=None):
    """(out [B, H, Lq, D], new if None; heads in a row of its memory; empty lse fp32 [B, H, Lq] or None)."""
    out, lse = new_results(operands.q.shape, operands, out)
    return out, heads_in_a_row(out), lse


def copy_descriptors(operands: TritonOperands):
    """K and V as Hopper's bulk copy engine reads them, tile by tile, or None: load through pointers.

    4% faster at 32,768 tokens (H200, Triton 3.6, 2026-11-30). Measured there, at 128 channels, and so used
    only there.
    """
    d = operands.k.shape[-1]
    if capability_of(operands.k.device) != (9, 0) or d != 128:
        return None
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # Triton before 3.4
        return None
    return (
        TensorDescriptor.from_tensor(operands.k.view(-1, d), [128, d]),
        TensorDescriptor.from_tensor(operands.v.view(-1, 128), [d, 128]),
    )


def launch_shape(capability: tuple[int, int] | None, fp8_values: bool) -> tuple[int, int]:
    """(query rows, tiles in flight) of a program of four warps; capability None: no GPU.

    On sm_90 and sm_100 two programs of three tiles, 110 KB each, share a multiprocessor. Elsewhere products
    are mma.sync, and what 64 rows hold is more than 255 registers. Measured so on an H200 (Triton 3.6 without
    wgmma, 12 heads of 128, 16,384 tokens, 2026-11-30; ms of 64 rows and 2 tiles, 64 and 1, 32 and 2):
    int8_int8 8.61, 6.97, 7.03, and only 32 rows do not spill; int8_fp8 with ExpCast 11.26, 10.56, 11.72, with
    exp2 11.50, 10.42, 12.86, but the H200 expands such E4M3 products into 16-bit ones.
    """
    if capability is not None and capability[0] in (9, 10):
        return 64, 3
    return (64, 1) if fp8_values else (32, 2)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """None unless the device is a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def has_packing_casts(device: torch.device) -> bool:
    """Whether the card converts and packs four probabilities in two instructions (sm_89 and newer)."""
    return (capability_of(device) or (0, 0)) >= (8, 9)
