"""Pictures of the tables, drawn from the JSON files: nothing is measured again."""

import json
from pathlib import Path

from .marks import (
    BLUE,
    GREEN,
    PURPLE,
    SMALL,
    VERMILION,
    WIDTH,
    by_recipe,
    dots,
    having,
    legend,
    lines,
    log_ticks,
    one_panel,
    other_heads,
    over_sizes,
    recipe_style,
    sign,
    sizes_axis,
    source_style,
    split_heads,
    two_panels,
)
from .plots_speed import (
    ladder_dots,
    memory,
    model_bars,
    roofline,
    shape_dots,
    speed_over_heads,
    speed_over_length,
)
from .tables import rows_of


def draw(stage, out: Path) -> list[Path]:
    """Draw the pictures of one stage from <stage>.json in out; returns their paths.

    What a run that was cut short has no rows for is left out, and an earlier run's picture of it removed.
    Without matplotlib it says so and draws nothing: tables are the result, pictures show them.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no pictures", flush=True)
        return []
    data = json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))
    pictures = []
    for name, paint in PICTURES[stage].items():
        figure, path = Figure(layout="constrained"), out / f"{stage}-{name}.png"
        path.unlink(missing_ok=True)
        if paint(figure, data):
            pictures.append(path)
            facts, rest = data["measured_on"], "" if data.get("finished", True) else ", not finished"
            sign(figure, f"{facts['card']}, commit {facts['commit']}{rest}")
            figure.savefig(path, dpi=140)
    return pictures


def error_dots(kind):
    """Output error on one kind of tensors: published recipes, packages and our recipes, the best on top."""

    def paint(figure, data):
        rows = [
            row
            for row in rows_of(data, "Output error")
            if row["source"] in ("recipe", "package", "torch")
            or (row["source"] == "ours" and row["method"].endswith(("means, grouped", ", no means")))
        ]
        key = next((name for name in (rows[0] if rows else ()) if name.startswith(kind)), None)
        rows = sorted(having(rows, key), key=lambda row: row[key])
        if not rows:
            return False
        axes = one_panel(figure, len(rows))
        axes.set_xscale("log")
        log_ticks(axes.xaxis, "{x:g}")
        dots(axes, rows, key, "method", "source", source_style)
        axes.set_xlabel("relative L2 against exact attention (logarithmic)", fontsize=SMALL + 1)
        figure.suptitle(f"Output error, {key}", fontsize=11)
        legend(figure, columns=4)
        return True

    return paint


def sweep_lines(figure, data):
    rows = having(rows_of(data, "Clusters and Lloyd steps"), "energy removed")
    rows = [row for row in rows if row["cold steps"] == 10]
    if not rows:
        return False
    figure.set_size_inches(WIDTH, 4.2)
    axes = figure.subplots()
    looks = [
        {"color": c, "marker": m} for c, m in ((BLUE, "s"), (VERMILION, "o"), (GREEN, "D"), (PURPLE, "^"))
    ]
    names = list(dict.fromkeys(row["tensors"] for row in rows))
    lines(axes, rows, "clusters", "energy removed", "tensors", lambda n: (n, looks[names.index(n) % 4]))
    sizes_axis(axes, rows, "clusters", "clusters (logarithmic)")
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("share of the values' energy", fontsize=SMALL + 1)
    figure.suptitle("Energy that the means of tiles remove, keys grouped by 10 steps of k-means", fontsize=11)
    legend(figure)
    return True


def clip_dots(figure, data):
    """PSNR of every method, the best on top."""
    rows = sorted(having(rows_of(data, "Clips"), "PSNR"), key=lambda row: -row["PSNR"])
    if not rows:
        return False
    counts = {row.get("clips") for row in rows}
    several = len(counts) > 1
    for row in rows:
        row["name"] = f"{row['method']} [{row['clips']}]" if several else row["method"]
    axes = one_panel(figure, len(rows))
    dots(axes, rows, "PSNR", "name", "source", source_style, error="standard error")
    title = "Clips of the sample model against those of exact attention, same seeds\n"
    counted = "; in brackets: clips" if several else ""
    figure.suptitle(f"{title}(the axis does not begin at 0{counted})", fontsize=11)
    axes.set_xlabel("mean PSNR, dB (whiskers: standard error)", fontsize=SMALL + 1)
    legend(figure)
    return True


def schedule_dots(figure, data):
    """What a schedule gains over the shipped one, clip by clip; PSNR where results do not have that."""
    rows = rows_of(data, "Where grouping sits")
    value, error = "over first quarter", "its standard error"
    paired = having(rows, value)
    if not paired:
        value, error = "PSNR", "standard error"
    rows = paired or having(rows, value)
    if not rows:
        return False
    axes = one_panel(figure, len(rows), 0.17)
    dots(axes, rows, value, "steps that group", "recipe", recipe_style, error)
    if paired:
        axes.axvline(0.0, color="0.3", linewidth=0.8, zorder=0)
        title = "mean difference in PSNR from grouping in the first quarter, clip by clip"
    else:
        title = "PSNR against exact attention (the axis does not begin at 0)"
    axes.set_xlabel("dB (whiskers: standard error)", fontsize=SMALL + 1)
    figure.suptitle(f"Which steps group, clips of the sample model:\n{title}", fontsize=11)
    legend(figure)
    return True


def length_lines(figure, data):
    """Error over keys: a line for each kernel, open marks for models' numbers of heads."""
    rows = by_recipe(rows_of(data, "Length"))
    if not rows:
        return False
    few, joined, apart = split_heads(rows)
    joined = [row for row in joined if row["layout"] == "contiguous"]
    panels = two_panels(figure, 4.8, "inside the grouping window", "outside it", sharey=True)
    for axes, value in zip(panels, ("error grouped", "error"), strict=True):
        over_sizes(axes, joined, apart, "keys", value, "keys (logarithmic)", share=0.16)
        axes.set_yscale("log")
        log_ticks(axes.yaxis, "{x:g}")
    panels[0].set_ylabel("relative L2 against exact attention (logarithmic)", fontsize=SMALL + 1)
    figure.suptitle(f"Output error over length, N(0, 1); lines: {few} heads", fontsize=11)
    legend(figure, *other_heads(apart, ", views of a fused projection"))
    return True


PICTURES = {
    "fidelity": {
        "structured": error_dots("structured"),
        "captured": error_dots("captured"),
        "clusters": sweep_lines,
    },
    "clips": {"psnr": clip_dots, "schedules": schedule_dots},
    "length": {"error": length_lines},
    "speed": {
        "length": speed_over_length,
        "heads": speed_over_heads,
        "memory": memory,
        "roofline": roofline,
        "shapes": shape_dots,
        "preparation": ladder_dots,
    },
    "models": {"steps": model_bars},
}
