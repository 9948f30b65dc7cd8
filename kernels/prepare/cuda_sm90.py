"""Quantize one call into the shared-memory images of the CUDA C++ attention kernels (csrc/cuda_sm90.cu).

Made for Hopper; the fragments of mma.sync are those of wgmma, so cuda_mma.py uses it on sm_80 and newer.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from .. import formats
from ..attend.cuda_build import load_module, pack
from ..config import Recipe
from ..operands import boxed

SOURCE = Path(__file__).parent / "csrc" / "cuda_sm90.cu"
ARCH = "sm_90a"
HEAD_DIM = 128
BLOCK_ROWS = 192  # query rows of one block of the attention kernel
KEY_RECORD = {"fp8": 16384 + 16, "int8": 16384 + 32}  # codes of a tile, then 4 or 8 scales, by value format
VALUE_RECORD = {"fp8": 16384 + 1024, "int8": 16384 + 512}  # codes, then ones or scales
MEAN_RECORD = 4096  # means of 16 tiles
MEAN_TILES = 16
CHUNK = 1024  # keys of one partial statistic
INPUTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "float"}
ROPE_LAYOUTS = {"": 0, "interleaved": 1, "half": 2}
JOB = "PqqqPqqqPqqq PPqi PPP PPPP PPPPPP qq iiii IIII fff iii"  # struct Job


@dataclass(frozen=True)
class Target:
    """What the attention kernels that share this preparation do not have in common."""

    arch: str  # of the builds
    value_top: float  # code of the largest |v| (F1), fp8 values only


@dataclass(frozen=True)
class HopperOperands:
    """One attention call, quantized, as attend/csrc/frame.cuh and mma_frame.cuh load it.

    Holds no floating-point q, k or v.
    """

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
    target = Target(ARCH, formats.V_FP8_MAX)
    return quantize(
        q, k, v, recipe, target,
        order=order, key_count=key_count, softmax_scale=softmax_scale, rope=rope, want_lse=want_lse,
    )  # fmt: skip


def quantize(q, k, v, recipe: Recipe, target: Target, *, order, key_count, softmax_scale, rope, want_lse):
    """prepare() for the cards and values of target."""
    q, k, v = boxed(q), boxed(k), boxed(v)
    (batch, heads, queries, _), keys = q.peek().shape, k.peek().shape[2]
    device, out_dtype, v_dtype = q.peek().device, q.peek().dtype, v.peek().dtype
    tiles, blocks, chunks = formats.tile_count(keys), -(-queries // BLOCK_ROWS), -(-keys // CHUNK)
    mean_tiles = -(-tiles // MEAN_TILES)
    fp8_values = recipe.value_format == "fp8"

    def empty(*shape, dtype=torch.float32):
        return torch.empty(batch, heads, *shape, dtype=dtype, device=device)

    order = None if order is None else order.contiguous()
    partial = torch.empty(2, batch, heads, chunks, HEAD_DIM, device=device)
    k_mean, v_scale = empty(HEAD_DIM), empty(HEAD_DIM) if fp8_values else None
    k_top = torch.zeros(batch, heads, dtype=torch.int32, device=device)
    by_size = None if fp8_values else empty(keys, dtype=torch.int32)
    rope_fields, rope_tables = _rope_fields(rope)
    inputs = [*_rows(q.peek()), *_rows(k.peek()), *_rows(v.peek())]
    passes = _Passes(recipe, target.arch, q.peek(), k.peek(), v.peek(), rope is not None)

    def job(q_image=None, q_scale=None, k_image=None, v_image=None, means=None, lse_shift=None):
        return pack(
            JOB.replace(" ", ""),
            *inputs,
            *rope_fields,
            order, by_size, key_count,
            partial, k_mean, k_top, v_scale,
            q_image, q_scale, k_image, v_image, means, lse_shift,
            queries, keys,
            heads, tiles, blocks, chunks,
            *_sign_words(),
            softmax_scale, largest_scales(recipe, softmax_scale), target.value_top,
            int(recipe.rotate_qk), int(recipe.smooth_k), int(recipe.demean),
        )  # fmt: skip

    # each input is given up as soon as it was read, before there is memory for the next one's codes
    passes.statistics(job(), chunks)
    made_k = empty(tiles, KEY_RECORD[recipe.value_format], dtype=torch.uint8)
    passes.codes_k(job(k_image=made_k), tiles)
    k.take()
    # after the keys, whose largest scale bounds a query's
    made_q = empty(blocks * 3, 64, 128, dtype=torch.uint8), empty(blocks * BLOCK_ROWS)
    lse_shift = empty(queries) if want_lse else None
    passes.codes_q(job(*made_q, lse_shift=lse_shift), blocks * 3)
    q.take()
    made_v = empty(tiles, VALUE_RECORD[recipe.value_format], dtype=torch.uint8)
    mean_dtype = torch.float16 if fp8_values or v_dtype == torch.float16 else torch.bfloat16
    means = empty(mean_tiles, MEAN_RECORD // 2, dtype=mean_dtype) if recipe.demean else None
    # blocks past the last tile zero the means that fill its group of 16
    passes.codes_v(job(v_image=made_v, means=means), mean_tiles * MEAN_TILES if recipe.demean else tiles)
    v.take()
    del rope_tables  # kept until the kernels that read them were launched
    return HopperOperands(
        recipe, (batch, heads, queries, keys), *made_q, made_k, made_v, v_scale, means, key_count, lse_shift,
        softmax_scale * formats.LOG2E, out_dtype,
    )  # fmt: skip


class _Passes:
    """The launches of one call; holds none of its tensors."""

    def __init__(self, recipe, arch, q, k, v, rope):
        self.recipe, self.all_heads = recipe, q.shape[0] * q.shape[1]
        # one decision for q and k: it says whether the mean of k is kept rotated
        tensor = recipe.rotate_qk and not rope and torch.float32 not in (q.dtype, k.dtype)
        self.of_q, self.of_k, self.of_v = (
            load(recipe, arch, x.dtype, q.device, rope, _is_wide(x), tensor) for x in (q, k, v)
        )
        self.v_tile_bytes = formats.TILE * HEAD_DIM * v.element_size()

    def statistics(self, job, chunks):
        smooth, scales_v = self.recipe.smooth_k, self.recipe.value_format == "fp8"
        if smooth and scales_v and self.of_k is self.of_v:
            self.of_k.launch("statistics", (chunks, self.all_heads, 2), 256, job, pack("i", 0))
        else:
            if smooth:
                self.of_k.launch("statistics", (chunks, self.all_heads), 256, job, pack("i", 0))
            if scales_v:
                self.of_v.launch("statistics", (chunks, self.all_heads), 256, job, pack("i", 1))
        if smooth or scales_v:
            self.of_k.launch("finish_statistics", (self.all_heads,), HEAD_DIM, job)

    def codes_q(self, job, blocks):
        self.of_q.launch("codes_q", (blocks, self.all_heads), 128, job)

    def codes_k(self, job, tiles):
        # a block takes 32 keys, or a tile where its keys are put in order
        blocks, threads = (tiles, 256) if self.recipe.value_format == "int8" else (tiles * 4, 64)
        self.of_k.launch("codes_k", (blocks, self.all_heads), threads, job)

    def codes_v(self, job, blocks):
        # the tile as it is, then its codes in the same place
        self.of_v.launch("codes_v", (blocks, self.all_heads), 256, job, shared=self.v_tile_bytes)


def largest_scales(recipe: Recipe, softmax_scale: float) -> float:
    """What q_scale * k_scale may be, so that no score passes formats.LARGEST_SCORE_LOG2 octaves."""
    top = formats.INT8_MAX if recipe.numerics.startswith("int8") else formats.E4M3_MAX
    unit = abs(softmax_scale) * formats.LOG2E * top * top * HEAD_DIM
    return min(formats.LARGEST_SCORE_LOG2 / unit, 3.0e38) if unit else 3.0e38


def load(recipe, arch, dtype, device, rope=False, wide=True, tensor_rotation=False):
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
    return load_module(SOURCE, arch, device, tuple(f"{name}={value}" for name, value in switches.items()))


def _is_wide(x):
    """Whether every row starts on 16 bytes."""
    vector = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride % vector == 0 for stride in x.stride()[:3])


def _rows(x):
    """struct Rows of a strided tensor; a pointer, so that nothing holds the tensor."""
    return x.data_ptr(), *x.stride()[:3]


def _rope_fields(rope):
    """struct Rope, and the tables it points to: whole, and from 16 bytes on, for they are read in vectors."""
    if rope is None:
        return (None, None, 0, 0), ()
    cos, sin, layout = rope
    cos, sin = (t.float().contiguous() for t in (cos, sin))
    cos, sin = (t if t.data_ptr() % 16 == 0 else t.clone() for t in (cos, sin))
    batch = cos.shape[1] * cos.shape[2] if cos.dim() == 3 else 0
    return (cos, sin, batch, ROPE_LAYOUTS[layout]), (cos, sin)


def _sign_words():
    return [formats.SIGN_BITS >> 32 * i & 0xFFFFFFFF for i in range(4)]
