"""INT8 QK, E4M3 probabilities times E4M3 values in f16 accumulators (csrc/cuda_int8_fp8_sm89.cu)."""

from ..prepare.cuda_sm90 import HopperOperands
from .cuda_mma import CSRC, run

SOURCE = CSRC / "cuda_int8_fp8_sm89.cu"
SHARED_BYTES = 95360  # SHARED_BYTES of csrc/mma_frame.cuh with this source's records


def attend(operands: HopperOperands, out=None):
    """(out, lse): out [B, H, Lq, 128] in q's dtype, memory [B, Lq, H, 128]; lse fp32 [B, H, Lq] or None.

    out: where to write, some heads of memory [B, Lq, R, 128]; new memory if None.
    """
    switches = {"USE_EXPCAST": operands.recipe.expcast, "USE_MEANS": operands.recipe.demean}
    # codes: 8 to the octave
    return run(operands, SOURCE, "attend_e4m3", switches, SHARED_BYTES, 8.0, out)
