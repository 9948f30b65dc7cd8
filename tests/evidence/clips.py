"""Stage "clips": clips of the sample model by every method, against exact attention at the same seed."""

from dataclasses import replace

import torch
from comfyui_vc_attention.kernels.config import VCConfig, resolve_demean
from comfyui_vc_attention.kernels.operands import AttentionProblem
from comfyui_vc_attention.kernels.registry import KERNELS
from comfyui_vc_attention.nodes.likeness import psnr, ssim
from comfyui_vc_attention.nodes.sample_clip import PROMPTS, decode_latent
from sample_model.classify import count_right
from sample_model.model import load_model
from sample_model.sample import WEIGHTS, first_noise, sample_latents

from .captured import CFG, GRID, Watched
from .clip_attention import (
    REUSE,
    DenseAttention,
    HybridAttention,
    PackageAttention,
    Policy,
    ScheduledAttention,
    TorchAttention,
)
from .fidelity import log
from .measures import gmsd
from .methods import (
    DENSE_FP8,
    DENSE_INT8,
    INT8,
    INT8_CODE_MASS,
    NVFP4,
    PUBLISHED,
    RECIPES,
    packages,
)
from .samples import Sample
from .tables import Table, earlier_row, named_failure

STEPS = 20
ALL_CLUSTERS = VCConfig().clusters  # the node makes fewer of so few tokens
CLIP_TOKENS = GRID[0] * GRID[1] * GRID[2]  # of the sample model's clip: 12 tiles
EQUAL_PSNR = 100.0  # dB, what frames without any difference count as
SEEDS, SLOW_SEEDS = 8, 2  # slow: a reference of ours or of others
THREADS = 2  # to name clips with (chosen): 32 wait for one another on pictures so small


def make_clips(model, attention, seeds, steps, prompts):
    """Frames [clips, T, H, W, 3] in 0..1 of every prompt at every seed, SLOW_SEEDS of them at once."""
    parts = []
    for first in range(0, len(seeds), SLOW_SEEDS):
        some = seeds[first : first + SLOW_SEEDS]
        latents = sample_latents(
            Watched(model, steps, attention),
            list(prompts) * len(some),
            noise=torch.cat([first_noise(len(prompts), seed) for seed in some]),
            steps=steps,
            cfg=CFG,
            attention=attention,
        )
        parts.append(decode_latent(latents))
    return torch.cat(parts)


def compare(clips, exact):
    """(numbers of a row, PSNR of each clip); PSNR and its likes are means over frames, then over clips."""
    a, b = (c.movedim(-1, 2) for c in (exact, clips))
    each = torch.stack([psnr(x, y).clamp_max(EQUAL_PSNR).mean() for x, y in zip(a, b, strict=True)])
    numbers = {
        "clips": len(each),
        "PSNR": each.mean().item(),
        "standard error": standard_error(each),
        "median": each.median().item(),
        "worst": each.min().item(),
        "SSIM": ssim(a.flatten(0, 1), b.flatten(0, 1)).mean().item(),
        "GMSD": gmsd(a.flatten(0, 1), b.flatten(0, 1)).mean().item(),
    }
    return numbers, each.tolist()


def standard_error(values):
    """Of the mean of values [n]; 0 for one."""
    return (values.std(correction=1) / len(values) ** 0.5).item() if len(values) > 1 else 0.0


def gain(each, base):
    """(mean, standard error) of PSNR over base, clip by clip; None where base has no such row."""
    if base is None:
        return None, None
    both = min(len(each), len(base))
    difference = torch.tensor(each[:both]) - torch.tensor(base[:both])
    return difference.mean().item(), standard_error(difference)


def published(device):
    """Recipes of others as we read them, and the packages that run here."""
    made = {name: ("recipe", DenseAttention(numerics)) for name, numerics in PUBLISHED.items()}
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
        into[f"{name}, no step grouped"] = ("ours", ScheduledAttention(recipe, Policy("none"), kernel))
        turned = ScheduledAttention(replace(recipe, rotate_qk=False), None, kernel)
        into[f"{name}, window of a quarter, Q and K not rotated"] = ("ours", turned)
    for how, policy in (("", Policy()), (", every step grouped", Policy("all"))):
        four, eight = (ScheduledAttention(r, policy, kernel_for(r, device)) for r in (NVFP4, INT8))
        slow[f"nvfp4, int8_int8 in the first and last fifth{how}"] = ("ours", HybridAttention(four, eight))
    picked = {kernel_for(recipe, device) for recipe in RECIPES.values()}  # what the rows above run
    for spec in fast_kernels(device):
        if spec.name in picked:
            continue
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


POLICIES = {
    "first quarter": Policy(),
    "first quarter, then no means": Policy(plain_means=False),
    "first quarter, then means in token order": Policy(plain_means=True),
    "first quarter, order kept, then no means": Policy(keep_order=True, plain_means=False),
    "first quarter, order and means kept": Policy(keep_order=True, plain_means=True),
    "every step": Policy("all"),
    "no step, no means": Policy("none", plain_means=False),
    "no step, means in token order": Policy("none", plain_means=True),
    "uniform quarter": Policy("uniform"),
    "first quarter, reuse 1": Policy(reuse=1),
    "first quarter, reuse 2": Policy(reuse=2),
    "first quarter, reuse 8": Policy(reuse=8),
    "every step, reuse 1": Policy("all", reuse=1),
    "every step, reuse 8": Policy("all", reuse=8),
}
SHIPPED = "first quarter"  # what other schedules are compared with
DEFAULT = "int8_fp8 + ExpCast, window of a quarter, ours"  # what other methods are compared with


def ablation_rows(device):
    """The paper's ablation, and the questions it leaves: {(recipe name, policy): (kernel, attention)}."""
    rows = {}
    for name in ("int8_fp8 + ExpCast", "int8_int8", "nvfp4"):
        recipe = RECIPES[name]
        kernel = kernel_for(recipe, device)
        shipped = resolve_demean(Policy().plain_means, recipe.value_format)
        for what, policy in POLICIES.items():
            same = what != SHIPPED and policy == Policy(plain_means=shipped)
            if not same and (recipe is not NVFP4 or what in FEW):
                rows[name, what] = (kernel, ScheduledAttention(recipe, policy, kernel))
        if recipe is not NVFP4:
            many = ScheduledAttention(recipe, Policy("all"), kernel, ALL_CLUSTERS)
            rows[name, f"every step, {ALL_CLUSTERS} clusters"] = (kernel, many)
    return rows


# reuse is a matter of the values, not of their format; the reference takes a minute a row at 4 bits
FEW = (SHIPPED, "first quarter, then no means", "every step", "uniform quarter")


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
    earlier: the same run's results before it was cut short; its rows are not made again.
    """
    cpu = device.type == "cpu"
    seeds = range(seeds or (1 if cpu else SEEDS))
    steps, prompts = steps or (2 if cpu else STEPS), prompts[:1] if cpu else prompts
    model = load_model(weights, device)
    exact = make_clips(model, TorchAttention(), seeds, steps, prompts)
    names = list(prompts) * len(seeds)
    how = f"{len(prompts)} prompts, {steps} steps, guidance {CFG:g}"
    tables = methods, ablation = empty_tables(how, len(seeds) > SLOW_SEEDS)
    if cpu:
        methods.notes.append("Shows only that it runs: so few steps make no quarter, and one clip no error.")
    right = named(exact, names)
    methods.notes.insert(0, f"Exact attention: {right} of {len(names)} clips show their prompt.")
    each = dict(earlier["PSNR of each clip"]) if earlier else {}
    data = {"steps": steps, "seeds": list(seeds), "prompts": list(prompts), "cfg": CFG}
    data["PSNR of each clip"] = each

    work = jobs(device, tables)
    rows = {(table.title, lead): earlier_row(earlier, table, lead) for table, lead, _, _ in work}
    for table, lead, attention, slow in work:
        if rows[table.title, lead]:
            continue
        some = seeds[:SLOW_SEEDS] if slow else seeds
        with named_failure(table, ", ".join(lead)):
            made = make_clips(model, attention, some, steps, prompts)
            found, each[", ".join(lead)] = compare(made, exact[: len(made)])
            last = named(made, names) if table is methods else attention.orderings
            last //= -(-len(some) // SLOW_SEEDS) if table is ablation else 1  # of one batch
            rows[table.title, lead] = [*lead, *found.values(), None, None, last]
            log(f"{', '.join(lead)}: {found['PSNR']:.2f} dB")
        fill(tables, rows, each)
        save(tables, data)
    fill(tables, rows, each)
    return tables, data


def named(clips, prompts):
    """How many clips show their prompt."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(THREADS, threads))
    try:
        return count_right(clips.cpu(), prompts[: len(clips)])[2]
    finally:
        torch.set_num_threads(threads)


def fill(tables, rows, each):
    """The rows there are into their tables, with what they gain over the default or the shipped schedule."""
    for table in tables:
        place = table.columns.index("its standard error")
        table.rows.clear()
        for (title, lead), row in rows.items():
            if row and title == table.title:
                base = DEFAULT if len(lead) == 2 else ", ".join((*lead[:2], SHIPPED))
                row[place - 1 : place + 1] = gain(each[", ".join(lead)], each.get(base))
                table.rows.append(row)


def jobs(device, tables):
    """[(table, first cells of its row, attention, whether it is slow)], those of 4 bits last."""
    methods, ablation = tables
    made = [(methods, (name, source), attention, source in ("recipe", "variant") or is_slow(attention))
            for name, (source, attention) in main_rows(device).items()]  # fmt: skip
    made += [(ablation, (recipe, kernel, policy), attention, is_slow(attention))
             for (recipe, policy), (kernel, attention) in ablation_rows(device).items()]  # fmt: skip
    return sorted(made, key=lambda job: job[1][0].startswith("nvfp4"))


def is_slow(attention):
    return attention.kernel == "reference"


def empty_tables(how, fewer):
    """fewer: whether references make fewer clips than the rest."""
    numbers = ["clips", "PSNR", "standard error", "median", "worst", "SSIM", "GMSD"]
    methods = Table(
        "Clips by method",
        f"How far clips move from those of exact attention at the same seed. {how}; "
        "ours as the node runs it unless said.",
        ["method", "source", *numbers, "over the default", "its standard error", "prompts right"],
        notes=[
            "PSNR in dB; GMSD: lower is better. LPIPS and VBench need foreign weights: not measured.",
            *[f"References take the first {SLOW_SEEDS} seeds only: fewer clips."] * fewer,
            "no step grouped: INT8 and 4-bit values then have means in token order, as outside the "
            "window. Without any: the next table.",
            f"over the default: mean difference of PSNR, dB, from {DEFAULT}, on the same clips.",
        ],
    )
    compared = f"over {SHIPPED}", "its standard error"
    ablation = Table(
        "Where grouping sits (Table 3)",
        f"Which steps group, how long an order is reused, what later steps do. {how}; "
        f"an order is reused for {REUSE} steps unless said; other steps have means as the pack has it "
        f"(INT8 values: in token order). The paper: first quarter 26.4 dB, uniform 23.8, all 26.9.",
        ["recipe", "kernel", "steps that group", *numbers, *compared, "orders made"],
        notes=[
            f"{compared[0]}: mean difference of PSNR, dB, of the same clips. Orders: made in a clip's run."
        ],
    )
    return methods, ablation
