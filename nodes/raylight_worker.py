"""What runs inside a Raylight worker: the ordinary patch, and the same behind Raylight's attention slot.

Raylight (Ray + xDiT) replaces the forwards of a model under Ulysses or ring, and those ask no override. They
ask an "inner attention", after the exchange between the GPUs: InnerAttention hands that call to our override.
With CFG or data parallelism the model's own forward runs, and the override needs no help.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..kernels import attend_call, choose_kernel, group_tokens, prepare_call, vc_attention
from ..kernels.dispatch import plain
from .kernel_errors import raise_unless_recoverable
from .model_patch import AttentionOverride, Declined, HostCall, remove_patch
from .not_active import why_not_active, with_reason
from .patch_node import VCAttentionPatch, expected_problem
from .run_report import say
from .sampling_hooks import FORWARD, OVERRIDE

INNER = "raylight_inner_attention"  # Raylight's key in transformer_options
REACHED = ("MiniMax-H3",)  # families whose Raylight forward passes the options on to the slot
WARM_UP_TOKENS = 640  # five tiles; chosen


class InnerAttention:
    """Raylight's contract: called with dense (its own attention) and q, k, v after the exchange."""

    supports_ring = True

    def __init__(self, override: AttentionOverride, previous=None):
        self.override = override
        self.previous = previous  # the inner attention that was there before

    def __call__(self, dense, q, k, v, *, transformer_options, **kwargs):
        """q, k, v: [B, L, H, D], this rank's heads. Returns the same, or what dense returns.

        Nothing may be raised here: the other ranks would wait for this one until NCCL gives up. What we do
        not take goes to the inner attention that was there before, else to dense.
        """
        usual = partial(self._usual, dense, q, k, v, transformer_options, kwargs)
        forward = (transformer_options or {}).get(FORWARD)
        if forward is None or forward.run.owner is not self.override:
            return usual()
        if kwargs.get("causal") or kwargs.get("joint_tensor_key") is not None:
            forward.run.report.add_declined("causal or joint attention of Raylight")
            return usual()
        if ring_size(kwargs.get("group")) > 1:
            return self._ring(forward, dense, q, k, v, transformer_options, kwargs, usual)
        call = {
            "skip_reshape": True,
            "skip_output_reshape": True,
            "transformer_options": transformer_options,
            "scale": kwargs.get("softmax_scale"),
        }
        # not the override itself: one that was there before it would be asked, and Raylight asks none
        out = self.override.take((q.shape[2],), call, lambda: heads_first(q, k, v))
        if out is not None:
            return out.transpose(1, 2)
        with self.override.watch_usual(call, q.device):
            return usual()

    def _usual(self, dense, q, k, v, transformer_options, kwargs):
        if self.previous is not None:
            return self.previous(dense, q, k, v, transformer_options=transformer_options, **kwargs)
        return dense(q, k, v, **kwargs)

    def _ring(self, forward, dense, q, k, v, transformer_options, kwargs, usual):
        """Our kernel for every key shard inside Raylight's ring; the shards keep token order."""
        override, run = self.override, forward.run
        host = HostCall.of((q.shape[2],), {"skip_reshape": True, "transformer_options": transformer_options})
        decision = override.decide(forward, host, *heads_first(q, k, v))
        if isinstance(decision, Declined):
            override.count_declined(forward, decision.reason, decision.block)
            return usual()
        kernel, config = decision.kernel, run.config()

        def step(q, k, v, softmax_scale=None, **rest):
            try:
                prepared = prepare_call(
                    *heads_first(q, k, v), config,
                    scale=softmax_scale, kernel=kernel.name, return_lse=True,
                )  # fmt: skip
                out, lse = attend_call(prepared)
            except (RuntimeError, ValueError) as error:
                raise_unless_recoverable(error, kernel.name)
                run.disable(kernel.name, f"{type(error).__name__}: {error}")
                return exact_step(kwargs)(q, k, v, softmax_scale=softmax_scale, **rest)
            return out.transpose(1, 2), lse

        out = dense(q, k, v, **{**kwargs, "attn_type": None, "attn_processor": step})
        run.report.add_taken(f"{kernel.name} {decision.numerics} in a ring", q.shape[1], None)
        return out


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


def ring_size(group) -> int:
    """Ranks that hold one shard of the keys each."""
    if group is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size(group)


def exact_step(kwargs):
    """What Raylight's ring would have called for one key shard."""
    from yunchang.kernels import select_flash_attn_impl

    return select_flash_attn_impl(
        kwargs.get("attn_type"), stage="fwd-only", attn_processor=kwargs.get("attn_processor")
    )


def patch_worker(model, widgets: dict[str, Any], ring_degree: int = 1):
    """The worker's model with this patch in place of an earlier one; without it if nothing can run.

    Raises ValueError if a precision or kernel was asked for by name that cannot run on this worker's card.
    """
    if model is None:
        raise ValueError("this Raylight worker holds no model; connect Load Diffusion Model (Ray) first")
    model = without_inner(model)
    patched = VCAttentionPatch.execute(model, **widgets).args[0]
    override = our_override(patched)
    if override is None:
        return patched
    try:
        warm_up(patched, override, ring_degree > 1)
    except Exception as error:
        # broad, because every backend has its own errors; what must not be hidden is raised again
        raise_unless_recoverable(error, "of the warm-up")
        if override.settings.by_name:
            raise
        say(f"the kernel did not start, so the usual attention runs: {error}", level=logging.WARNING)
        return with_reason(remove_patch(patched), f"the kernel did not start: {error}")
    return with_inner(patched, override)


def our_override(model) -> AttentionOverride | None:
    override = model.model_options.get("transformer_options", {}).get(OVERRIDE)
    return override if isinstance(override, AttentionOverride) else None


def with_inner(model, override):
    """A clone with our inner attention over whichever was there; the model itself without Raylight's slot."""
    slot = raylight_slot()
    if slot is None:
        return model
    previous = model.model_options["transformer_options"].get(INNER)
    return slot.set_inner_attention(model, InnerAttention(override, previous))


def without_inner(model):
    """A clone with the inner attention that was there before ours; the model as it is without one of ours."""
    inner = model.model_options.get("transformer_options", {}).get(INNER)
    if not isinstance(inner, InnerAttention):
        return model
    if inner.previous is None:
        return raylight_slot().clear_inner_attention(model)
    return raylight_slot().set_inner_attention(model, inner.previous)


def raylight_slot():
    """Raylight's module of inner attentions; None in versions before September 2026."""
    try:
        from raylight.distributed_modules import inner_attention
    except ImportError:
        return None
    return inner_attention


def warm_up(model, override, ring: bool) -> None:
    """Build and run what a clip will need, here: all wait for this call, whereas NCCL waits one minute."""
    settings = override.settings
    problem = expected_problem(model, settings.config)
    shape = (1, 1, WARM_UP_TOKENS, problem.head_dim)
    q, k, v = (torch.randn(shape, dtype=problem.dtypes[0], device=model.load_device) for _ in range(3))
    grouping = None  # as in a ring
    for clusters in () if ring else cluster_counts(settings):
        grouping = group_tokens(v, clusters, group_tokens(v, clusters))
    for config in settings.configs:
        kernel = choose_kernel(replace(problem, config=config), settings.kernel).kernel
        if kernel is None:
            continue  # the steps of this config keep the usual attention
        for used, order in ((config, grouping), (plain(config), None)):
            vc_attention(q, k, v, used, grouping=order, kernel=kernel.name, return_lse=ring)


def cluster_counts(settings) -> list[int]:
    """What calls of a clip may be grouped into: as many as the settings say, or for few keys halves of it."""
    fewest = settings.config.clusters_for(settings.shortest)
    counts = [settings.config.clusters]
    while counts[-1] > fewest:
        counts.append(counts[-1] // 2)
    return counts


def describe_patch(model, parallel: dict[str, Any]) -> str:
    """What this worker will do, in one line."""
    override = our_override(model)
    if override is None:
        reason = why_not_active(model)
        return f"not active: {reason}" if reason else "not patched"
    settings, name = override.settings, override.family.name
    choice = choose_kernel(expected_problem(model, settings.config), settings.kernel)
    text = f"{name}: {choice.kernel.name}"
    if not splits_sequence(parallel):
        return text
    return f"{text} after Raylight's exchange" if name in REACHED else f"{name}: {unreached(name)}"


def describe_run(model, parallel: dict[str, Any]) -> str:
    """What the last sampling of this worker did, in one line."""
    override = our_override(model)
    if override is None:
        reason = (
            why_not_active(model) or "its model carries no patch; a node after it may have loaded another"
        )
        return f"0 calls, because {reason}"
    if not override.finished:
        return "0 calls, because it has not sampled since the patch"
    report = override.finished[-1]
    if not report.received and splits_sequence(parallel):
        return f"0 calls, because {unreached(report.model_name)}"
    return report.summary()


def splits_sequence(parallel: dict[str, Any]) -> bool:
    """Whether Raylight replaces the model's forwards (Ulysses or ring)."""
    return parallel.get("ulysses_degree", 1) > 1 or parallel.get("ring_degree", 1) > 1


def unreached(name: str) -> str:
    """Why Raylight's forward of a family does not call us."""
    if raylight_slot() is None:
        return "this Raylight has no slot for attention; update it, or use CFG degree 2 instead of Ulysses"
    return (
        f"Raylight does not pass attention options for {name} under Ulysses or ring, so its own attention "
        "runs; with CFG degree 2 instead, VC-Attention runs"
    )
