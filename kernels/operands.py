"""What one stage hands to the next, and what a kernel is chosen by."""

from dataclasses import dataclass, field

import torch

from .config import Recipe, VCConfig


class Box:
    """A tensor with one owner: whoever reads it last takes it, and it is freed while the call goes on.

    Others' boxes with peek() and take() serve as well.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor: torch.Tensor | None = tensor

    def peek(self) -> torch.Tensor:
        if self._tensor is None:
            raise RuntimeError("the tensor of this box was taken")
        return self._tensor

    def take(self) -> torch.Tensor:
        tensor, self._tensor = self.peek(), None
        return tensor


def boxed(x) -> Box:
    """A tensor in a box of its own (the caller still holds it), or the box that x is."""
    return Box(x) if isinstance(x, torch.Tensor) else x


@dataclass(frozen=True)
class TokenGrouping:
    """A token order per head, and the centroids that made it (they warm-start the next one)."""

    order: torch.Tensor  # int32 [B, H, Lk], a permutation per head; masked keys last
    centroids: torch.Tensor  # fp32 [B, H, C, D]


@dataclass(frozen=True)
class VCOperands:
    """One attention call, quantized; the layout of the reference. Keys and values are in tile order.

    Every ``*_scale`` multiplies: value = code * scale. Holds no floating-point q or v.
    Formats by recipe: int8 codes are int8, fp8 codes float8_e4m3fn, nvfp4 codes packed uint8 (N5).
    """

    recipe: Recipe
    q: torch.Tensor  # [B, H, Lq, D] (nvfp4: [B, H, Lq, D/2])
    k: torch.Tensor  # [B, H, Lk, D] (nvfp4: [B, H, Lk, D/2])
    v: torch.Tensor  # [B, H, Lk, D] residuals (nvfp4: [B, H, T, D, 64])
    q_scale: torch.Tensor  # fp32 [B, H, Lq] (nvfp4: e4m3 [B, H, Lq, D/16])
    k_scale: torch.Tensor  # fp32 [B, H, T, 4], one per 32 keys; or more (nvfp4: e4m3 [B, H, Lk, D/16])
    v_scale: torch.Tensor  # fp32 [B, H, D] (fp8), [B, H, T, D] (int8), e4m3 [B, H, T, D, 8] (nvfp4)
    v_mean: torch.Tensor | None  # 16-bit [B, H, T, D]; divided by v_scale for fp8; None: not demeaned
    score_scale: float  # softmax scale * log2(e)
    key_count: torch.Tensor | None  # int32 [B]; None: all Lk keys exist
    lse_shift: torch.Tensor | None  # fp32 [B, H, Lq]: softmax scale * (q . mean of k); None: no lse wanted
    out_dtype: torch.dtype
    global_scale: tuple[torch.Tensor, ...] = ()  # nvfp4: fp32 [B, H] of q, k, v
    q_means: torch.Tensor | None = None  # [B, H, ceil(Lq / 128), D]; None: queries not smoothed (N3)
    k_centred: torch.Tensor | None = None  # k' as it was, [B, H, Lk, D] in tile order; as q_means


@dataclass(frozen=True)
class AttentionProblem:
    """Everything a kernel is chosen by; holds no tensors."""

    q_shape: tuple[int, ...]  # B, H, Lq, D
    k_shape: tuple[int, ...]  # B, H, Lk, D
    dtypes: tuple[torch.dtype, ...]  # of q, k, v
    last_strides: tuple[int, ...]  # stride of the last dimension of q, k, v
    device_type: str
    capability: tuple[int, int] | None = None  # (9, 0) on an H100; None without CUDA
    config: VCConfig = field(default_factory=VCConfig)
    has_rope: bool = False
    device_name: str = ""  # as torch says it; "" without CUDA, or where the card does not matter

    @classmethod
    def of(cls, q, k, v, config=None, rope=None):
        """The problem that tensors q [B, H, Lq, D] and k, v [B, H, Lk, D] pose."""
        return cls(
            q_shape=tuple(q.shape),
            k_shape=tuple(k.shape),
            dtypes=(q.dtype, k.dtype, v.dtype),
            last_strides=(q.stride(-1), k.stride(-1), v.stride(-1)),
            config=config or VCConfig(),
            has_rope=rope is not None,
            **card_fields(q.device),
        )

    @classmethod
    def self_attention(cls, tokens: int, dtype=torch.bfloat16, heads=1, **fields):
        """What a video model will pose, before there are tensors. fields: device_type and further ones."""
        shape = (1, heads, tokens, 128)  # the head dim of every family of models
        return cls(q_shape=shape, k_shape=shape, dtypes=(dtype,) * 3, last_strides=(1, 1, 1), **fields)

    @property
    def head_dim(self) -> int:
        return self.q_shape[-1]


def new_output(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Empty [B, H, Lq, D] whose memory is [B, Lq, H, D], as callers flatten it."""
    batch, heads, queries, width = shape
    return torch.empty(batch, queries, heads, width, dtype=dtype, device=device).transpose(1, 2)


def new_results(shape, operands, out: torch.Tensor | None = None):
    """What a kernel writes: (out of this shape [B, H, Lq, D], new if None; lse fp32 [B, H, Lq] or None)."""
    device = operands.q.device
    if out is None:
        out = new_output(shape, operands.out_dtype, device)
    if operands.lse_shift is None:
        return out, None
    return out, torch.empty(tuple(shape[:3]), dtype=torch.float32, device=device)


def heads_in_a_row(out: torch.Tensor) -> int:
    """R of an output [B, H, Lq, D] that is some heads of memory [B, Lq, R, D].

    Raises ValueError for any other layout.
    """
    batch, heads, queries, width = out.shape
    row = out.stride(2) if queries > 1 else out.stride(0) if batch > 1 else heads * width
    expected = (queries * row, width, row, 1)
    # the stride of a dimension of size 1 means nothing
    fits = all(n == 1 or got == want for n, got, want in zip(out.shape, out.stride(), expected, strict=True))
    if not fits or row % width or row < heads * width:
        raise ValueError(
            f"out must be some heads of memory [B, Lq, heads, D], got {tuple(out.shape)} with strides "
            f"{out.stride()}"
        )
    return row // width


def card_fields(device: torch.device) -> dict:
    """device_type, capability and device_name of an AttentionProblem on device."""
    if device.type != "cuda":
        return {"device_type": device.type}
    if torch.version.hip is not None:
        return {"device_type": "rocm"}
    return {
        "device_type": "cuda",
        "capability": torch.cuda.get_device_capability(device),
        "device_name": torch.cuda.get_device_name(device),
    }
