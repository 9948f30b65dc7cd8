"""What one sampling run keeps: token orders per layer, the plan of the current step, what may run.

A run starts and ends with one sampler call; nothing here outlives it, because clones of a model share the
override object. It travels in transformer_options as an object: ComfyUI copies dicts and lists there.
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels import AttentionProblem, Choice, TokenGrouping, choose_kernel
from ..kernels.dispatch import plain
from ..kernels.group.labels import labels_from_order, order_from_labels
from .families import Family, ForwardNotes, Layer
from .head_groups import free_memory
from .patch_settings import PatchSettings
from .run_report import RunReport
from .step_schedule import StepPlan, StepSchedule, regroup_due

SHORT_OF_MEMORY = 4 * 2**30  # chosen: about three times the orders of the longest clip


def conditions(options: Mapping[str, Any]) -> list[Hashable]:
    """One name per chunk of the batch. ComfyUI stacks conditions; which ones may change from step to step."""
    which = options.get("cond_or_uncond") or [0]
    uuids = options.get("uuids") or which
    # the same uuid may stand in the positive and in the negative list
    return list(zip(uuids, which, strict=False))


def context_window(options: Mapping[str, Any]) -> Hashable:
    """The frames that this call sees, when the clip is sampled in windows."""
    frames = getattr(options.get("context_window"), "index_list", None)
    return None if frames is None else tuple(frames)


@dataclass
class _Kept:
    listed: torch.Tensor  # the order int32 [B, H, Lk], or uint8 labels that give it back
    # bf16, where they only start the next grouping: it removes as much energy (within 0.0002 of the share)
    centroids: torch.Tensor | None  # None: there is no next one
    step: int  # at which the order was made
    used: int  # last step that used it

    @classmethod
    def of(cls, grouping: TokenGrouping, step: int, again: bool) -> "_Kept":
        """As labels, a quarter of the bytes, where memory is short: the order is sorted anew in each call."""
        free = free_memory(grouping.order.device)
        short = free is not None and free < SHORT_OF_MEMORY
        listed = labels_from_order(grouping.order) if short else grouping.order
        return cls(listed, grouping.centroids.bfloat16() if again else None, step, step)

    @property
    def grouping(self) -> TokenGrouping:
        as_labels = self.listed.dtype == torch.uint8
        return TokenGrouping(order_from_labels(self.listed) if as_labels else self.listed, None)

    @property
    def start(self) -> TokenGrouping | None:
        """What the next grouping of the same values begins with."""
        return None if self.centroids is None else TokenGrouping(None, self.centroids.float())

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.listed] if self.centroids is None else [self.listed, self.centroids]


class GroupingStore:
    """Token orders, one per layer, condition, device and context window; rows of one batch never mix."""

    def __init__(self):
        self._kept: dict[Hashable, _Kept] = {}
        self._lock = threading.Lock()

    def grouping(
        self,
        layer: Hashable,
        chunks: list[Hashable],
        v: torch.Tensor,
        make: Callable[[torch.Tensor, TokenGrouping | None, slice], TokenGrouping],
        step: int,
        every: int,
        again: bool = True,
    ) -> tuple[TokenGrouping, int]:
        """The order for v [B, H, Lk, D] and how many chunks of it were made anew.

        The batch is len(chunks) equal parts, each kept by itself, so that ComfyUI may batch conditions or not
        and change its mind between steps. make(v, previous, rows) groups the rows of one part. again: an
        order made now will be made anew later in the run.
        """
        if v.shape[0] % len(chunks):
            chunks = [tuple(chunks)]
        size = v.shape[0] // len(chunks)
        parts, made = [], 0
        for number, chunk in enumerate(chunks):
            key = (layer, chunk, size)
            rows = slice(number * size, (number + 1) * size)
            kept = self._kept.get(key)
            if kept is None or regroup_due(kept.step, step, every):
                grouping = make(v[rows], None if kept is None else kept.start, rows)
                kept = _Kept.of(grouping, step, again)
                made += 1
                with self._lock:
                    self._kept[key] = kept
            else:
                kept.used, grouping = step, kept.grouping
            parts.append(grouping)
        if len(parts) == 1:
            return parts[0], made
        # centroids only start the next grouping, and that happens part by part
        joined = TokenGrouping(torch.cat([part.order for part in parts]), None)
        return joined, made

    def drop_unused(self, step: int, every: int) -> None:
        """Forget what no step of the last two rounds used: context windows that moved on."""
        with self._lock:
            self._kept = {key: kept for key, kept in self._kept.items() if abs(step - kept.used) < 2 * every}

    def clear(self, device: torch.device | None = None) -> None:
        """Free everything, or what lies on one device."""
        with self._lock:
            self._kept = {
                key: kept
                for key, kept in self._kept.items()
                if device is not None and kept.listed.device != device
            }

    @property
    def held_bytes(self) -> int:
        with self._lock:
            tensors = [tensor for kept in self._kept.values() for tensor in kept.tensors]
        return sum(t.numel() * t.element_size() for t in tensors)

    def __len__(self) -> int:
        return len(self._kept)


class Shared:
    """Stays one object where a pack copies options deeply; ComfyUI itself copies dicts and lists only."""

    def __deepcopy__(self, memo):
        return self


class Run(Shared):
    """One sampler call of one patched model."""

    def __init__(self, owner: object, settings: PatchSettings, family: Family, schedule: StepSchedule):
        self.owner = owner  # the override that this run belongs to
        self.settings = settings
        self.family = family
        self.schedule = schedule
        self.store = GroupingStore()
        self.report = RunReport(family.name, schedule.steps, settings)
        self.plan: StepPlan | None = None
        self._choices: dict[AttentionProblem, Choice] = {}
        self._disabled: dict[str, str] = {}

    def begin_evaluation(self, position) -> StepPlan:
        """Called once per model evaluation, before its forwards; later than this nobody reads sigma.

        position: what the schedule plans by, sigma for ComfyUI's samplers.
        """
        self.plan = self.schedule.plan(position)
        self.report.few_steps = self.schedule.few_steps
        if not self.plan.grouping:
            self.store.clear()
        else:
            self.store.drop_unused(self.plan.step, self.settings.regroup_every)
        return self.plan

    def config(self):
        """Grouped or plain, by the window; a hybrid run takes 4 bits in its middle only."""
        at_edge = self.settings.hybrid and not (self.plan and self.plan.four_bit)
        config = self.settings.edge_config if at_edge else self.settings.config
        return config if self.plan and self.plan.grouping else plain(config)

    def choose(self, problem: AttentionProblem) -> Choice:
        """choose_kernel, remembered, and without the kernels that failed in this run."""
        choice = self._choices.get(problem)
        if choice is None:
            choice = self._choices[problem] = choose_kernel(problem, self.settings.kernel)
        if choice.kernel is not None and choice.kernel.name in self._disabled:
            return Choice(None, f"kernel {choice.kernel.name} failed earlier in this run")
        return choice

    def disable(self, kernel: str, message: str) -> bool:
        """Stop using a kernel in this run; whether that is news."""
        self._disabled[kernel] = message
        return self.report.add_failure(kernel, message)

    def close(self) -> None:
        """Free what the run holds."""
        self.store.clear()
        self.report.record.drop()


class Forward(Shared):
    """One call of the model. It is made anew for each, so threads and aborted calls leave nothing behind."""

    def __init__(self, run: Run, text_tokens: int | None = None):
        self.run = run
        self.plan = run.plan
        self.notes = ForwardNotes(text_tokens)
        self.left_block: int | None = None  # block whose self-attention was last left to ComfyUI
        self._masks: dict[int, tuple[torch.Tensor, Any]] = {}

    def layer_key(self, layer: Layer, device: torch.device, heads: int, keys: int, options) -> Hashable:
        """What an order of that many keys is kept under; the ordinal tells calls of one block apart (VACE,
        head groups, the parts of a continued clip)."""
        ordinal = self.notes.count(("layer", layer.kind, layer.index))
        return (device, layer.kind, layer.index, ordinal, heads, keys, context_window(options))

    def mask_once(self, mask: torch.Tensor, decide: Callable[[torch.Tensor], Any]) -> Any:
        """decide(mask), once per forward: all blocks share a mask, and deciding reads it to the host."""
        if id(mask) not in self._masks:
            self._masks[id(mask)] = (mask, decide(mask))  # keeping the mask keeps its id
        return self._masks[id(mask)][1]
