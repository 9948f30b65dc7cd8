"""Nvfp4Operands read back into the layout of the reference (NUMERICS.md N5)."""

import torch
from comfyui_vc_attention.kernels.formats import NVFP4_MAX
from comfyui_vc_attention.kernels.operands import VCOperands

from ..kernels.attend.nvfp4_fragments import KEY_ROW, query_rows, record_rows


def reference_layout(operands) -> VCOperands:
    """As the reference would hold them: absent keys are zero."""
    _, _, queries, keys = operands.shape
    q, q_scale = (x.flatten(2, 3)[:, :, :queries] for x in query_rows(operands.q, operands.q_scale))
    k, k_scale = (x[..., KEY_ROW.to(x.device), :].flatten(2, 3)[:, :, :keys] for x in record_rows(operands.k))
    v, v_scale = record_rows(operands.v)
    means, centred = operands.means, operands.k_centred
    if operands.key_count is not None:
        there = torch.arange(keys, device=k.device)[None] < operands.key_count[:, None]
        k, k_scale = (torch.where(there[:, None, :, None], x, 0) for x in (k, k_scale))
        tile = there[:, None, ::128]
        v, v_scale = (torch.where(tile[..., None, None], x, 0) for x in (v, v_scale))
        means = None if means is None else torch.where(tile[..., None], means, 0)
    return VCOperands(
        operands.recipe,
        q=q,
        k=k,
        v=v,
        q_scale=q_scale.contiguous().view(torch.float8_e4m3fn),
        k_scale=k_scale.contiguous().view(torch.float8_e4m3fn),
        v_scale=v_scale.contiguous().view(torch.float8_e4m3fn),
        v_mean=means,
        score_scale=operands.score_scale,
        key_count=operands.key_count,
        lse_shift=operands.lse_shift,
        out_dtype=operands.out_dtype,
        global_scale=tuple(torch.where(operands.amax > 0, operands.amax / NVFP4_MAX, 1.0)),
        q_means=operands.q_means,
        k_centred=None if centred is None else centred[:, :, :keys],
    )
