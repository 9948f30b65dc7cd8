"""A call in several groups of heads, where memory is too short for all at once.

What a call needs beside q, k, v and its output shrinks with the group: quantized operands and one group's
output. Heads do not know of each other, so the result is that of one call.
"""

import sys

import torch

from ..kernels import TokenGrouping, attend_call, prepare_call
from ..kernels.operands import new_output

FEWEST = 16  # chosen: then a group's share stays below 4% of q, k, v and out together
BOXED = 10  # chosen: where the host counts on q, k, v and out alone, a group's share is about 4% of them
OPERAND_BYTES = 1.1  # per element of q, k and v: one byte of code, and scales, means and padding


def groups_needed(q, k, free: int | None) -> int:
    """How many groups of heads fit a call of q [B, H, Lq, D] and k [B, H, Lk, D] into that many free bytes.

    1 if all heads fit at once, or if nobody knows what is free.
    """
    out = q.numel() * q.element_size()
    beside = OPERAND_BYTES * (q.numel() + 2 * k.numel())
    if free is None or beside + out <= free:
        return 1
    share = beside + out  # a group makes its own output first
    wanted = FEWEST if free <= out else max(FEWEST, -int(-share // (free - out)))
    return min(q.shape[1], wanted)


def free_memory(device: torch.device) -> int | None:
    """Bytes that PyTorch can still allocate on a GPU, as ComfyUI counts them; None elsewhere.

    Weights that ComfyUI holds there and could page out count as used.
    """
    management = sys.modules.get("comfy.model_management")
    if device.type != "cuda" or management is None:
        return None
    return int(management.get_free_memory(device))


def attend_by_heads(q, k, v, config, groups: int, *, grouping=None, **call):
    """What prepare_call and attend_call make of q, k, v and call, head group by head group.

    q: [B, H, Lq, D]; k, v: [B, H, Lk, D]. Returns [B, H, Lq, D], memory [B, Lq, H, D].
    """
    heads, out = q.shape[1], new_output(q.shape, q.dtype, q.device)
    size = -(-heads // groups)
    for first in range(0, heads, size):
        part = slice(first, first + size)
        order = None if grouping is None else TokenGrouping(grouping.order[:, part].contiguous(), None)
        # unnamed, or the operands of one group would live while those of the next are made
        attend_call(
            prepare_call(q[:, part], k[:, part], v[:, part], config, grouping=order, **call), out[:, part]
        )
    return out
