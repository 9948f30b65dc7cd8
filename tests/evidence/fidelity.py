"""Stage "fidelity": every method on the same tensors; value errors by order; ExpCast's error; sweeps."""

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from comfyui_vc_attention.kernels.group import reference as group_reference
from comfyui_vc_attention.kernels.prepare.reference import rotate
from comfyui_vc_attention.kernels.registry import load_grouping
from comfyui_vc_attention.kernels.testing import energy_removed

from . import measures
from .captured import captured_samples
from .methods import all_methods
from .samples import MADE_KINDS, made_sample
from .structured import CALIBRATION_GRID, TARGET_RATIOS, TARGET_SHARES, TARGET_VALUE_MSE, value_mse
from .tables import Table

PAPER_ORDERS = {"sequence": (0.08, 1.81), "Hadamard on V": (None, 1.81), "cube": (0.12, 1.74),
                "grouped": (0.36, 1.28), "warm": (None, 1.28), "balanced": (None, 1.17)}  # fmt: skip
CLUSTERS, ITERATIONS = (4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 6, 10)
SHIPPED_STEPS = (1, 2, 4, 10)
LARGER = "larger model"


@dataclass
class Sizes:
    heads: int = 2  # as the calibration
    grid: tuple = CALIBRATION_GRID
    rows: int = 256
    steps: tuple = (1, 4, 9)
    blocks: tuple = (0, 2, 5)
    kinds: tuple = MADE_KINDS


CPU_SIZES = Sizes(2, (8, 16, 16), 256, (4,), (2,), MADE_KINDS)


def log(text, start=time.perf_counter()):  # noqa: B008, the time the program began
    print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)


def measure(sample, methods, rows):
    """{method name: numbers or {"refusal": why}}."""
    q, _ = sample.rows(rows)
    expected, found = measures.exact_rows(q, sample.k, sample.v), {}
    for method in methods:
        refusal = method.why_not(sample)
        made = {"refusal": refusal} if refusal else measures.of_output(method.run(sample, q), expected)
        found[method.name] = made
    log(f"{sample.name}: {len(methods)} methods")
    return found


def method_tables(found, methods):
    """The tables of output errors and of their parts, of the samples measured so far."""
    errors, columns = error_table(found, methods)
    parts = [
        term_table(name, numbers, methods)
        for name, numbers in columns.items()
        if name == "structured" or "captured" in name
    ]
    return [errors, *parts]


def averaged(per_method):
    """Mean over samples of the numbers of each method: [{method: numbers}] -> {method: numbers}."""
    result = {}
    for name in per_method[0]:
        rows = [numbers[name] for numbers in per_method if "refusal" not in numbers[name]]
        if not rows:
            result[name] = per_method[0][name]
            continue
        result[name] = {key: sum(r[key] for r in rows) / len(rows) for key in rows[0]}
    return result


def error_table(found, methods):
    columns = {name: numbers for name, numbers in found.items() if "captured" not in name}
    for model in ("captured", f"{LARGER}, captured"):
        captured = [numbers for name, numbers in found.items() if name.startswith(model)]
        if captured:
            columns[f"{model} (mean of {len(captured)})"] = averaged(captured)
    table = Table(
        "Output error",
        "Relative L2 of the attention output against exact attention, the same tensors for all.",
        ["method", "source", *columns],
    )
    missing = {}
    for method in methods:
        row = [numbers[method.name].get("error") for numbers in columns.values()]
        if all(cell is None for cell in row):
            missing.setdefault(next(iter(columns.values()))[method.name]["refusal"], []).append(method.name)
            continue
        table.rows.append([method.name, method.source, *row])
    table.notes += [f"Not run here, {why}: {', '.join(names)}." for why, names in missing.items()]
    table.notes.append(
        "recipe: our reference of the published recipe; variant: measured only, not in the pack."
    )
    return table, columns


def term_table(name, numbers, methods):
    """The terms of Eq. 2 for one kind of tensors."""
    keys = (
        "error",
        "coherence",
        "cosine_distance",
        "probability_term",
        "value_term",
        "value_share",
        "value_mse",
        "value_error",
    )
    table = Table(
        f"Error taken apart: {name}",
        "The terms of Eq. 2 over the output (the paper, Wan2.2, Q and K rotated: 82% of the error is the "
        "values'; it depends on the recipe and on how sharp attention is), and V's error.",
        ["method", *(key.replace("_", " ") for key in keys)],
        notes=["Coherence: share of the error along one direction of the output; high: rows err alike."],
    )
    for method in methods:
        row = numbers[method.name]
        if "value_term" in row:
            table.rows.append([method.name, *(row[key] for key in keys)])
    return table


def order_numbers(samples, name):
    """Mean over samples of (share of the energy that tile means remove, E4M3 value MSE, that of no means)."""
    found = []
    for sample in samples:
        turned = name == "Hadamard on V"  # keeps lengths, so its error is the error of what it turned
        v = rotate(sample.v.float()) if turned else sample.v
        order = None if turned else sample.order(name)
        found.append((energy_removed(v, order), value_mse(v, order), value_mse(sample.v)))
    return [sum(each) / len(samples) for each in zip(*found, strict=True)]


def captured_order_table(samples):
    """Token orders on captures, of few tokens: as many clusters as the node makes, but for balanced ones."""
    table = Table(
        "Captured token orders",
        f"The same on the sample model's values, mean of {len(samples)} captures of "
        f"{samples[0].v.shape[2]:,} tokens.",
        ["order", "energy removed", "value MSE", "over sequence"],
    )
    for name in PAPER_ORDERS:
        kept = [sample for sample in samples if name != "warm" or sample.earlier is not None]
        share, error, base = order_numbers(kept, name)
        table.rows.append([name, share, error, error / base])
    return table


def order_table(sample):
    """The counterpart of Table 1 and Figure 4 on structured values."""
    table = Table(
        "Token orders (Table 1, Figure 4)",
        "What each order lets the tile means remove, and the E4M3 value error that is left. Made values are "
        "calibrated to the paper in three shares and the first error; the other errors are predicted.",
        ["order", "energy removed", "paper", "value MSE", "over sequence", "paper's MSE", "paper's ratio"],
    )
    for name, (share, mse) in PAPER_ORDERS.items():
        removed, error, base = order_numbers([sample], name)
        table.rows.append([name, removed, share, error, error / base,
                           mse * 1e-4, mse / PAPER_ORDERS["sequence"][1]])  # fmt: skip
    frames, rows, columns = sample.grid
    table.notes.append(
        f"{sample.name}, {sample.v.shape[1]} heads of {frames} x {rows} x {columns} tokens; calibrated at "
        f"{' x '.join(map(str, CALIBRATION_GRID))}, targets {TARGET_SHARES}, {TARGET_VALUE_MSE}, "
        f"predicted {TARGET_RATIOS}."
    )
    return table


def sweep_table(samples):
    """Clusters and Lloyd steps: energy removed, by the reference and by the grouping for this card."""
    table = Table(
        "Clusters and Lloyd steps",
        "How many clusters and steps are worth their time (time: stage speed).",
        ["tensors", "clusters", "cold steps", "energy removed", "E4M3 value MSE over sequence"],
    )
    for sample in samples:
        base = value_mse(sample.v)
        settings = [(c, 10) for c in CLUSTERS] + [(128, n) for n in ITERATIONS[:-1]]
        for clusters, iterations in settings:
            order = group_reference.group_tokens(sample.v, clusters, iterations=iterations).order
            table.rows.append([sample.name, clusters, iterations, energy_removed(sample.v, order),
                               value_mse(sample.v, order) / base])  # fmt: skip
        for name, order in stepped(sample):
            table.rows.append([sample.name, 128, name, energy_removed(sample.v, order),
                               value_mse(sample.v, order) / base])  # fmt: skip
    return table


def stepped(sample, clusters=128):
    """(what, order) by the grouping for this card, as shipped and by steps, and warm by the reference."""
    group = load_grouping(sample.v, clusters)
    yield "as shipped here", group(sample.v, clusters).order
    for steps in SHIPPED_STEPS:
        yield f"as shipped here, cold {steps}", group(sample.v, clusters, iterations=steps).order
    if sample.earlier is None:
        return
    before, shipped = group_reference.group_tokens(sample.earlier, clusters), group(sample.earlier, clusters)
    for steps in (1, 2, 4):
        warm = group_reference.group_tokens(sample.v, clusters, before, iterations=steps)
        yield f"warm, {steps}", warm.order
        warm = group(sample.v, clusters, shipped, iterations=steps)
        yield f"as shipped here, warm {steps}", warm.order


def cast_numbers(sample, rows):
    """Probability errors of one kind of tensors: what measures.probability_error has, and Eq. 15's bound."""
    q, _ = sample.rows(rows)
    bound = measures.diameter_bound(q, sample.k, sample.v)
    return measures.probability_error(q, sample.k) | {"output_over_bound": bound}


def cast_table(numbers):
    """Total variation of ExpCast's rows and of exponential-then-cast's, and the bounds."""
    table = Table(
        "Probability error (Eq. 8, 15)",
        "Total variation of probability rows by ExpCast and by exponential and cast; the paper: means 1.6% "
        "and 1.1%, largest 17.8%, and none above 0.0364 + tail.",
        ["tensors", "rows", "ExpCast mean", "largest", "largest without underflow",
         "largest - (0.0364 + tail)",
         "exp and cast mean", "largest ", "output moved, over its bound"],
    )  # fmt: skip
    for name, found in numbers.items():
        fast, plain = found["expcast"], found["exp"]
        table.rows.append([name, found["rows"], fast["mean"], fast["largest"],
                           fast["largest_without_underflow"], fast["largest_over_bound"], plain["mean"],
                           plain["largest"], found["output_over_bound"]])  # fmt: skip
    return table


def run(device, sizes=None, larger=None, save=lambda tables, data: None, earlier=None):
    """(tables, data) of this stage. larger: weights of tool larger, to capture from as well.

    save: given both after each kind of tensors. earlier: the same run's results before it was cut short;
    what it measured, captures of a larger model too, is not measured again.
    """
    sizes = sizes or (Sizes() if device.type == "cuda" else CPU_SIZES)
    methods = all_methods()
    captured = captured_samples(sizes.steps, sizes.blocks, device=device)
    more = captured_samples(sizes.steps, sizes.blocks, larger, device) if larger else []
    samples = [replace(sample, name=f"{LARGER}, {sample.name}") for sample in more] + captured
    made = [made_sample(kind, sizes.heads, sizes.grid, device) for kind in sizes.kinds]
    found, casts = (dict((earlier or {}).get(part, {})) for part in ("numbers", "probability_error"))
    data = {"size": {"heads": sizes.heads, "grid": sizes.grid, "rows": sizes.rows}, "larger": None}
    before = (earlier or {}).get("larger")
    data["larger"] = hashlib.sha256(Path(larger).read_bytes()).hexdigest() if larger else before
    if data["larger"] != before:
        for part in (found, casts):  # of other weights
            for name in [name for name in part if name.startswith(LARGER)]:
                del part[name]
    data |= {"numbers": found, "probability_error": casts}
    for sample in samples + made:
        if sample.name not in casts:
            found[sample.name] = measure(sample, methods, sizes.rows)
            casts[sample.name] = cast_numbers(sample, min(sizes.rows, 256))
            save(method_tables(found, methods), data)
    tables = method_tables(found, methods)
    structured = next(sample for sample in made if sample.name == "structured")
    middle = captured[len(captured) // 2].name.partition(", block")[0]  # every block of one step
    swept = [structured, *(sample for sample in captured if sample.name.startswith(middle))]
    tables += [order_table(structured), captured_order_table(captured), sweep_table(swept)]
    log("sweeps")
    return [*tables, cast_table(casts)], data
