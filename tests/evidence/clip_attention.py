"""Attentions for the sample model: recipes on a schedule, published recipes, packages, PyTorch."""

from dataclasses import dataclass, replace

import torch
from comfyui_vc_attention.kernels.config import Recipe, VCConfig, resolve_demean
from comfyui_vc_attention.kernels.dispatch import on_device
from comfyui_vc_attention.kernels.operands import TokenGrouping
from comfyui_vc_attention.kernels.registry import kernel_named, load_grouping
from comfyui_vc_attention.nodes.step_schedule import EDGE, regroup_due

from . import orders
from .captured import GRID
from .dense import outputs
from .samples import Sample

WINDOW, REUSE = 0.25, 4


@dataclass(frozen=True)
class Policy:
    """Which steps group and demean, and what the others do.

    where: "first" quarter, "uniform" quarter, "all" steps or "none". reuse: steps that share an order.
    keep_order: after the window the last order stays. plain_means: steps outside the window have means too,
    of whatever order they have; None: as the pack has it for the recipe's values.
    """

    where: str = "first"
    reuse: int = REUSE
    keep_order: bool = False
    plain_means: bool | None = None

    def groups(self, step, steps):
        if self.where == "first":
            return step < -(-steps // round(1 / WINDOW))
        if self.where == "uniform":
            return step % round(1 / WINDOW) == 0
        if self.where in ("all", "none"):
            return self.where == "all"
        raise ValueError(f"where must be first, uniform, all or none, got {self.where!r}")


class ScheduledAttention:
    """A recipe on a policy, for the sample model's attention argument; told of steps by captured.Watched.

    kernel: a row of the registry, "reference" for the meaning of all of them. clusters: None is as many
    as the node makes. orderings: orders made so far.
    """

    def __init__(self, recipe: Recipe, policy=None, kernel="reference", clusters=None):
        self.recipe, self.policy, self.clusters = recipe, policy or Policy(), clusters
        self.kernel = kernel
        self.stages = kernel_named(kernel).load()
        self.groupings, self.made_at, self.orderings = {}, {}, 0
        self.step = self.branch = self.block = 0
        self.steps = 1

    def begin(self, step, branch, steps):
        if step < self.step:
            self.groupings.clear()
            self.made_at.clear()
        self.step, self.branch, self.block, self.steps = step, branch, 0, steps

    def __call__(self, q, k, v):
        key = (self.branch, self.block)
        self.block += 1
        grouped = self.policy.groups(self.step, self.steps)
        if grouped and (key not in self.made_at or self.step == 0
                        or regroup_due(self.made_at[key], self.step, self.policy.reuse)):  # fmt: skip
            before = None if self.step == 0 else self.groupings.get(key)
            self.groupings[key] = TokenGrouping(*self._group(v, before))
            self.made_at[key] = self.step
            self.orderings += 1
        kept = grouped or (self.policy.keep_order and key in self.groupings)
        order = self.groupings[key].order if kept else None
        demean = self.recipe.demean and (
            grouped or resolve_demean(self.policy.plain_means, self.recipe.value_format)
        )
        recipe = replace(self.recipe, demean=demean)
        with on_device(q.device):
            operands = self.stages.prepare(q, k, v, recipe, order=order, softmax_scale=q.shape[-1] ** -0.5)
            return self.stages.attend(operands)[0].to(v.dtype)

    def _group(self, v, before):
        clusters = self.clusters or VCConfig().clusters_for(v.shape[2])
        made = load_grouping(v, clusters)(v, clusters, before)
        return made.order, made.centroids


class HybridAttention:
    """4 bits in the middle of the denoising, 8 at its ends: what the node makes of precision 4-bit."""

    orderings = 0

    def __init__(self, middle, ends):
        self.middle, self.ends, self.now = middle, ends, ends
        self.kernel = middle.kernel

    def begin(self, step, branch, steps):
        self.now = self.middle if EDGE <= step / steps < 1 - EDGE else self.ends
        for each in (self.middle, self.ends):
            each.begin(step, branch, steps)

    def __call__(self, q, k, v):
        return self.now(q, k, v)


class EveryStep:
    """An attention that does the same at every step."""

    orderings, kernel = 0, None

    def begin(self, step, branch, steps):
        pass


class DenseAttention(EveryStep):
    """A published recipe or a variant as the sample model's attention. order: sequence, cube or grouped."""

    def __init__(self, numerics, order="sequence"):
        self.numerics, self.order = numerics, order

    def __call__(self, q, k, v):
        rounded = [t.bfloat16() for t in (q, k, v)]
        order = None
        if self.order == "cube":
            order = orders.static_cube(GRID, v.shape[1], v.device).expand(len(v), -1, -1)
        elif self.order == "grouped":
            order = orders.kmeans(v, VCConfig().clusters_for(v.shape[2]))
        return outputs(*rounded, self.numerics, order)[0].to(v.dtype)


class PackageAttention(EveryStep):
    """Somebody's package on 16-bit copies."""

    def __init__(self, method):
        self.method = method

    def __call__(self, q, k, v):
        sample = Sample("clip", *(t.bfloat16() for t in (q, k, v)), GRID)
        return self.method.run(sample, sample.q).out.to(v.dtype)


class TorchAttention(EveryStep):
    """scaled_dot_product_attention, exact or on 16-bit copies."""

    def __init__(self, half=False):
        self.half = half

    def __call__(self, q, k, v):
        tensors = [t.bfloat16() for t in (q, k, v)] if self.half else (q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(*tensors).to(v.dtype)
