"""vc_attention(): choose a kernel, prepare its operands, attend."""

import contextlib
import math
from dataclasses import dataclass, replace

import torch

from .config import EXPCAST_CHOICES, PRECISIONS, VALUE_FORMATS, VCConfig
from .formats import FLOAT_DTYPES
from .operands import AttentionProblem, TokenGrouping, boxed, heads_in_a_row
from .registry import KernelSpec, choose_kernel, load_grouping
from .torch_op import define_op

DEFAULT_CONFIG = VCConfig()


def vc_attention(
    q,
    k,
    v,
    config: VCConfig = DEFAULT_CONFIG,
    *,
    grouping: TokenGrouping | None = None,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    rope: tuple | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
):
    """Low-bit attention of q over k and v (VC-Attention).

    q: [B, H, Lq, D]; k, v: [B, H, Lk, D]; bf16, fp16 or fp32 on one device, last dimension contiguous.
    grouping: from group_tokens; None means token order. That its order is a permutation is checked on a CPU
    alone: on a GPU, looking would wait for it. key_mask: bool [B, Lk], True = attend; a masked key does not
    exist, its value may be anything. scale: of the softmax, at least 0; D ** -0.5 by default.
    rope: (cos, sin, "interleaved" | "half") with tables [L, D/2] or [B, L, D/2], applied to q and k first.

    Returns [B, H, Lq, D] in q's dtype (memory [B, Lq, H, D]); with return_lse also the natural-log row
    log-sum-exp of the true scores, fp32 [B, H, Lq].

    Raises ValueError for inputs outside this contract, and if the kernel asked for cannot run the call. It
    never runs another kernel instead: a caller that wants a fallback asks choose_kernel() first.
    """
    cos, sin, layout = _rope_parts(rope)
    _validate_config(config)
    out, lse = _attention_op(
        q,
        k,
        v,
        None if grouping is None else grouping.order,
        key_mask,
        cos,
        sin,
        layout,
        list(_config_codes(config)),
        None if scale is None else float(scale),
        kernel,
        return_lse,
    )
    return (out, lse) if return_lse else out


@dataclass
class PreparedCall:
    """A call between its two halves: quantized operands, no floating-point q or v (at 4 bits k, centred)."""

    kernel: KernelSpec
    operands: object
    device: torch.device
    shape: torch.Size  # of the output
    dtype: torch.dtype


@contextlib.contextmanager
def on_device(device: torch.device):
    """Launches go to the current GPU, whichever the tensors are on: make theirs the current one.

    A caller's autocast ends here: it would round the products of codes to 16 bits.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def prepare_call(
    q,
    k,
    v,
    config=DEFAULT_CONFIG,
    *,
    grouping=None,
    key_mask=None,
    scale=None,
    rope=None,
    kernel="auto",
    return_lse=False,
) -> PreparedCall:
    """First half of vc_attention, for callers that free q, k and v before the output is allocated.

    q, k, v: tensors, or boxes (operands.Box) that hold them alone: each is emptied as soon as it was read for
    the last time. An error may leave some empty. Raises ValueError as vc_attention, and where a gradient is
    wanted, which the halves could not refuse later.
    """
    q, k, v = boxed(q), boxed(k), boxed(v)
    order = None if grouping is None else grouping.order
    _validate_config(config)
    validate(q.peek(), k.peek(), v.peek(), order, key_mask, rope)
    if torch.is_grad_enabled() and any(box.peek().requires_grad for box in (q, k, v)):
        raise ValueError("low-bit attention has no gradient: call it under torch.no_grad()")
    scale = q.peek().shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0 <= scale < math.inf:  # kernels find the largest score before they scale it
        raise ValueError(f"scale must be finite and not negative, got {scale}")
    choice = choose_kernel(AttentionProblem.of(q.peek(), k.peek(), v.peek(), config, rope), kernel)
    if choice.kernel is None:
        raise ValueError(f"no kernel can run this call: {choice.reason}")
    device, shape, dtype = q.peek().device, q.peek().shape, q.peek().dtype
    order, key_count = key_list(order, key_mask, shape[1])
    with on_device(device):
        operands = choice.kernel.load().prepare(
            q,
            k,
            v,
            choice.recipe,
            order=order,
            key_count=key_count,
            softmax_scale=scale,
            rope=rope,
            want_lse=return_lse,
        )
    return PreparedCall(choice.kernel, operands, device, shape, dtype)


def attend_call(prepared: PreparedCall, out: torch.Tensor | None = None):
    """Second half: (out, lse or None).

    out: where to write: [B, H, Lq, D] of q's dtype, some heads of memory [B, Lq, R, D]; None: new memory.
    Raises ValueError for another out.
    """
    if out is not None:
        got, expected = ((t.shape, t.dtype, t.device) for t in (out, prepared))
        if got != expected:
            raise ValueError(f"out must be {expected}, got {got}")
        heads_in_a_row(out)
    with on_device(prepared.device):
        return prepared.kernel.load().attend(prepared.operands, out)


def group_tokens(v, clusters, previous: TokenGrouping | None = None, key_mask=None) -> TokenGrouping:
    """Order that lists each head's keys by similar value: online k-means (paper 3.2).

    v: [B, H, Lk, D]. clusters: 1 to 256. previous: an earlier grouping of the same heads, whose centroids
    warm-start this one. key_mask: bool [B, Lk], True = the key exists; masked keys come last. Attention does
    not change when K and V are permuted alike: any order is correct, a better one leaves smaller residuals.
    Raises ValueError for inputs outside this contract.
    """
    if v.dim() != 4 or v.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"v must be a float [B, H, Lk, D] (bf16, fp16 or fp32), got {v.dtype} {tuple(v.shape)}"
        )
    if 0 in v.shape:
        raise ValueError(f"v must not be empty, got {tuple(v.shape)}")
    _validate_last_strides(v)
    VCConfig(clusters=clusters)
    centroids = None if previous is None else previous.centroids
    expected = (*v.shape[:2], clusters, v.shape[3])
    if centroids is not None and (tuple(centroids.shape) != expected or centroids.dtype != torch.float32):
        got = f"{centroids.dtype} {tuple(centroids.shape)}"
        raise ValueError(f"previous centroids must be float32 {expected}, got {got}")
    _validate_key_mask(key_mask, v)
    _validate_devices(v, centroids, key_mask)
    return TokenGrouping(*_group_op(v, clusters, centroids, key_mask))


def merge_attention(out_a, lse_a, out_b, lse_b):
    """Attention over the union of two disjoint key sets, from each set's output and log-sum-exp.

    out: [B, H, Lq, D]; lse: fp32 [B, H, Lq], natural log, -inf where a set has no key. Returns (out, lse)
    in out_a's dtype. Raises ValueError for tensors that do not fit each other.
    """
    shapes = [tuple(x.shape) for x in (out_a, lse_a, out_b, lse_b)]
    if shapes != [shapes[0], shapes[0][:-1]] * 2:
        raise ValueError(f"out and lse of both sets must be [B, H, Lq, D] and [B, H, Lq], got {shapes}")
    if lse_a.dtype != torch.float32 or lse_b.dtype != torch.float32:
        raise ValueError(f"lse must be float32, got {lse_a.dtype} and {lse_b.dtype}")
    lse = torch.logaddexp(lse_a, lse_b)
    # a row without keys in either set stays 0, -inf
    share_a, share_b = (
        torch.where(lse > -torch.inf, torch.exp(x - lse), 0.0)[..., None] for x in (lse_a, lse_b)
    )
    return (out_a.float() * share_a + out_b.float() * share_b).to(out_a.dtype), lse


def key_list(order, key_mask, heads):
    """(order, key_count) with the existing keys first, in their order; (order, None) without a mask.

    order: int32 [B, H, Lk] or None; key_mask: bool [B, Lk] or None. No host synchronisation.
    """
    if key_mask is None:
        return order, None
    if order is None:
        order = torch.arange(key_mask.shape[1], dtype=torch.int32, device=key_mask.device)
        order = order.expand(key_mask.shape[0], heads, -1)
    missing = ~key_mask[:, None].expand_as(order).gather(2, order.long())
    listed = order.gather(2, missing.to(torch.uint8).argsort(dim=2, stable=True))
    return listed, key_mask.sum(1, dtype=torch.int32)


def validate(q, k, v, order, key_mask, rope):
    """Raise ValueError for what no kernel can mean; what a kernel cannot do is choose_kernel's answer."""
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must be [B, H, L, D], got {tuple(q.shape)} and {tuple(k.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in B, H and D, got {tuple(q.shape)} and {tuple(k.shape)}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q and k must not be empty, got {tuple(q.shape)} and {tuple(k.shape)}")
    _validate_devices(q, k, v, order, key_mask, *(rope[:2] if rope is not None else ()))
    _validate_last_strides(q, k, v)
    if order is not None and (order.shape != k.shape[:3] or order.dtype != torch.int32):
        raise ValueError(f"order must be int32 {tuple(k.shape[:3])}, got {order.dtype} {tuple(order.shape)}")
    if order is not None and order.device.type == "cpu":
        in_order = torch.arange(order.shape[2], dtype=torch.int32)
        if not torch.equal(order.sort(-1).values, in_order.expand_as(order)):
            raise ValueError(
                f"each row of order must list every key 0 to {order.shape[2] - 1} once, got another list"
            )
    _validate_key_mask(key_mask, k)
    if rope is not None:
        _validate_rope(q, k, *rope)


def _validate_devices(*tensors):
    devices = [t.device for t in tensors if t is not None]
    if len(set(devices)) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(map(str, devices))}")


def _validate_last_strides(*tensors):
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in tensors):
        strides = [t.stride() for t in tensors]
        raise ValueError(f"the last dimension must be contiguous, got strides {strides}")


def _validate_key_mask(key_mask, k):
    expected = (k.shape[0], k.shape[2])
    if key_mask is not None and (tuple(key_mask.shape) != expected or key_mask.dtype != torch.bool):
        raise ValueError(f"key_mask must be bool {expected}, got {key_mask.dtype} {tuple(key_mask.shape)}")


def _validate_config(config):
    if not isinstance(config, VCConfig):
        raise ValueError(f"config must be a VCConfig, got {config!r}")


def _rope_parts(rope):
    """(cos, sin, layout) for the operator, which takes no tuple of tensors and a word."""
    if rope is None:
        return None, None, ""
    if len(rope) != 3 or not all(isinstance(table, torch.Tensor) for table in rope[:2]):
        kinds = ", ".join(type(part).__name__ for part in rope)
        raise ValueError(f"rope must be (cos, sin, layout) with two tensors and a word, got ({kinds})")
    return rope


def _validate_rope(q, k, cos, sin, layout):
    if layout not in ("interleaved", "half"):
        raise ValueError(f"rope layout must be interleaved or half, got {layout!r}")
    if cos.shape != sin.shape or not (cos.is_floating_point() and sin.is_floating_point()):
        got = f"{cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        raise ValueError(f"rope tables must be floats of one shape, got {got}")
    length, half = max(q.shape[2], k.shape[2]), q.shape[3] // 2
    fits = cos.dim() in (2, 3) and cos.shape[-1] == half and cos.shape[-2] >= length
    if not fits or (cos.dim() == 3 and cos.shape[0] != q.shape[0]):
        raise ValueError(
            f"rope tables must be [L, D/2] or [B, L, D/2] with L >= {length}, D/2 = {half}, "
            f"got {tuple(cos.shape)}"
        )


def _config_codes(config):
    """VCConfig as integers, because a custom op takes no dataclass."""
    demean, rotate = (-1 if switch is None else int(switch) for switch in (config.demean, config.rotate_qk))
    choices = (
        PRECISIONS.index(config.precision),
        EXPCAST_CHOICES.index(config.expcast),
        VALUE_FORMATS.index(config.value_format),
    )
    return (*choices, config.clusters, demean, rotate, int(config.smooth_k))


def _config_from_codes(codes):
    precision, expcast, value_format, clusters, demean, rotate, smooth_k = codes
    return VCConfig(
        PRECISIONS[precision],
        EXPCAST_CHOICES[expcast],
        VALUE_FORMATS[value_format],
        clusters,
        None if demean < 0 else bool(demean),
        None if rotate < 0 else bool(rotate),
        bool(smooth_k),
    )


def _attention(
    q, k, v, order, key_mask, cos, sin, rope_layout, config, scale, kernel, return_lse
) -> tuple[torch.Tensor, torch.Tensor]:
    prepared = prepare_call(
        q,
        k,
        v,
        _config_from_codes(config),
        grouping=None if order is None else TokenGrouping(order, None),
        key_mask=key_mask,
        scale=scale,
        rope=None if cos is None else (cos, sin, rope_layout),
        kernel=kernel,
        return_lse=return_lse,
    )
    out, lse = attend_call(prepared)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake_attention(q, k, v, order, key_mask, cos, sin, rope_layout, config, scale, kernel, return_lse):
    # with a meta tensor among others this runs instead of the kernel, and its output holds nothing
    _validate_devices(q, k, v, order, key_mask, cos, sin)
    b, h, lq, d = q.shape
    out = q.new_empty(b, lq, h, d).transpose(1, 2)
    return out, q.new_empty((b, h, lq) if return_lse else (0,), dtype=torch.float32)


_attention_op = define_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? order, Tensor? key_mask, Tensor? cos, Tensor? sin, "
    "str rope_layout, int[] config, float? scale, str kernel, bool return_lse) -> (Tensor, Tensor)",
    _attention,
    _fake_attention,
)


def _group(v, clusters, centroids, key_mask) -> tuple[torch.Tensor, torch.Tensor]:
    previous = None if centroids is None else TokenGrouping(None, centroids)
    with on_device(v.device):
        grouping = load_grouping(v, clusters)(v, clusters, previous, key_mask)
    return grouping.order, grouping.centroids


def _fake_group(v, clusters, centroids, key_mask):
    b, h, keys, d = v.shape
    return v.new_empty(b, h, keys, dtype=torch.int32), v.new_empty(b, h, clusters, d, dtype=torch.float32)


_group_op = define_op(
    "group_tokens(Tensor v, int clusters, Tensor? centroids, Tensor? key_mask) -> (Tensor, Tensor)",
    _group,
    _fake_group,
)


def plain(config: VCConfig) -> VCConfig:
    """The config of a step outside the grouping window, where keys keep token order.

    The same formats; means only where they gain something without a grouping (VCConfig.demean None).
    """
    return config if config.demean is False else replace(config, demean=None)
