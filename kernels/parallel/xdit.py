"""xDiT (xfuser): its table of attention functions, which USP() looks up after the all-to-all.

    name = register(ShardedAttention())
    out = USP(q, k, v, backend=name)  # one call
    get_runtime_state().attention_backend = name  # every call

set_attention_backend() takes only the names that xDiT ships, so the last line sets the attribute.
"""

from .sharded import ShardedAttention, refuse

# entries of attention_kwargs that would change the result; the others are other backends' settings
_CHANGES_RESULT = ("attn_mask", "indices_k", "kv_cache")


def register(sharded: ShardedAttention, name: str = "vc_attention") -> str:
    """Add VC-Attention to xDiT's table under name, again if it was there. Returns name."""
    from xfuser.core.distributed import get_ring_parallel_world_size
    from xfuser.core.distributed.attention_backend import register_attention_function

    @register_attention_function(name)
    def attend(query, key, value, dropout_p=0.0, is_causal=False, attention_kwargs=None):
        """query, key, value: [B, H, L, D]. Returns out and the natural-log lse, fp32 [B, H, L], or None."""
        given = {entry: value is not None for entry, value in (attention_kwargs or {}).items()}
        changes = {entry: given.get(entry, False) for entry in _CHANGES_RESULT}
        refuse("xDiT", dropout=dropout_p, causal_mask=is_causal, **changes)
        ring = get_ring_parallel_world_size() > 1
        out = sharded.attend(query, key, value, keys_split=ring, return_lse=ring)
        return out if ring else (out, None)

    return name
