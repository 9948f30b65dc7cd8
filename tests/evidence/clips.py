"""Stage "clips": clips of the sample model by every method, against exact attention at the same seed."""

from dataclasses import dataclass, replace

import torch
from comfyui_vc_attention.kernels.config import Recipe, VCConfig
from comfyui_vc_attention.kernels.dispatch import on_device
from comfyui_vc_attention.kernels.operands import AttentionProblem, TokenGrouping
from comfyui_vc_attention.kernels.registry import KERNELS, kernel_named, load_grouping
from comfyui_vc_attention.nodes.likeness import psnr, ssim
from comfyui_vc_attention.nodes.sample_clip import PROMPTS, decode_latent
from comfyui_vc_attention.nodes.step_schedule import EDGE, regroup_due
from sample_model.classify import count_right
from sample_model.model import load_model
from sample_model.sample import WEIGHTS, sample_latents

from . import orders
from .captured import CFG, GRID, Watched
from .dense import outputs
from .fidelity import log
from .measures import gmsd
from .methods import (
    ATTN_QAT,
    DENSE_FP8,
    DENSE_INT8,
    FP8,
    INT8,
    INT8_CODE_MASS,
    KITCHEN,
    NAIVE_BLOCK,
    NAIVE_HEAD,
    NVFP4,
    RECIPES,
    SAGE1,
    SAGE2,
    SAGE3,
    packages,
)
from .samples import Sample
from .tables import Table, named_failure

STEPS, WINDOW, REUSE = 20, 0.25, 4
ALL_CLUSTERS = VCConfig().clusters  # the node makes fewer of so few tokens
CLIP_TOKENS = GRID[0] * GRID[1] * GRID[2]  # of the sample model's clip: 12 tiles
EQUAL_PSNR = 100.0  # dB, what frames without any difference count as


@dataclass(frozen=True)
class Policy:
    """Which steps group and demean, and what the others do.

    where: "first" quarter, "uniform" quarter, "all" steps or "none". reuse: steps that share an order.
    keep_order: after the window the last order stays, without means. plain_means: steps outside the window
    have means in token order.
    """

    where: str = "first"
    reuse: int = REUSE
    keep_order: bool = False
    plain_means: bool = False

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
        demean = self.recipe.demean and (grouped or self.policy.plain_means)
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

    def begin(self, step, branch, steps):
        self.now = self.middle if EDGE <= step / steps < 1 - EDGE else self.ends
        for each in (self.middle, self.ends):
            each.begin(step, branch, steps)

    def __call__(self, q, k, v):
        return self.now(q, k, v)


class EveryStep:
    """An attention that does the same at every step."""

    orderings = 0

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


def make_clips(model, attention, seeds, steps, prompts):
    """Frames [clips, T, H, W, 3] in 0..1 of every prompt at every seed."""
    parts = []
    for seed in seeds:
        latents = sample_latents(
            Watched(model, steps, attention),
            list(prompts),
            seed=seed,
            steps=steps,
            cfg=CFG,
            attention=attention,
        )
        parts.append(decode_latent(latents))
    return torch.cat(parts)


def compare(clips, exact):
    """Means over clips of PSNR, SSIM and GMSD (each a mean over frames) and the error of the PSNR's mean."""
    a, b = (c.movedim(-1, 2) for c in (exact, clips))
    per_clip = torch.stack([psnr(x, y).clamp_max(EQUAL_PSNR).mean() for x, y in zip(a, b, strict=True)])
    return {
        "PSNR": per_clip.mean().item(),
        "standard error": (per_clip.std(correction=1) / len(per_clip) ** 0.5).item() if len(a) > 1 else 0.0,
        "SSIM": ssim(a.flatten(0, 1), b.flatten(0, 1)).mean().item(),
        "GMSD": gmsd(a.flatten(0, 1), b.flatten(0, 1)).mean().item(),
    }


def published(device):
    """Recipes of others as we read them, and the packages that run here."""
    rows = {
        "SageAttention 1": SAGE1, "SageAttention 2": SAGE2, "comfy-kitchen INT8": KITCHEN,
        "torch FP8, one scale a head": NAIVE_HEAD, "naive FP8, one scale per 128 tokens": NAIVE_BLOCK,
        "naive FP8 + QK Hadamard": replace(NAIVE_BLOCK, rotate_qk=True), "Attn-QAT, training-free": ATTN_QAT,
        "SageAttention 3": SAGE3, "SageAttention 3 + QK Hadamard": replace(SAGE3, rotate_qk=True),
    }  # fmt: skip
    made = {name: ("recipe", DenseAttention(numerics)) for name, numerics in rows.items()}
    probe = Sample("clip", *[torch.empty(1, 2, CLIP_TOKENS, 128, device=device).bfloat16()] * 3, GRID)
    for method in packages():
        if method.why_not(probe) is None:
            made[method.name] = ("package", PackageAttention(method))
    return made


def variants():
    """One choice made otherwise, at every step."""
    rows = {
        "int8_int8, means, grouped": (DENSE_INT8, "grouped"),
        "int8_int8, means, grouped, mass of the codes": (INT8_CODE_MASS, "grouped"),
        "int8_int8, means, cube": (DENSE_INT8, "cube"),
        "int8_fp8 + ExpCast, means, grouped": (DENSE_FP8, "grouped"),
        "int8_fp8 + ExpCast, means, cube": (DENSE_FP8, "cube"),
        "int8_fp8 + ExpCast, means, Hadamard on V": (replace(DENSE_FP8, rotate_v=True), "sequence"),
    }
    return {f"{name}, every step": ("variant", DenseAttention(*how)) for name, how in rows.items()}


def main_rows(device):
    """{name: (source, attention)} of the table of methods; 4 bits last, where the reference is slow."""
    rows, slow = {"PyTorch, 16 bit": ("torch", TorchAttention(half=True))}, {}
    for name, recipe in RECIPES.items():
        kernel, into = kernel_for(recipe, device), slow if recipe is NVFP4 else rows
        into[f"{name}, window of a quarter"] = ("ours", ScheduledAttention(recipe, None, kernel))
        into[f"{name}, no means"] = ("ours", ScheduledAttention(recipe, Policy("none"), kernel))
    turned = replace(NVFP4, rotate_qk=False)
    slow["nvfp4, window of a quarter, Q and K not rotated"] = ("ours", ScheduledAttention(turned))
    ends = ScheduledAttention(INT8, None, kernel_for(INT8, device))
    hybrid = HybridAttention(ScheduledAttention(NVFP4), ends)
    slow["nvfp4, int8_int8 in the first and last fifth"] = ("ours", hybrid)
    for spec in fast_kernels(device):
        recipe = RECIPES.get(f"{spec.numerics[0]} + ExpCast") or RECIPES[spec.numerics[0]]
        attention = ScheduledAttention(recipe, None, spec.name)
        rows[f"kernel {spec.name}, window of a quarter"] = ("ours", attention)
    return rows | published(device) | variants() | slow


def fast_kernels(device):
    """The rows of the registry that run the sample model's calls here, without the reference."""
    q = torch.empty(1, 2, 256, 128, device=device)
    problem = AttentionProblem.of(q, q, q)
    return [spec for spec in KERNELS if spec.name != "reference" and not spec.why_not(problem)]


def kernel_for(recipe, device):
    """The best kernel of a recipe here: what its users get; else the reference, which means the same."""
    fast = (spec.name for spec in fast_kernels(device) if recipe.numerics in spec.numerics)
    return next(fast, "reference")


def ablation_rows(device):
    """The paper's ablation, and the two questions it leaves: {(recipe name, policy): (kernel, attention)}."""
    policies = {
        "first quarter": Policy(), "every step": Policy("all"), "no step": Policy("none"),
        "means in token order at every step": Policy("none", plain_means=True),
        "uniform quarter": Policy("uniform"),
        "first quarter, order kept after": Policy(keep_order=True),
        "first quarter, then means in token order": Policy(plain_means=True),
        "first quarter, reuse 1": Policy(reuse=1), "first quarter, reuse 2": Policy(reuse=2),
        "first quarter, reuse 8": Policy(reuse=8), "every step, reuse 1": Policy("all", reuse=1),
        "every step, reuse 8": Policy("all", reuse=8),
    }  # fmt: skip
    # reuse is a matter of the values, not of their format; the reference takes a minute a row at 4 bits
    asked = {"int8_fp8 + ExpCast": (FP8, 12), "int8_int8": (RECIPES["int8_int8"], 7), "nvfp4": (NVFP4, 2)}
    rows = {}
    for name, (recipe, count) in asked.items():
        kernel = kernel_for(recipe, device)
        for policy in list(policies)[:count]:
            rows[name, policy] = (kernel, ScheduledAttention(recipe, policies[policy], kernel))
        if recipe is not NVFP4:
            many = ScheduledAttention(recipe, Policy("all"), kernel, ALL_CLUSTERS)
            rows[name, f"every step, {ALL_CLUSTERS} clusters"] = (kernel, many)
    return rows


def run(
    device,
    seeds=None,
    steps=None,
    prompts=PROMPTS,
    weights=WEIGHTS,
    save=lambda tables, data: None,
    earlier=None,
):
    """(tables, data) of this stage. On a CPU: one clip of two steps, to see that it runs.

    save: given both after each row. Rows of 4 bits, which take the longest, come last in time, too.
    earlier: {title of a table: rows} of the same run before it was cut short; these are not made again.
    """
    cpu = device.type == "cpu"
    seeds = seeds or range(1 if cpu else 2)
    steps, prompts = steps or (2 if cpu else STEPS), prompts[:1] if cpu else prompts
    model = load_model(weights, device)
    exact = make_clips(model, TorchAttention(), seeds, steps, prompts)
    names = list(prompts) * len(seeds)
    size = f"{len(names)} clips ({len(prompts)} prompts, {len(seeds)} seeds), {steps} steps, guidance {CFG:g}"
    tables = methods, ablation = empty_tables(size)
    right = count_right(exact.cpu(), names)[2]
    methods.notes.insert(0, f"Exact attention: {right} of {len(names)} clips show their prompt.")
    data = {"steps": steps, "seeds": list(seeds), "prompts": list(prompts), "cfg": CFG}

    jobs = [(name.startswith("nvfp4"), methods, [name, source], attention)
            for name, (source, attention) in main_rows(device).items()]  # fmt: skip
    jobs += [(recipe == "nvfp4", ablation, [recipe, kernel, policy], attention)
             for (recipe, policy), (kernel, attention) in ablation_rows(device).items()]  # fmt: skip
    for _, table, lead, attention in sorted(jobs, key=lambda job: job[0]):
        before = [row for row in (earlier or {}).get(table.title, []) if row[: len(lead)] == lead]
        if before:
            table.rows += before
            continue
        with named_failure(table, ", ".join(lead)):
            made = make_clips(model, attention, seeds, steps, prompts)
            found = compare(made, exact)
            last = attention.orderings if table is ablation else count_right(made.cpu(), names)[2]
            table.rows.append([*lead, *found.values(), last])
            log(f"{', '.join(lead)}: {found['PSNR']:.2f} dB")
        save(tables, data)
    return tables, data


def empty_tables(size):
    methods = Table(
        "Clips by method",
        f"How far clips move from those of exact attention at the same seed. {size}.",
        ["method", "source", "PSNR", "standard error", "SSIM", "GMSD", "prompts right"],
        notes=["PSNR in dB; GMSD: lower is better. LPIPS and VBench need foreign weights: not measured."],
    )
    ablation = Table(
        "Where grouping sits (Table 3)",
        f"Which steps group, how long an order is reused, what later steps do. {size}; an order is "
        f"reused for {REUSE} steps unless said. The paper: first quarter 26.4 dB, uniform 23.8, all 26.9.",
        ["recipe", "kernel", "steps that group", "PSNR", "standard error", "SSIM", "GMSD", "orders made"],
    )
    return methods, ablation
