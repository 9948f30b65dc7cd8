"""The only file that touches ComfyUI's attention hook: one override object, which keeps whatever was there.

ComfyUI calls it for every attention of a patched model. It takes the calls that a family names, a kernel can
run and the step plan wants; every other call goes to the override that was there before, else to ComfyUI's.
"""

import contextlib
import logging
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels import AttentionProblem, TokenGrouping, attend_call, group_tokens, prepare_call
from ..kernels.operands import boxed
from ..kernels.registry import KernelSpec
from .attention_layout import HeadsBox, key_mask_of, like_caller, one_storage, split_heads
from .families import AttentionCall, Family
from .head_groups import BOXED, attend_by_heads, free_memory, groups_needed
from .kernel_errors import raise_unless_recoverable
from .not_active import REASON
from .patch_settings import PatchSettings
from .run_record import GROUPING, USUAL, ErrorProbe
from .run_report import RunReport, say
from .run_state import Forward, Shared, conditions
from .sampling_hooks import FORWARD, KEY, OVERRIDE, SamplingHooks, chain_of

KEPT_REPORTS = 8

POSITIONAL = ("heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")
# what else this pack knows the meaning of; the last is a preference among ComfyUI's own functions
NAMED = ("low_precision_attention", "scale", "enable_gqa", "transformer_options", "preferred_attention")

# Kernels that once completed a call of this dtype and head_dim on this device. Until then q, k and v are
# kept, so that a kernel that does not start can be replaced; afterwards they go before the output exists.
_proven: set[tuple] = set()


@dataclass(frozen=True)
class HostCall:
    """What ComfyUI said beside q, k and v."""

    heads: int
    mask: torch.Tensor | None
    attn_precision: torch.dtype | None
    skip_reshape: bool
    skip_output_reshape: bool
    low_precision: bool
    scale: float | None
    options: dict[str, Any]
    unknown: tuple[str, ...] = ()  # arguments that ask for something that this pack does not know

    @classmethod
    def of(cls, args, kwargs) -> "HostCall":
        """From the arguments after q, k, v: models pass them by place or by name."""
        named = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
        return cls(
            heads=named["heads"],
            mask=named.get("mask"),
            attn_precision=named.get("attn_precision"),
            skip_reshape=bool(named.get("skip_reshape")),
            skip_output_reshape=bool(named.get("skip_output_reshape")),
            low_precision=named.get("low_precision_attention") is not False,
            scale=named.get("scale"),
            options=named.get("transformer_options") or {},
            unknown=tuple(
                name
                for name, value in named.items()
                if name not in (*POSITIONAL, *NAMED)
                and name[:1] != "_"
                and value is not None
                and value is not False
            ),
        )


@dataclass(frozen=True)
class Accepted:
    """A call that we take, and with what."""

    layer: Any  # key of its token order
    block: int
    kernel: KernelSpec
    numerics: str
    key_mask: torch.Tensor | None


@dataclass(frozen=True)
class Declined:
    """A call that we leave alone, and why."""

    reason: str
    block: int | None = None  # known once the call is video self-attention


class AttentionOverride(Shared):
    """Attention of one patched model. Clones share it; what changes lives in the run and in the forward."""

    def __init__(self, settings: PatchSettings, family: Family, previous=None):
        self.settings = settings
        self.family = family
        self.finished: deque[RunReport] = deque(maxlen=KEPT_REPORTS)  # newest last; the report node reads it
        self._vc_previous = previous  # public to other packs: makes the chain walkable

    # Step and block arrive in transformer_options, which ComfyUI's compile nodes do not guard: a traced
    # override would repeat its first step for ever.
    @torch.compiler.disable
    def __call__(self, func, q, k, v, *args, **kwargs):
        """ComfyUI's override contract, with tensors."""
        out = self.take(args, kwargs, lambda: (q, k, v))
        if out is not None:
            return out
        with self.watch_usual(kwargs, q.device):
            if self._vc_previous is not None:
                return self._vc_previous(func, q, k, v, *args, **kwargs)
            return func(q, k, v, *args, **kwargs)

    @torch.compiler.disable
    def container_function(self, q, k, v, *args, **kwargs):
        """The same with single-owner boxes, so that q, k and v can be freed before the output exists."""
        boxes = (q, k, v)
        out = self.take(args, kwargs, lambda: tuple(box.peek() for box in boxes), boxes)
        if out is not None:
            return out
        with self.watch_usual(kwargs, q.peek().device):
            return hand_over(self._vc_previous, boxes, args, kwargs)

    def watch_usual(self, kwargs, device):
        """Times what ComfyUI does with video self-attention that we left to it."""
        forward = (kwargs.get("transformer_options") or {}).get(FORWARD)
        if forward is None or forward.run.owner is not self or forward.left_block is None:
            return contextlib.nullcontext()
        return forward.run.report.record.timed(USUAL, device)

    def take(self, args, kwargs, tensors, boxes=()):
        """The output, or None if the call is not ours (then counted, if a run of ours is on).

        args, kwargs: what ComfyUI's contract passes after q, k, v; other hosts' patches write them likewise.
        tensors: gives q, k, v. boxes: three single-owner boxes that hold them, if the host hands them over.
        """
        host = HostCall.of(args, kwargs)
        forward = host.options.get(FORWARD)
        if forward is None or forward.run.owner is not self:
            return None
        with paused_malloc_graph():
            decision = self.decide(forward, host, *tensors())
            if isinstance(decision, Declined):
                self.count_declined(forward, decision.reason, decision.block)
                return None
            return self._run_kernel(forward, host, decision, tensors, boxes)

    def count_declined(self, forward: Forward, reason: str, block: int | None) -> None:
        forward.left_block = block
        forward.run.report.add_declined(reason, video=block is not None)
        if block is not None:
            forward.run.report.record.add(forward.plan.step, block, reason)

    def decide(self, forward: Forward, host: HostCall, q, k, v) -> Accepted | Declined:
        """Whether and how we take a call; else the reason, for the report."""
        run = forward.run
        if not host.low_precision:
            return Declined("opted out by the model")
        if host.attn_precision == torch.float32:
            return Declined("asked for in float32 by the model")
        try:
            q, k, v = split_heads(q, k, v, host.heads, host.skip_reshape)
        except ValueError as error:
            return Declined(str(error))
        if q.shape[1] != k.shape[1]:
            return Declined("grouped-query heads")
        layer = run.family.layer(AttentionCall(q.shape, k.shape, v.shape, host.options), forward.notes)
        if isinstance(layer, str):
            return Declined(layer)
        block = layer.position
        if host.unknown:
            return Declined(f"unknown argument {', '.join(host.unknown)}", block)
        if not forward.plan.active:
            return Declined("outside start_percent..end_percent", block)
        if block in run.settings.exact_blocks:
            return Declined("kept exact by exact_blocks", block)
        if min(q.shape[2], k.shape[2]) < run.settings.shortest:
            return Declined(f"shorter than {run.settings.shortest} tokens", block)
        if any(tensor.stride(-1) != 1 for tensor in (q, k, v)):
            return Declined("last dimension not contiguous", block)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
            return Declined("a gradient is wanted", block)  # by a training node
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return Declined("recorded into a CUDA graph", block)
        key_mask = None
        if host.mask is not None:
            batch, keys = k.shape[0], k.shape[2]
            key_mask = forward.mask_once(host.mask, lambda mask: key_mask_of(mask, batch, keys))
            if isinstance(key_mask, str):
                return Declined(key_mask, block)
        choice = run.choose(AttentionProblem.of(q, k, v, run.config()))
        if choice.kernel is None:
            return Declined(choice.reason, block)
        key = forward.layer_key(layer, q.device, q.shape[1], k.shape[2], host.options)
        return Accepted(key, block, choice.kernel, choice.recipe.numerics, key_mask)

    def _run_kernel(self, forward: Forward, host: HostCall, accepted: Accepted, tensors, boxes):
        """The output; None if the kernel failed in a way that ComfyUI's attention can make good."""
        run, kernel = forward.run, accepted.kernel
        name = f"{kernel.name} {accepted.numerics}"
        boxes = [HeadsBox(box, host.heads, host.skip_reshape) for box in boxes]
        first = tensors()[0]
        tokens = first.shape[2 if host.skip_reshape else 1]
        proof = (kernel.name, first.device, first.dtype, first.shape[-1])
        del first
        # broad, because every backend has its own errors; what must not be hidden is raised again
        try:
            probe = self._probe(forward, host, accepted, name, tensors)
            with run.report.record.timed(name, proof[1]):
                giving = boxes if proof in _proven and not one_storage(tensors()) else []
                out = None if giving else self._by_heads(forward, host, accepted, tensors, bool(boxes))
                if out is None:
                    out, _ = attend_call(self._prepare(forward, host, accepted, tensors, giving))
        except Exception as error:
            raise_unless_recoverable(error, kernel.name)
            if any(box.taken for box in boxes):
                raise RuntimeError(
                    f"VC-Attention kernel {kernel.name} failed after q, k, v were freed"
                ) from error
            if run.disable(kernel.name, f"{type(error).__name__}: {error}"):
                say(
                    f"kernel {kernel.name} failed and is off for this run; the usual attention runs: {error}",
                    run.settings.node_id,
                    logging.WARNING,
                )
            self.count_declined(forward, f"kernel {kernel.name} failed", accepted.block)
            return None
        _proven.add(proof)
        for box in boxes:
            if not box.taken:
                box.take()
        grouped_step = forward.plan.step if forward.plan.grouping else None
        run.report.add_taken(name, tokens, grouped_step)
        run.report.record.add(forward.plan.step, accepted.block, name)
        if probe is not None:
            error = probe.relative_l2(out)
            run.report.record.add_error(accepted.block, name, forward.plan.grouping, error)
        return like_caller(out, host.skip_output_reshape)

    def _probe(self, forward: Forward, host: HostCall, accepted: Accepted, name, tensors):
        """A few exact rows of the first such call of a block, so that the report can tell its error."""
        record, grouped = forward.run.report.record, forward.plan.grouping
        if accepted.key_mask is not None or not record.wants_error(accepted.block, name, grouped):
            return None
        q, k, v = split_heads(*tensors(), host.heads, host.skip_reshape)
        # kernels take mixed dtypes, PyTorch's attention does not
        return ErrorProbe(q, k, v, host.scale) if q.dtype == k.dtype == v.dtype else None

    def _by_heads(self, forward: Forward, host: HostCall, accepted: Accepted, tensors, in_boxes: bool):
        """The output, made in groups of heads; None if memory is enough for all at once.

        in_boxes: the host counts on less memory than all at once needs, and q, k, v cannot go one by one.
        """
        q, k, v = split_heads(*tensors(), host.heads, host.skip_reshape)
        groups = groups_needed(q, k, free_memory(q.device))
        if groups > 1:
            forward.run.report.add_head_groups(groups)
        elif in_boxes:
            groups = min(q.shape[1], BOXED)
        if groups == 1:
            return None
        return attend_by_heads(
            q, k, v, forward.run.config(), groups, **self._call(forward, host, accepted, v)
        )

    def _prepare(self, forward: Forward, host: HostCall, accepted: Accepted, tensors, giving):
        """First half of the call. giving: boxes of q, k, v, emptied one by one; if none, tensors() stay."""
        qkv = giving or split_heads(*tensors(), host.heads, host.skip_reshape)
        call = self._call(forward, host, accepted, boxed(qkv[2]).peek())
        return prepare_call(*qkv, forward.run.config(), **call)

    def _call(self, forward: Forward, host: HostCall, accepted: Accepted, v) -> dict[str, Any]:
        """What a call of the kernel is given beside q, k, v and the config."""
        return {
            "grouping": self._grouping(forward, host, accepted, v) if forward.plan.grouping else None,
            "key_mask": accepted.key_mask,
            "scale": host.scale,
            "kernel": accepted.kernel.name,
        }

    def _grouping(self, forward: Forward, host: HostCall, accepted: Accepted, v) -> TokenGrouping:
        run, mask = forward.run, accepted.key_mask

        record, step = run.report.record, forward.plan.step
        clusters = run.settings.config.clusters_for(v.shape[2])

        def make(rows_v, previous, rows):
            rows_mask = None if mask is None else mask[rows]
            with record.timed(GROUPING, rows_v.device):
                return group_tokens(rows_v, clusters, previous, rows_mask)

        every = run.settings.regroup_every
        chunks, again = conditions(host.options), run.schedule.groups_at(step + every)
        grouping, made = run.store.grouping(accepted.layer, chunks, v, make, step, every, again)
        if made:
            run.report.add_groupings(made, run.store.held_bytes)
            if mask is None:
                record.add_energy(step, accepted.block, v, grouping.order)
        return grouping


def hand_over(previous, boxes, args, kwargs):
    """Boxes that an override leaves alone go to the one that was there before, else to ComfyUI."""
    if previous is None:
        return host_attention()(*boxes, *args, **kwargs)
    if getattr(previous, "container_function", None) is not None:
        return previous.container_function(*boxes, *args, **kwargs)
    # the plain override contract hands over the bare backend
    host = host_attention()
    undecorated = getattr(host, "__wrapped__", host)
    return previous(undecorated, *(box.take() for box in boxes), *args, **kwargs)


def host_attention():
    """ComfyUI's attention function; imported late, because importing this pack must not load ComfyUI."""
    from comfy.ldm.modules.attention import optimized_attention

    return optimized_attention


def paused_malloc_graph():
    """Newer ComfyUI records allocations of some models and replays them; ours change from step to step."""
    pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", None)
    return pause() if pause is not None else contextlib.nullcontext()


def patch_attention(model, settings: PatchSettings, family: Family):
    """A clone of model whose attention goes through a new override; an earlier patch of ours is replaced."""
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    patched = remove_patch(model) or model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    override = AttentionOverride(settings, family, options.get(OVERRIDE))
    options[OVERRIDE] = override
    patched.model_options.pop(REASON, None)
    hooks = SamplingHooks(override, settings, family)
    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, hooks.outer_sample)
    patched.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, hooks.predict_noise)
    patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, hooks.apply_model)
    patched.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, hooks.on_cleanup)
    return patched


def remove_patch(model):
    """A clone of model without our patch and with the override that was there before; None without a patch.

    Another pack's override that was put on top of ours and calls it stays; without a run, ours does nothing.
    """
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    if not model.get_wrappers(WrappersMP.OUTER_SAMPLE, KEY):
        return None
    clean = model.clone()
    for event in (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.APPLY_MODEL):
        clean.remove_wrappers_with_key(event, KEY)
    clean.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    options = clean.model_options.get("transformer_options", {})
    if isinstance(options.get(OVERRIDE), AttentionOverride):
        previous = options.pop(OVERRIDE)._vc_previous
        if previous is not None:
            options[OVERRIDE] = previous
    return clean


def overrides_of(model) -> list[AttentionOverride]:
    """Our overrides that a model carries, outermost first."""
    outermost = model.model_options.get("transformer_options", {}).get(OVERRIDE)
    return [link for link in chain_of(outermost) if isinstance(link, AttentionOverride)]
