"""Host side of csrc/cuda_nvfp4_sm120.cu: NVFP4 for both products, on consumer Blackwell (sm_120, sm_121)."""

from pathlib import Path

import torch

from .. import formats
from ..operands import heads_in_a_row, new_results
from ..prepare.cuda_nvfp4 import Nvfp4Operands, arch_of
from .cuda_build import load_module, pack
from .cuda_int8_fp8_sm90 import OUT_TYPES

SOURCE = Path(__file__).parent / "csrc" / "cuda_nvfp4_sm120.cu"
THREADS = 256
SHARED_BYTES = 3 * (2 * 9216 + 256 + 512)  # three slots
UNIT = 16  # blocks of a head whose shifts are made together
SHIFT_BYTES = 64 * 2**20  # of the scores' shifts at a time (N3)
CALL = "PPPPPPPPPPPPP qqq iiii ii f"  # struct Call


def attend(operands: Nvfp4Operands, out=None):
    """(out, lse): out [B, H, Lq, 128] in q's dtype, memory [B, Lq, H, 128]; lse fp32 [B, H, Lq] or None.

    out: where to write, some heads of memory [B, Lq, R, 128]; new memory if None. On cards without the
    instructions their software twin runs: for tests, hundreds of times slower.
    """
    batch, heads, queries, keys = operands.shape
    device, smooth = operands.q.device, operands.q_means is not None
    out, lse = new_results((batch, heads, queries, 128), operands, out)
    tiles, blocks = formats.tile_count(keys), operands.q.shape[2] // 8
    units = batch * heads * -(-blocks // UNIT)
    a_unit = UNIT * tiles * formats.TILE
    at_a_time = min(units, max(1, SHIFT_BYTES // (4 * a_unit))) if smooth else units
    shift = torch.empty(at_a_time * a_unit, device=device) if smooth else None
    module = load(operands)
    for first in range(0, units, at_a_time):
        call = pack(
            CALL.replace(" ", ""),
            operands.q, operands.q_scale, operands.k, operands.v, operands.means, operands.amax,
            operands.q_means, operands.k_centred, shift,
            operands.key_count, operands.lse_shift, lse, out,
            queries, tiles, keys,
            heads, blocks, batch * heads, first,
            heads_in_a_row(out), OUT_TYPES[operands.out_dtype],
            operands.score_scale,
        )  # fmt: skip
        count = min(at_a_time, units - first)
        if smooth:
            module.launch("query_shift", (tiles, count), THREADS, call)
        module.launch("attend_nvfp4", (count * UNIT,), THREADS, call, shared=SHARED_BYTES)
    return out, lse


def load(operands: Nvfp4Operands):
    """The kernels for these operands on their card."""
    arch, twin = arch_of(torch.cuda.get_device_capability(operands.q.device))
    means = operands.means
    switches = {
        "USE_TWIN": twin,
        "USE_MEANS": int(means is not None),
        "USE_F16_MEANS": int(means is not None and means.dtype == torch.float16),
        "USE_SHIFT": int(operands.q_means is not None),
    }
    defines = tuple(f"{name}={value}" for name, value in switches.items())
    return load_module(SOURCE, arch, operands.q.device, defines)
