"""Host side of csrc/cuda_int8_fp8_sm90.cu: INT8 or E4M3 QK, E4M3 values, on Hopper."""

from pathlib import Path

import torch

from ..operands import heads_in_a_row, new_results
from ..prepare.cuda_sm90 import ARCH, BLOCK_ROWS, HopperOperands
from .cuda_build import load_module, pack

CSRC = Path(__file__).parent / "csrc"
SOURCE = CSRC / "cuda_int8_fp8_sm90.cu"
THREADS = 512
SHARED_BYTES = 199424  # SHARED_BYTES of csrc/frame.cuh
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
CALL = "PPPPPPPPPP qqq iii ii f"  # struct Call of csrc/frame.cuh


def attend(operands: HopperOperands, out=None):
    """(out, lse): out [B, H, Lq, 128] in q's dtype, memory [B, Lq, H, 128]; lse fp32 [B, H, Lq] or None.

    out: where to write, some heads of memory [B, Lq, R, 128]; new memory if None.
    """
    recipe = operands.recipe
    switches = {
        "USE_INT8_QK": recipe.numerics == "int8_fp8",
        "USE_EXPCAST": recipe.expcast,
        "USE_MEANS": recipe.demean,
    }
    return run(operands, SOURCE, "attend_e4m3", switches, out)


def run(operands: HopperOperands, source: Path, kernel: str, switches: dict[str, bool], out=None):
    """Launch one kernel of the family: a block per multiprocessor, each takes items in turn."""
    batch, heads, queries, keys = operands.shape
    device = operands.q.device
    out, lse = new_results((batch, heads, queries, 128), operands, out)
    blocks = -(-queries // BLOCK_ROWS)
    items = batch * heads * blocks
    call = pack(
        CALL.replace(" ", ""),
        operands.q, operands.q_scale, operands.k, operands.v, operands.means, operands.v_scale,
        operands.key_count, operands.lse_shift, lse, out,
        queries, operands.k.shape[2], keys,
        heads, blocks, items,
        heads_in_a_row(out), OUT_TYPES[operands.out_dtype],
        operands.score_scale * 8.0,  # code units: 8 to the octave
    )  # fmt: skip
    module = load_module(source, ARCH, device, tuple(f"{name}={int(on)}" for name, on in switches.items()))
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    module.launch(kernel, (min(items, multiprocessors),), THREADS, call, shared=SHARED_BYTES)
    return out, lse
