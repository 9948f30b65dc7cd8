"""vLLM-Omni: an entry point that makes VC-Attention one of its diffusion attention backends.

    pip install <this checkout>  # beside the server
    vllm-omni serve <model> --omni --diffusion-attention-backend CUDNN_ATTN

The enum of backends is closed and a plugin can only take a member's place, so this one borrows CUDNN_ATTN's.
Calls that VC-Attention does not take go to vLLM-Omni's SDPA backend.
"""

import math
from collections import Counter
from functools import cache

import torch

from ..config import VCConfig
from ..operands import AttentionProblem
from ..registry import choose_kernel
from .sharded import ShardedAttention

BORROWED = "CUDNN_ATTN"
GROUPING_WINDOW = 0.25  # share of the denoising steps in which values are grouped


def register() -> None:
    """What vLLM-Omni calls in every process, maybe more than once (group "vllm_omni.general_plugins")."""
    from vllm_omni.diffusion.attention.backends.registry import (
        DiffusionAttentionBackendEnum,
        register_diffusion_backend,
    )

    register_diffusion_backend(DiffusionAttentionBackendEnum[BORROWED], f"{__name__}.VCAttentionBackend")


def __getattr__(name):
    # the classes derive from vLLM-Omni's, so they exist only where it can be imported
    if name == "VCAttentionBackend":
        return _backend_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def begin_step(sharded: ShardedAttention, step, steps) -> None:
    """Pass the server's denoising step on; without one (warm-up, other pipelines) values keep token order."""
    if step is not None and steps:
        # a layer called again in one step belongs to the other half of guidance
        branch = sharded.branch + 1 if step == sharded.step else 0
        sharded.begin_forward(step, step < math.ceil(GROUPING_WINDOW * steps), branch)


def declines(impl, query, key, value, metadata) -> str | None:
    """Why a call is left to SDPA, or None."""
    if impl.role != "self":
        return f"attention of role {impl.role!r}"
    if impl.causal or (metadata is not None and metadata.full_attn_spans):
        return "causal or piecewise"
    if query.shape[1] != key.shape[1] or query.shape[2] != key.shape[2]:
        return "cross-attention or grouped-query heads"
    mask = None if metadata is None else metadata.attn_mask
    if mask is not None and (mask.dtype != torch.bool or mask.shape != key.shape[:2]):
        return "a mask that is not one of keys"
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    return choose_kernel(AttentionProblem.of(*heads_first, impl.sharded.config), impl.sharded.kernel).reason


@cache
def _impl_class():
    from vllm_omni.diffusion.attention.backends.abstract import AttentionImpl
    from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
    from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

    class VCAttentionImpl(AttentionImpl):
        """One attention layer; its token orders live here."""

        def __init__(self, num_heads, head_size, softmax_scale, causal=False, role="self", **rest):
            self.exact = SDPABackend.get_impl_cls()(num_heads, head_size, softmax_scale, causal, **rest)
            self.causal, self.softmax_scale, self.role = causal, softmax_scale, role
            self.sharded = ShardedAttention()
            self.declined = Counter()

        def forward_cuda(self, query, key, value, attn_metadata=None):
            """query, key, value: [B, L, H, D], this rank's heads of the whole sequence. Returns q's shape."""
            reason = declines(self, query, key, value, attn_metadata)
            if reason:
                self.declined[reason] += 1
                return self.exact.forward_cuda(query, key, value, attn_metadata)
            if is_forward_context_available():
                context = get_forward_context()
                begin_step(self.sharded, context.denoise_step_idx, context.total_denoise_steps)
            heads_first = (x.transpose(1, 2) for x in (query, key, value))
            mask = None if attn_metadata is None else attn_metadata.attn_mask
            out = self.sharded.attend(*heads_first, scale=self.softmax_scale, key_mask=mask)
            return out.transpose(1, 2)

    return VCAttentionImpl


@cache
def _backend_class():
    from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend

    class VCAttentionBackend(AttentionBackend):
        """Takes the place of CUDNN_ATTN."""

        accept_output_buffer = True

        @classmethod
        def supports_attention_mask(cls, attention_spec=None):
            return True  # through SDPA

        @classmethod
        def validate_available(cls):
            """Raise ValueError, before the model is built, if no kernel runs on this machine."""
            device = "cuda" if torch.cuda.is_available() else "cpu"
            q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
            choice = choose_kernel(AttentionProblem.of(q, q, q, VCConfig()))
            if choice.kernel is None:
                raise ValueError(f"VC-Attention cannot run here: {choice.reason}")

        @staticmethod
        def get_name():
            return BORROWED

        @staticmethod
        def get_impl_cls():
            return _impl_class()

        @staticmethod
        def get_supported_head_sizes():
            return []  # any: SDPA takes what the kernels do not

    return VCAttentionBackend
