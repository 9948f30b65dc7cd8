"""Operands as the Triton attention kernels read them, and where each key sits inside a tile.

The tensor core leaves a score tile in registers such that one lane of four, t, owns columns
16a + 8b + 2t + c (a < 8; b, c < 2), and reads a probability tile at columns 16a + 4t + 2b + c. Keys are
placed so that both are the same key, 32t + 4a + 2b + c: probabilities never move between lanes, and one
lane sees one K scale.
"""

from dataclasses import dataclass

import torch

from ..config import Recipe
from ..formats import K_GROUP, TILE
from ..operands import VCOperands


@dataclass(frozen=True)
class TritonOperands:
    """One quantized attention call. Every ``*_scale`` multiplies; absent keys are zero everywhere."""

    recipe: Recipe
    q: torch.Tensor  # [B, H, Lq, D] int8 or e4m3
    k: torch.Tensor  # [B, H, T, 128, D], row n holds the key of k_row
    v: torch.Tensor  # [B, H, T, D, 128] residuals, transposed, column p holds the key of v_column
    q_scale: torch.Tensor  # fp32 [B, H, Lq]
    k_scale: torch.Tensor  # fp32 [B, H, T, 4]; 0 where 32 keys are absent or all 0
    k_scale_max: torch.Tensor  # fp32 [B, H]
    v_scale: torch.Tensor  # fp32 [B, H, D] (fp8) or [B, H, T, D] (int8)
    v_sum: torch.Tensor | None  # int32 [B, H, T, D]: 128 times the sum of the tile's codes (int8, I5)
    v_mean: torch.Tensor | None  # 16-bit [B, H, T, D], over v_scale for fp8
    keys: int  # Lk
    key_count: torch.Tensor | None  # int32 [B]
    score_scale: float  # softmax scale * log2(e)
    lse_shift: torch.Tensor | None  # fp32 [B, H, Lq]
    out_dtype: torch.dtype


def key_of_k_row() -> torch.Tensor:
    """Which key of the tile row n of a K tile holds, int64 [128]."""
    n = torch.arange(TILE)
    return (n >> 1 & 3) << 5 | (n >> 4 & 7) << 2 | (n >> 3 & 1) << 1 | n & 1


def key_of_v_column() -> torch.Tensor:
    """Which key of the tile column p of a transposed V tile holds, int64 [128]."""
    p = torch.arange(TILE)
    return (p >> 2 & 3) << 5 | (p >> 4 & 7) << 2 | p & 3


def reference_layout(operands: TritonOperands) -> VCOperands:
    """The same call in the layout of the reference, for tests."""
    device = operands.k.device
    k_rows, v_columns = (m.argsort().to(device) for m in (key_of_k_row(), key_of_v_column()))
    k = _index_bytes(operands.k, 3, k_rows).flatten(2, 3)[:, :, : operands.keys]
    v = _index_bytes(operands.v, 4, v_columns).transpose(-1, -2).flatten(2, 3)[:, :, : operands.keys]
    return VCOperands(
        operands.recipe,
        operands.q,
        k,
        v,
        operands.q_scale,
        torch.where(operands.k_scale == 0, 1.0, operands.k_scale),
        operands.v_scale,
        operands.v_mean,
        operands.score_scale,
        operands.key_count,
        operands.lse_shift,
        operands.out_dtype,
    )


def _index_bytes(x, dim, index):
    return x.view(torch.uint8).index_select(dim, index).view(x.dtype)


assert TILE == 128 and K_GROUP == 32, "the placement above is made for 128 keys and groups of 32"
