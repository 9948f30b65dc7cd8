"""Host side of the mma.sync attention kernels (csrc/mma_frame.cuh): a block takes 192 rows of queries."""

from pathlib import Path

from ..operands import heads_in_a_row, new_results
from ..prepare.cuda_mma import arch_of
from ..prepare.cuda_sm90 import BLOCK_ROWS, HopperOperands
from .cuda_build import load_module, pack
from .cuda_int8_fp8_sm90 import OUT_TYPES

CSRC = Path(__file__).parent / "csrc"
THREADS = 384
CALL = "PPPPPPPPPP qqqq iiii f"  # struct Call of csrc/mma_frame.cuh


def run(
    operands: HopperOperands,
    source: Path,
    kernel: str,
    switches: dict[str, bool],
    shared_bytes: int,
    units: float,
    out=None,
):
    """Launch one kernel of the family. units: of its scores, to the octave. Result as attend/reference.py."""
    batch, heads, queries, keys = operands.shape
    device = operands.q.device
    out, lse = new_results((batch, heads, queries, 128), operands, out)
    blocks = -(-queries // BLOCK_ROWS)
    call = pack(
        CALL.replace(" ", ""),
        operands.q, operands.q_scale, operands.k, operands.v, operands.means, operands.v_scale,
        operands.key_count, operands.lse_shift, lse, out,
        queries, operands.k.shape[2], keys, operands.q_scale.shape[2],
        heads, blocks, heads_in_a_row(out), OUT_TYPES[operands.out_dtype],
        operands.score_scale * units,
    )  # fmt: skip
    defines = tuple(f"{name}={int(on)}" for name, on in switches.items())
    module = load_module(source, arch_of(device), device, defines)
    module.launch(kernel, (batch * heads * blocks,), THREADS, call, shared=shared_bytes)
    return out, lse
