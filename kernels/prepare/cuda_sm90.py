"""Quantize one call for the Hopper kernels into shared-memory images (csrc/cuda_sm90.cu)."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .. import formats
from ..attend.cuda_build import load_module, pack
from ..config import Recipe

SOURCE = Path(__file__).parent / "csrc" / "cuda_sm90.cu"
ARCH = "sm_90a"
HEAD_DIM = 128
BLOCK_ROWS = 192  # query rows of one block of the attention kernel
KEY_RECORD = 16384 + 16  # codes of a tile, then 4 scales
VALUE_RECORD = {"fp8": 16384 + 1024, "int8": 16384 + 512}  # codes, then ones or scales
MEAN_RECORD = 4096  # means of 16 tiles
MEAN_TILES = 16
CHUNK = 1024  # keys of one partial statistic
INPUTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "float"}
ROPE_LAYOUTS = {"": 0, "interleaved": 1, "half": 2}
JOB = "PqqqPqqqPqqq PPqi PP PPP PPPPPP qq iiii IIII f iii"  # struct Job


@dataclass(frozen=True)
class HopperOperands:
    """One attention call, quantized, as attend/csrc/frame.cuh loads it. Holds no floating-point q, k or v."""

    recipe: Recipe
    shape: tuple[int, int, int, int]  # B, H, Lq, Lk
    q: torch.Tensor  # uint8 [B, H, blocks * 3, 64, 128], rows of codes, swizzled
    q_scale: torch.Tensor  # fp32 [B, H, blocks * 192], 0 past Lq
    k: torch.Tensor  # uint8 [B, H, T, KEY_RECORD]
    v: torch.Tensor  # uint8 [B, H, T, VALUE_RECORD]
    v_scale: torch.Tensor | None  # fp32 [B, H, 128]; None: in the records (int8)
    means: torch.Tensor | None  # 16-bit [B, H, ceil(T / 16), 2048], swizzled; None: not demeaned
    key_count: torch.Tensor | None  # int32 [B]
    lse_shift: torch.Tensor | None  # fp32 [B, H, Lq]; None: no lse wanted
    score_scale: float  # softmax scale * log2(e)
    out_dtype: torch.dtype


def prepare(q, k, v, recipe: Recipe, *, order=None, key_count=None, softmax_scale, rope=None, want_lse=False):
    """Quantize one call; arguments as prepare/reference.py. Returns HopperOperands.

    q, k, v: [.., 128], any strides with a contiguous last dimension; offsets are 64-bit.
    """
    batch, heads, queries, _ = q.shape
    keys, device = k.shape[2], q.device
    tiles, blocks, chunks = formats.tile_count(keys), -(-queries // BLOCK_ROWS), -(-keys // CHUNK)
    mean_tiles = -(-tiles // MEAN_TILES)
    fp8_values = recipe.value_format == "fp8"
    mean_dtype = torch.float16 if fp8_values or v.dtype == torch.float16 else torch.bfloat16

    def empty(*shape, dtype=torch.float32):
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    operands = HopperOperands(
        recipe,
        (batch, heads, queries, keys),
        q=empty(blocks * 3, 64, 128, dtype=torch.uint8),
        q_scale=empty(blocks * BLOCK_ROWS),
        k=empty(tiles, KEY_RECORD, dtype=torch.uint8),
        v=empty(tiles, VALUE_RECORD[recipe.value_format], dtype=torch.uint8),
        v_scale=empty(HEAD_DIM) if fp8_values else None,
        means=empty(mean_tiles, MEAN_RECORD // 2, dtype=mean_dtype) if recipe.demean else None,
        key_count=key_count,
        lse_shift=empty(queries) if want_lse else None,
        score_scale=softmax_scale * formats.LOG2E,
        out_dtype=q.dtype,
    )
    order = None if order is None else order.contiguous()
    partial = torch.empty(2, batch, heads, chunks, HEAD_DIM, device=device)
    k_mean = empty(HEAD_DIM)
    rope_fields, rope_tables = _rope_fields(rope)
    job = pack(
        JOB.replace(" ", ""),
        *_rows(q), *_rows(k), *_rows(v),
        *rope_fields,
        order, key_count,
        partial, k_mean, operands.v_scale,
        operands.q, operands.q_scale, operands.k, operands.v, operands.means, operands.lse_shift,
        queries, keys,
        heads, tiles, blocks, chunks,
        *_sign_words(),
        softmax_scale,
        int(recipe.rotate_qk), int(recipe.smooth_k), int(recipe.demean),
    )  # fmt: skip
    # one decision for q and k: it says whether the mean of k is kept rotated
    tensor = recipe.rotate_qk and rope is None and torch.float32 not in (q.dtype, k.dtype)
    modules = (load(recipe, x.dtype, device, rope is not None, _is_wide(x), tensor) for x in (q, k, v))
    _launch(operands, job, *modules, formats.TILE * HEAD_DIM * v.element_size())
    del rope_tables  # kept until the kernels that read them were launched
    return operands


def load(recipe, dtype, device, rope=False, wide=True, tensor_rotation=False):
    """The preparation kernels of a recipe for one input dtype."""
    qk, _, values = recipe.numerics.partition("_")
    switches = {
        "INPUT": INPUTS[dtype],
        "USE_INT8_QK": int(qk == "int8"),
        "USE_INT8_VALUES": int(values == "int8"),
        "USE_ROPE": int(rope),
        "USE_WIDE": int(wide),
        "USE_TENSOR_ROTATION": int(tensor_rotation),
    }
    return load_module(SOURCE, ARCH, device, tuple(f"{name}={value}" for name, value in switches.items()))


def _launch(operands, job, of_q, of_k, of_v, v_tile_bytes):
    """The passes, from the modules of q, k and v."""
    recipe, (batch, heads, _, keys) = operands.recipe, operands.shape
    all_heads, tiles, chunks = batch * heads, formats.tile_count(keys), -(-keys // CHUNK)
    scales_v = operands.v_scale is not None
    if recipe.smooth_k and scales_v and of_k is of_v:
        of_k.launch("statistics", (chunks, all_heads, 2), 256, job, pack("i", 0))
    else:
        if recipe.smooth_k:
            of_k.launch("statistics", (chunks, all_heads), 256, job, pack("i", 0))
        if scales_v:
            of_v.launch("statistics", (chunks, all_heads), 256, job, pack("i", 1))
    if recipe.smooth_k or scales_v:
        of_k.launch("finish_statistics", (all_heads,), HEAD_DIM, job)
    of_q.launch("codes_q", (operands.q.shape[2], all_heads), 128, job)
    of_k.launch("codes_k", (tiles * 4, all_heads), 64, job)
    # blocks past the last tile zero the means that fill its group of 16
    v_blocks = operands.means.shape[2] * MEAN_TILES if recipe.demean else tiles
    # the tile as it is, then its codes in the same place
    of_v.launch("codes_v", (v_blocks, all_heads), 256, job, shared=v_tile_bytes)


def _is_wide(x):
    """Whether every row starts on 16 bytes."""
    vector = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride % vector == 0 for stride in x.stride()[:3])


def _rows(x):
    """struct Rows of a strided tensor."""
    return x, *x.stride()[:3]


def _rope_fields(rope):
    """struct Rope, and the tables it points to."""
    if rope is None:
        return (None, None, 0, 0), ()
    cos, sin, layout = rope
    cos, sin = (t.float().contiguous() for t in (cos, sin))
    batch = cos.shape[1] * cos.shape[2] if cos.dim() == 3 else 0
    return (cos, sin, batch, ROPE_LAYOUTS[layout]), (cos, sin)


def _sign_words():
    return [formats.SIGN_BITS >> 32 * i & 0xFFFFFFFF for i in range(4)]
