"""Raylight's attention slot as Raylight documents it, and an exchange around it. Ray workers load it, too."""

import contextlib
import sys
import types

import torch
import torch.distributed as dist

SLOT = "raylight.distributed_modules.inner_attention"
INNER = "raylight_inner_attention"  # its key in transformer_options


def stand_in():
    """What Raylight documents: two functions on a clone's options, and a dispatcher around its attention."""
    slot = types.ModuleType(SLOT)
    active = []

    def with_options(model, change):
        clone = model.clone()
        options = dict(clone.model_options["transformer_options"])
        change(options)
        clone.model_options = {**clone.model_options, "transformer_options": options}
        return clone

    slot.set_inner_attention = lambda model, inner: with_options(model, lambda o: o.update({INNER: inner}))
    slot.clear_inner_attention = lambda model: with_options(model, lambda o: o.pop(INNER, None))

    class InnerAttentionDispatcher:
        def __init__(self, attention):
            usual = attention.ring_attn_fn

            def dispatch(q, k, v, *args, **kwargs):
                if not active or active[-1] is None:
                    return usual(q, k, v, *args, **kwargs)
                inner, options = active[-1]
                dense = lambda q, k, v, **kw: usual(q, k, v, *args, **kw)  # noqa: E731
                return inner(dense, q, k, v, transformer_options=options, **kwargs)

            attention.ring_attn_fn = dispatch

        @contextlib.contextmanager
        def scope(self, inner, options):
            active.append(None if inner is None else (inner, options))
            yield
            active.pop()

    slot.InnerAttentionDispatcher = InnerAttentionDispatcher
    return slot


def add_slot(put=sys.modules.__setitem__):
    """Make the stand-in importable under Raylight's names. put(name, module): where to. Returns the slot."""
    slot, names = stand_in(), SLOT.split(".")
    packages = [types.ModuleType(".".join(names[:end])) for end in range(1, len(names))]
    packages[-1].inner_attention = slot
    for module in (*packages, slot):
        put(module.__name__, module)
    return slot


class UlyssesAttention:
    """Attention of a model split over ranks: tokens to heads, the slot, and back. [B, L, H, D]."""

    def __init__(self, slot):
        self.dense_calls = 0
        self.ring_attn_fn = self.dense
        self.dispatcher = slot.InnerAttentionDispatcher(self)

    def dense(self, q, k, v, softmax_scale=None, **rest):
        self.dense_calls += 1
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale)
        return out.transpose(1, 2)

    def __call__(self, q, k, v, options):
        q, k, v = (exchange(x, scatter=2, gather=1) for x in (q, k, v))
        with self.dispatcher.scope(options.get(INNER), options):
            out = self.ring_attn_fn(q, k, v, softmax_scale=None, causal=False, group=None)
        return exchange(out, scatter=1, gather=2)


def exchange(x, scatter, gather):
    """Cut x along one dimension, one part for each rank, and join what the ranks sent along the other."""
    ranks = dist.get_world_size()
    sent = torch.stack([part.contiguous() for part in x.chunk(ranks, scatter)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(list(received), gather)
