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


def comfy_kitchen(q, k, v):
    from comfy_kitchen import int8_attention

    return int8_attention(q, k, v)


def sage(q, k, v):
    from sageattention import sageattn

    return sageattn(q, k, v, tensor_layout="HND", is_causal=False)


def needs_gpu(q) -> str | None:
    return None if q.is_cuda and q.dtype != torch.float32 else "needs a GPU and 16-bit tensors"


def no_comfy_kitchen(q) -> str | None:
    try:
        from comfy_kitchen import int8_attention_is_available
    except ImportError:
        return "not installed, or older than its INT8 attention"
    return needs_gpu(q) or (None if int8_attention_is_available(q.device) else "says that it cannot run here")


def no_sage(q) -> str | None:
    try:
        import sageattention  # noqa: F401
    except ImportError:
        return "not installed"
    return needs_gpu(q)


PEERS = (
    Peer("PyTorch", pytorch, lambda q: None),
    Peer("PyTorch cuDNN", pytorch_cudnn, needs_gpu),
    Peer("comfy-kitchen INT8", comfy_kitchen, no_comfy_kitchen),
    Peer("SageAttention", sage, no_sage),
)
