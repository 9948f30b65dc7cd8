"""Quantize one call for the mma.sync kernels: Hopper's preparation, built for the card at hand."""

import torch

from .. import formats
from ..config import Recipe
from ..operands import boxed
from . import cuda_sm90

# F6: codes stay under 2, and a tile's products fit an f16 accumulator (attend/csrc/cuda_int8_fp8_sm89.cu)
VALUE_TOP = formats.V_FP8_MAX / 256


def prepare(q, k, v, recipe: Recipe, *, order=None, key_count=None, softmax_scale, rope=None, want_lse=False):
    """Quantize one call; arguments as prepare/reference.py. Returns HopperOperands.

    FP8 values are codes of v / v_scale with v_scale = amax|v| / VALUE_TOP.
    """
    target = cuda_sm90.Target(arch_of(boxed(q).peek().device), VALUE_TOP)
    return cuda_sm90.quantize(
        q, k, v, recipe, target,
        order=order, key_count=key_count, softmax_scale=softmax_scale, rope=rope, want_lse=want_lse,
    )  # fmt: skip


def arch_of(device: torch.device) -> str:
    """What NVRTC calls the card, "sm_86"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
