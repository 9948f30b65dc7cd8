"""Quantize one call to NVFP4 into the fragments of the block-scaled product (csrc/cuda_nvfp4.cu)."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .. import formats
from ..attend.cuda_build import load_module, pack
from ..config import Recipe
from ..operands import boxed
from .cuda_sm90 import INPUTS, _is_wide, _rope_fields, _rows, _sign_words
from .reference import by_token

SOURCE = Path(__file__).parent / "csrc" / "cuda_nvfp4.cu"
HEAD_DIM = 128
BLOCK_ROWS = 128  # query rows of a block of the attention kernel; smoothed, they share a mean
TILE_RECORD = 8192 + 1024  # codes of a tile, then their scales
CHUNK = 1024  # keys of one partial sum
SHAPING = (HEAD_DIM, HEAD_DIM), (HEAD_DIM,), (HEAD_DIM, HEAD_DIM)
FEEDBACK_BYTES = 4 * HEAD_DIM * HEAD_DIM  # of a head; in a block's memory while it writes codes
SHAPE_BYTES = 4 * HEAD_DIM * (HEAD_DIM + 1)
NATIVE = ((12, 0), (12, 1))  # cards with the instructions
JOB = "PqqqPqqqPqqq PPqi PPPPPPPPPPPPPPPP qq iiii IIII f iii"  # struct Job


@dataclass(frozen=True)
class Nvfp4Operands:
    """One attention call, quantized, as attend/csrc/cuda_nvfp4_sm120.cu loads it; layouts in its nvfp4.cuh.

    Holds no floating-point q, k or v, but with smoothed queries the centred keys in bf16.
    """

    recipe: Recipe
    shape: tuple[int, int, int, int]  # B, H, Lq, Lk
    q: torch.Tensor  # int32 [B, H, blocks * 8, 32, 8]: A fragments of 16 rows
    q_scale: torch.Tensor  # int32 [B, H, blocks * 8, 32]
    k: torch.Tensor  # uint8 [B, H, T, TILE_RECORD]
    v: torch.Tensor  # uint8 [B, H, T, TILE_RECORD]
    means: torch.Tensor | None  # 16-bit [B, H, T, 128]; None: not demeaned
    amax: torch.Tensor  # fp32 [3, B, H]: largest magnitudes of q, k and the residual; g = amax / 2688
    q_means: torch.Tensor | None  # fp32 [B, H, blocks, 128]; None: queries not smoothed
    k_centred: torch.Tensor | None  # bf16 [B, H, T * 128, 128], in tile order; as q_means
    key_count: torch.Tensor | None  # int32 [B]
    lse_shift: torch.Tensor | None  # fp32 [B, H, Lq]; None: no lse wanted
    score_scale: float  # softmax scale * log2(e)
    out_dtype: torch.dtype


def prepare(q, k, v, recipe: Recipe, *, order=None, key_count=None, softmax_scale, rope=None, want_lse=False):
    """Quantize one call; arguments as prepare/reference.py. Returns Nvfp4Operands.

    q, k, v: [.., 128], any strides with a contiguous last dimension; or boxes, emptied when they were read.
    """
    q, k, v = boxed(q), boxed(k), boxed(v)
    (batch, heads, queries, _), keys = q.peek().shape, k.peek().shape[2]
    device, out_dtype, v_dtype = q.peek().device, q.peek().dtype, v.peek().dtype
    tiles, blocks, chunks = formats.tile_count(keys), -(-queries // BLOCK_ROWS), -(-keys // CHUNK)

    def empty(*shape, dtype=torch.float32):
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    order = None if order is None else order.contiguous()
    partial, k_mean = empty(chunks, HEAD_DIM), empty(HEAD_DIM)
    amax = torch.zeros(3, batch, heads, device=device)
    tables = [torch.empty(2, batch, heads, *shape, device=device) for shape in SHAPING]  # of q, of k
    q_means = empty(blocks, HEAD_DIM) if recipe.smooth_q else None
    rope_fields, rope_tables = _rope_fields(rope)
    inputs = [*_rows(q.peek()), *_rows(k.peek()), *_rows(v.peek())]
    passes = _Passes(q.peek(), k.peek(), v.peek(), rope is not None)

    def job(made_q=(None, None), made_k=None, made_v=None, means=None, shift=None, centred=None, order=order):
        return pack(
            JOB.replace(" ", ""),
            *inputs,
            *rope_fields,
            order, key_count,
            partial, k_mean, amax,
            *made_q, made_k, made_v, means, shift, q_means, centred,
            *tables,
            queries, keys,
            heads, tiles, blocks, chunks,
            *_sign_words(),
            softmax_scale, int(recipe.rotate_qk), int(recipe.smooth_k), int(recipe.demean),
        )  # fmt: skip

    # each input is given up as soon as it was read, before there is memory for the next one's codes
    listed = _listed_by_token(order, key_count)
    passes.statistics(job(order=listed), recipe, chunks, blocks, tables)
    codes_shared = 0, FEEDBACK_BYTES
    made_k = empty(tiles, TILE_RECORD, dtype=torch.uint8)
    k_centred = empty(tiles * formats.TILE, HEAD_DIM, dtype=torch.bfloat16) if recipe.smooth_q else None
    passes.codes(passes.of_k, "codes_k", tiles, 512, job(made_k=made_k, centred=k_centred), codes_shared)
    k.take()
    made_q = empty(blocks * 8, 32, 8, dtype=torch.int32), empty(blocks * 8, 32, dtype=torch.int32)
    lse_shift = empty(queries) if want_lse else None
    passes.codes(passes.of_q, "codes_q", blocks, 512, job(made_q=made_q, shift=lse_shift), codes_shared)
    q.take()
    made_v = empty(tiles, TILE_RECORD, dtype=torch.uint8)
    mean_dtype = torch.float16 if v_dtype == torch.float16 else torch.bfloat16
    means = empty(tiles, HEAD_DIM, dtype=mean_dtype) if recipe.demean else None
    tile_bytes = formats.TILE * HEAD_DIM * v_dtype.itemsize
    passes.codes(passes.of_v, "codes_v", tiles, 256, job(made_v=made_v, means=means), (tile_bytes,) * 2)
    v.take()
    del rope_tables  # kept until the kernels that read them were launched
    return Nvfp4Operands(
        recipe, (batch, heads, queries, keys), *made_q, made_k, made_v, means, amax, q_means, k_centred,
        key_count, lse_shift, softmax_scale * formats.LOG2E, out_dtype,
    )  # fmt: skip


def _listed_by_token(order, key_count):
    """The order with the keys that exist by token: means and moments do not see how keys are grouped (N6)."""
    if order is None or key_count is None:
        return order
    return order.gather(2, by_token(order, key_count))


class _Passes:
    """The launches of one call; holds none of its tensors."""

    def __init__(self, q, k, v, rope):
        self.all_heads = q.shape[0] * q.shape[1]
        self.of_q, self.of_k, self.of_v = (load(x.dtype, q.device, rope, _is_wide(x)) for x in (q, k, v))

    def statistics(self, job, recipe, chunks, blocks, tables):
        """Means of k and of q's blocks, then second moments of what is left and what follows (N6): tables.

        job: one whose order lists the existing keys by token.
        """
        if recipe.smooth_k:
            self.of_k.launch("sum_k", (chunks, self.all_heads), 256, job)
            self.of_k.launch("mean_k", (self.all_heads,), HEAD_DIM, job)
        if recipe.smooth_q:
            self.of_q.launch("mean_q", (blocks, self.all_heads), 512, job)
        for number, module in enumerate((self.of_q, self.of_k)):
            module.launch("moments", (HEAD_DIM // 32, self.all_heads), 256, job, pack("i", number))
        self.of_k.launch("shape", (self.all_heads, 2), 512, job, shared=SHAPE_BYTES)

    def codes(self, module, kernel, blocks, threads, job, shared):
        """The largest magnitude of each head, then its codes. shared: a block's memory for each."""
        for number in range(2):
            sizes = {"shared": shared[number]}
            module.launch(kernel, (blocks, self.all_heads), threads, job, pack("i", number), **sizes)


def arch_of(capability: tuple[int, int]) -> tuple[str, int]:
    """(arch as NVRTC takes it, USE_TWIN): the twin of the instructions wherever the card has none."""
    native = capability in NATIVE
    return f"sm_{capability[0]}{capability[1]}{'a' if native else ''}", int(not native)


def load(dtype, device, rope=False, wide=True):
    """The preparation kernels for one input dtype."""
    arch, twin = arch_of(torch.cuda.get_device_capability(device))
    switches = {"USE_TWIN": twin, "INPUT": INPUTS[dtype], "USE_ROPE": int(rope), "USE_WIDE": int(wide)}
    return load_module(SOURCE, arch, device, tuple(f"{name}={value}" for name, value in switches.items()))
