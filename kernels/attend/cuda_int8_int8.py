"""INT8 QK, U8 probabilities times S8 values, on any card from sm_80 on (csrc/cuda_int8_int8.cu)."""

import torch

from ..prepare.cuda_sm90 import HopperOperands
from .cuda_mma import CSRC, run

SOURCE = CSRC / "cuda_int8_int8.cu"
SHARED_BYTES = 96384  # SHARED_BYTES of csrc/mma_frame.cuh with this source's records


def attend(operands: HopperOperands, out=None):
    """(out, lse): out [B, H, Lq, 128] in q's dtype, memory [B, Lq, H, 128]; lse fp32 [B, H, Lq] or None.

    out: where to write, some heads of memory [B, Lq, R, 128]; new memory if None.
    """
    means = operands.means
    switches = {
        "USE_MEANS": means is not None,
        "USE_F16_MEANS": means is not None and means.dtype == torch.float16,
    }
    return run(operands, SOURCE, "attend_u8s8", switches, SHARED_BYTES, 1.0, out)
