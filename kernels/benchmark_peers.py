"""Other attention functions that the benchmark measures beside ours, each with why it cannot run here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peer:
    """attend(q, k, v) -> out, all [B, H, L, D]; why_not(q) -> None if it can run on tensors like q."""

    name: str
    attend: Callable
    why_not: Callable


def pytorch(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def pytorch_cudnn(q, k, v):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def flash4(q, k, v):
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)))
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions return the LSE too


def comfy_kitchen(q, k, v):
    from comfy_kitchen import int8_attention

    return int8_attention(q, k, v)


def sage1(q, k, v):
    """INT8 Q and K, 16-bit P and V, in Triton: all of version 1, and one function of version 2."""
    import sageattention

    if is_sage2(sageattention):
        return sageattention.sageattn_qk_int8_pv_fp16_triton(q, k, v, tensor_layout="HND", is_causal=False)
    # version 1 subtracts the K mean in the caller's own tensor
    return sageattention.sageattn(q, k.clone(), v, tensor_layout="HND", is_causal=False)


def sage2(q, k, v):
    """What version 2 takes on this card by itself; on sm_90 INT8 Q and K, FP8 P and V."""
    from sageattention import sageattn

    return sageattn(q, k, v, tensor_layout="HND", is_causal=False)


def is_sage2(package) -> bool:
    return hasattr(package, "sageattn_qk_int8_pv_fp8_cuda")


def needs_gpu(q) -> str | None:
    return None if q.is_cuda and q.dtype != torch.float32 else "needs a GPU and 16-bit tensors"


def no_comfy_kitchen(q) -> str | None:
    try:
        from comfy_kitchen import int8_attention_is_available
    except ImportError:
        return "not installed, or older than its INT8 attention"
    return needs_gpu(q) or (None if int8_attention_is_available(q.device) else "says that it cannot run here")


def no_flash4(q) -> str | None:
    if needs_gpu(q):
        return needs_gpu(q)
    if torch.cuda.get_device_capability(q.device)[0] not in (8, 9, 10, 11, 12):
        return "has no kernel for this card"
    if q.shape[-1] > 128 or q.shape[-1] % 8:
        return f"needs a head dimension that is a multiple of 8, at most 128, got {q.shape[-1]}"
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError:
        return "not installed (the package flash-attn-4)"
    return None


def no_sage1(q) -> str | None:
    try:
        import sageattention  # noqa: F401
    except ImportError:
        return "not installed"
    if needs_gpu(q):
        return needs_gpu(q)
    supported = q.shape[-1] in (64, 96, 128)
    return None if supported else f"needs a head dimension of 64, 96 or 128, got {q.shape[-1]}"


# what version 2 calls the build that it takes on a card; on sm_86 it takes version 1's kernel
SAGE2_BUILDS = {(8, 0): "SM80", (8, 9): "SM89", (9, 0): "SM90", (12, 0): "SM89", (12, 1): "SM89"}


def no_sage2(q) -> str | None:
    try:
        import sageattention
    except ImportError:
        return "not installed"
    if not is_sage2(sageattention):
        return "version 1 is installed"
    if needs_gpu(q):
        return needs_gpu(q)
    if q.shape[-1] > 128:
        return f"needs a head dimension of at most 128, got {q.shape[-1]}"
    build = SAGE2_BUILDS.get(torch.cuda.get_device_capability(q.device))
    if build is None:
        return "has no kernel of its own for this card"
    from sageattention import core

    return None if getattr(core, f"{build}_ENABLED", False) else f"was built without its {build} kernel"


PEERS = (
    Peer("PyTorch", pytorch, lambda q: None),
    Peer("PyTorch cuDNN", pytorch_cudnn, needs_gpu),
    Peer("FlashAttention-4", flash4, no_flash4),
    Peer("comfy-kitchen INT8", comfy_kitchen, no_comfy_kitchen),
    Peer("SageAttention 1", sage1, no_sage1),
    Peer("SageAttention 2", sage2, no_sage2),
)
