"""yunchang (long-context-attention): Ulysses, ring and both together.

    sharded = ShardedAttention()
    attention = LongContextAttention(attn_type=None, attn_processor=attention_processor(sharded))

attn_type None is what makes yunchang ask the processor. Its UlyssesAttention class has no such slot.
"""

import torch.distributed as dist

from .sharded import ShardedAttention, refuse


def attention_processor(sharded: ShardedAttention):
    """The function that LongContextAttention calls after its all-to-all, once per key shard.

    q, k, v: [B, L, H, D]. Returns out of q's shape and the natural-log lse, fp32 [B, H, L]: yunchang merges
    by it and wants it even where the ring has one rank.
    """
    from yunchang.globals import PROCESS_GROUP

    def attend(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):
        window = tuple(window_size) != (-1, -1)
        refuse(
            "yunchang", dropout=dropout_p, causal_mask=causal, window=window, softcap=softcap,
            alibi=alibi_slopes is not None, returned_probabilities=return_softmax,
        )  # fmt: skip
        out, lse = sharded.attend(
            *(x.transpose(1, 2) for x in (q, k, v)),
            scale=softmax_scale,
            keys_split=dist.get_world_size(PROCESS_GROUP.RING_PG) > 1,
            return_lse=True,
        )
        return out.transpose(1, 2), lse

    return attend
