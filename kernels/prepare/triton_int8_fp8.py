"""Operands of triton_int8_fp8: INT8 Q and K, E4M3 value residuals."""

import torch

from .. import formats
from ..config import Recipe
from ..operands import boxed
from .triton_layout import TritonOperands
from .triton_qk import quantize_k, quantize_q, statistics
from .triton_values import quantize_v


def prepare(q, k, v, recipe: Recipe, *, order=None, key_count=None, softmax_scale, rope=None, want_lse=False):
    """Quantize one call for the Triton attention kernels; arguments as in the reference's prepare.

    Returns TritonOperands. No host synchronisation.
    """
    q, k, v = boxed(q), boxed(k), boxed(v)
    keys, out_dtype = k.peek().shape[2], q.peek().dtype
    if order is not None:
        order = order.contiguous()
    found = statistics(
        k.peek(),
        v.peek(),
        order,
        key_count,
        rope,
        want_k=recipe.smooth_k,
        want_v=recipe.value_format == "fp8",
    )
    # each input is given up as soon as it was read, before there is memory for the next one's codes
    shift_mean = found.k_mean if want_lse else None
    q_codes, q_scale, lse_shift = quantize_q(q.take(), recipe, rope, shift_mean, softmax_scale)
    if want_lse and lse_shift is None:
        # without smoothing no key mean was taken out of the scores
        lse_shift = torch.zeros_like(q_scale)
    k_codes, k_scale = quantize_k(k.take(), recipe, order, key_count, rope, found)
    v_codes, v_scale, v_mean, v_sum = quantize_v(v.take(), recipe, order, key_count, found.v_scale)
    return TritonOperands(
        recipe=recipe,
        q=q_codes,
        k=k_codes,
        v=v_codes,
        q_scale=q_scale,
        k_scale=k_scale,
        k_scale_max=k_scale.amax((2, 3)),
        v_scale=v_scale,
        v_sum=v_sum,
        v_mean=v_mean,
        keys=keys,
        key_count=key_count,
        score_scale=softmax_scale * formats.LOG2E,
        lse_shift=lse_shift,
        out_dtype=out_dtype,
    )
