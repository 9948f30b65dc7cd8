"""diffusers' context parallelism, at its attention dispatch: any model with a _cp_plan, Ulysses or ring.

    with attention_backend(ShardedAttention()):
        transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        frames = pipeline(prompt=...).frames

Nothing of diffusers is changed: our name goes into its registry as the active backend, which is what models
use that were given no backend of their own. For one GPU, kernels/adapters/diffusers_wan.py knows more: it
sits in the blocks, sees the denoising steps, and hands context-parallel calls on to this dispatch.
"""

from collections import Counter
from contextlib import contextmanager
from enum import Enum

from .sharded import ShardedAttention


class Backend(str, Enum):
    """diffusers' own enum of backends is closed; its registry takes any member that has a value."""

    VC_ATTENTION = "vc_attention"


@contextmanager
def attention_backend(sharded: ShardedAttention):
    """Make VC-Attention diffusers' active attention backend; yields the Counter of calls declined, by reason.

    Cross-attention, masked, causal and dropout calls go to the backend that was active before.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention as exchange
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    previous, _ = Registry.get_active_backend()
    if previous is Backend.VC_ATTENTION:
        raise ValueError("VC-Attention is diffusers' active attention backend already")
    declined = Counter()

    def forward_op(ctx, query, key, value, *args, _save_ctx=False, _parallel_config=None):
        """query, key, value: [B, L, H, D]. Returns out alike, and with return_lse the lse as [B, L, H]."""
        *_, scale, _, return_lse = args  # attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
        ring = _parallel_config is not None and _parallel_config.context_parallel_config.ring_degree > 1
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = sharded.attend(q, k, v, scale=scale, keys_split=ring, return_lse=return_lse)
        return (out[0].transpose(1, 2), out[1].transpose(1, 2)) if return_lse else out.transpose(1, 2)

    @Registry.register(Backend.VC_ATTENTION, supports_context_parallel=True)
    def attend(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
        _parallel_config=None,
    ):
        reason = _declines(query, key, value, attn_mask is not None, dropout_p, is_causal)
        if reason:
            declined[reason] += 1
            return dispatch_attention_fn(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                backend=previous, parallel_config=_parallel_config,
            )  # fmt: skip
        if _parallel_config is None:
            return forward_op(None, query, key, value, scale, False, False)
        return exchange(
            query, key, value, scale=scale,
            forward_op=forward_op, backward_op=_no_backward, _parallel_config=_parallel_config,
        )  # fmt: skip

    Registry.set_active_backend(Backend.VC_ATTENTION)
    try:
        yield declined
    finally:
        Registry.set_active_backend(previous)


def _declines(query, key, value, masked, dropout_p, is_causal):
    if query.shape != key.shape or key.shape != value.shape:
        return "cross-attention"
    if masked:
        return "masked"
    return "dropout" if dropout_p else "causal" if is_causal else None


def _no_backward(*args, **kwargs):
    raise NotImplementedError("VC-Attention has no backward pass")
