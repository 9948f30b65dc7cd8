"""Pictures of the tables, drawn from the JSON files: nothing is measured again."""

import json
import re
from pathlib import Path

from .marks import (
    BLUE,
    GREEN,
    PURPLE,
    SMALL,
    VERMILION,
    WIDTH,
    by_recipe,
    commonest,
    dots,
    kernel_style,
    legend,
    light_grid,
    lines,
    log_ticks,
    one_panel,
    recipe_of,
    recipe_style,
    sign,
    sizes_axis,
    source_style,
    two_panels,
)


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


def table(data, title):
    """The first table whose title starts so, as a list of dicts; empty if there is none."""
    for entry in data["tables"]:
        if entry["title"].startswith(title):
            return [dict(zip(entry["columns"], row, strict=True)) for row in entry["rows"]]
    return []


def having(rows, value):
    return [row for row in rows if row.get(value) is not None]


def error_dots(kind):
    """Output error on one kind of tensors: published recipes, packages and our recipes, the best on top."""

    def paint(figure, data):
        rows = [
            row
            for row in table(data, "Output error")
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
    rows = having(table(data, "Clusters and Lloyd steps"), "energy removed")
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
    rows = sorted(having(table(data, "Clips"), "PSNR"), key=lambda row: -row["PSNR"])
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
    rows = table(data, "Where grouping sits")
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
    rows = by_recipe(table(data, "Length"))
    if not rows:
        return False
    few, joined, apart = split_heads(rows)
    joined = [row for row in joined if row["layout"] == "contiguous"]
    panels = two_panels(figure, 4.8, "inside the grouping window", "outside it", sharey=True)
    for axes, value in zip(panels, ("error grouped", "error"), strict=True):
        lines(axes, joined, "keys", value)
        lines(axes, apart, "keys", value, joined=False)
        sizes_axis(axes, rows, "keys", "keys (logarithmic)", share=0.16)
        axes.set_yscale("log")
        log_ticks(axes.yaxis, "{x:g}")
    panels[0].set_ylabel("relative L2 against exact attention (logarithmic)", fontsize=SMALL + 1)
    figure.suptitle(f"Output error over length, N(0, 1); lines: {few} heads", fontsize=11)
    legend(figure, *other_heads(apart, ", views of a fused projection"))
    return True


def speed_rows(rows):
    """Rows of a speed table with what pictures show of them beside: "inside" and "outside" the window.

    Both are the kernel alone over cuDNN; of a peer, which has no window, the same twice, and the whole call
    where it offers no kernel alone, as its name then says.
    """
    shown = []
    for row in by_recipe(rows):
        inside, outside = row.get("kernel grouped over cuDNN"), row.get("kernel over cuDNN")
        name = row["kernel"]
        if recipe_of(name) is None:
            name += ", whole call" if outside is None else ""
            inside = outside = row.get("call over cuDNN") if outside is None else outside
        shown.append({**row, "name": name, "inside": inside, "outside": outside})
    return shown


def split_heads(rows):
    """(heads of most rows, rows with so many, rows of other shapes)."""
    heads = commonest(row["heads"] for row in rows)
    same = [row for row in rows if row["heads"] == heads]
    return heads, same, [row for row in rows if row["heads"] != heads]


def window_panels(figure, rows, apart, x, label, title):
    """Kernels alone over cuDNN as inside and as outside the window; apart: rows not to join to the lines."""
    panels = two_panels(
        figure, 5.2, "inside the grouping window: grouped, with means", "outside it: keys in token order",
        sharey=True,
    )  # fmt: skip
    for axes, value in zip(panels, ("inside", "outside"), strict=True):
        lines(axes, rows, x, value, "name", kernel_style)
        lines(axes, apart, x, value, "name", kernel_style, joined=False)
        sizes_axis(axes, rows + apart, x, label, share=0.13)
    panels[0].set_ylim(bottom=0.0)  # of both, when both have their lines
    panels[0].set_ylabel("times as fast as cuDNN bf16", fontsize=SMALL + 1)
    figure.suptitle(title, fontsize=11)
    return panels


def other_heads(apart, how=""):
    """The legend's entry for marks that are not joined to the lines; nothing if there are none."""
    heads = ", ".join(map(str, sorted({row["heads"] for row in apart})))
    return [(f"filled: {heads} heads{how}", {"marker": "o"})] if apart else []


def speed_over_length(figure, data):
    rows = speed_rows(table(data, "Speed over length"))
    if not rows:
        return False
    heads, joined, apart = split_heads(rows)
    title = f"Kernels alone over cuDNN bf16, {heads} heads, N(0, 1)"
    window_panels(figure, joined, apart, "tokens", "tokens (logarithmic)", title)
    legend(figure, *other_heads(apart))
    return True


def speed_over_heads(figure, data):
    """The table of heads, and from that of lengths the number of heads that it leaves out."""
    rows = table(data, "Speed over heads")
    if not rows:
        return False
    tokens = commonest(row["tokens"] for row in rows)
    rows = speed_rows(rows + [row for row in table(data, "Speed over length") if row["tokens"] == tokens])
    title = f"Kernels alone over cuDNN bf16, {tokens:,} tokens, N(0, 1)"
    window_panels(figure, rows, [], "heads", "heads (logarithmic)", title)
    legend(figure)
    return True


def memory(figure, data):
    """Peak memory of a call over length, and over its inputs at the longest."""
    rows = having(by_recipe(table(data, "Speed over length")), "peak MiB")
    if not rows:
        return False
    heads, joined, apart = split_heads(rows)
    longest = max(row["tokens"] for row in joined)
    left, right = two_panels(
        figure,
        5.2,
        f"over length, {heads} heads",
        f"beside q, k and v, {longest:,} tokens",
        width_ratios=(3, 2),
    )
    lines(left, joined, "tokens", "peak MiB")
    lines(left, apart, "tokens", "peak MiB", joined=False)
    sizes_axis(left, rows, "tokens", "tokens (logarithmic)")
    left.set_yscale("log")
    log_ticks(left.yaxis)
    left.set_ylabel("MiB (logarithmic)", fontsize=SMALL + 1)
    at_longest = having([row for row in joined if row["tokens"] == longest], "over q, k and v")
    for row in at_longest:
        row["percent"] = 100 * row["over q, k and v"]
    at_longest.sort(key=lambda row: row["percent"])
    dots(right, at_longest, "percent", "kernel", "kernel", kernel_style)
    right.set_xlim(0.0, max([100.0, *(1.1 * row["percent"] for row in at_longest)]))
    right.set_xlabel("% of the bytes of q, k and v", fontsize=SMALL + 1)
    figure.suptitle("Memory that a whole call needs beyond q, k and v, output included", fontsize=11)
    legend(figure, *other_heads(apart))
    return True


def roofline(figure, data):
    """TFLOP/s over length below the card's peaks, and the share of the peak of each one's operands."""
    rows = having(by_recipe(table(data, "Speed over length")), "TFLOP/s")
    if not rows:
        return False
    heads, joined, apart = split_heads(rows)
    for row in rows:
        row["percent"] = None if row.get("of peak") is None else 100 * row["of peak"]
    panels = two_panels(figure, 5.2, "rate and the data sheet's peaks", "share of the peak of its operands")
    beside = panels[0].get_yaxis_transform()
    for peak in sorted({round(row["TFLOP/s"] / row["of peak"]) for row in having(rows, "of peak")}):
        panels[0].axhline(peak, color="0.4", linestyle=":", linewidth=1.0)
        panels[0].text(
            1.01, peak, f"peak\n{peak:,}", fontsize=SMALL, color="0.3", va="center", transform=beside
        )
    for axes, value in zip(panels, ("TFLOP/s", "percent"), strict=True):
        lines(axes, joined, "tokens", value)
        lines(axes, apart, "tokens", value, joined=False)
        sizes_axis(axes, rows, "tokens", "tokens (logarithmic)", share=0.14)
        axes.set_ylim(bottom=0.0)
    panels[0].set_ylabel("TFLOP/s of both products", fontsize=SMALL + 1)
    panels[1].set_ylabel("% of peak", fontsize=SMALL + 1)
    panels[1].set_ylim(0.0, 100.0)
    title = f"Kernels alone as outside the grouping window, {heads} heads, N(0, 1)"
    figure.suptitle(title, fontsize=11)
    legend(figure, *other_heads(apart))
    return True


def shape_dots(figure, data):
    """Every kernel at every shape of the paper: whole calls, and ticks for kernels alone."""
    rows = [
        row for row in by_recipe(table(data, "The paper's shapes")) if not row["kernel"].startswith("cuDNN")
    ]
    places = list(dict.fromkeys(row["tensors"] for row in table(data, "The paper's shapes")))
    rows.sort(key=lambda row: places.index(row["tensors"]))
    for row in rows:
        row["line"] = f"{row['tensors']}\n{row['tokens']:,} tokens, {row['heads']} heads"
        grouped = row.get("call grouped over cuDNN")
        row["whole"] = row.get("call over cuDNN") if grouped is None else grouped
    if not rows:
        return False
    axes = one_panel(figure, len(rows), 0.14)

    def tick(name):
        return None, {"color": kernel_style(name)[1]["color"], "marker": "|", "markersize": 9}

    dots(axes, rows, "kernel grouped over cuDNN", "line", "kernel", tick)
    dots(axes, rows, "whole", "line", "kernel", kernel_style)
    axes.axvline(1.0, color="0.3", linewidth=0.8, zorder=0)
    axes.set_xlabel("times as fast as cuDNN bf16 (vertical line)", fontsize=SMALL + 1)
    figure.suptitle("Whole calls at the paper's shapes, ours as inside the grouping window", fontsize=11)
    legend(figure, ("the kernel alone", {"marker": "|", "markersize": 9}))
    return True


def ladder_dots(figure, data):
    rows = having(table(data, "Preparation ladder"), "ms")
    if not rows:
        return False
    question = next(
        each["question"] for each in data["tables"] if each["title"].startswith("Preparation ladder")
    )
    size = re.search(r"[\d,]+ tokens and \d+ heads", question)
    axes = one_panel(figure, len(rows), 0.3)
    dots(axes, [{**row, "source": "ours"} for row in rows], "ms", "rung", "source", source_style)
    for place, row in enumerate(rows):
        axes.annotate(f"{row['ms']:.3g} ms", (row["ms"], place), (7, 0), textcoords="offset points",
                      va="center", fontsize=SMALL)  # fmt: skip
    axes.set_xlim(0.0, 1.12 * max(row["ms"] for row in rows))
    axes.set_xlabel("milliseconds", fontsize=SMALL + 1)
    figure.suptitle(
        f"Time of the preparation by what is fused, {size[0] if size else 'one shape'}", fontsize=11
    )
    return True


def model_bars(figure, data):
    """A step of each whole model: seconds in self-attention, and the rest, which no kernel here changes."""
    seconds, share = "step of all blocks s", "share of attention"  # of those that ran; of all a little more
    rows = having(having(table(data, "Steps of whole models"), seconds), share)
    if not rows:
        return False
    kinds = list(dict.fromkeys(row["model"] for row in rows))
    figure.set_size_inches(WIDTH, 1.0 + 0.9 * len(kinds) + 0.2 * len(rows))
    for axes, kind in zip(figure.subplots(len(kinds), squeeze=False)[:, 0], kinds, strict=True):
        own = [row for row in rows if row["model"] == kind][::-1]
        names, whole = [row["attention"].partition(":")[0] for row in own], [row[seconds] for row in own]
        rest = [row[seconds] * (1 - row[share]) for row in own]
        axes.barh(names, whole, color=VERMILION, label="self-attention")
        axes.barh(names, rest, color="0.8", label="the rest of the step")
        for place, value in enumerate(whole):
            axes.annotate(
                f"{value:.1f} s", (value, place), (4, -3), textcoords="offset points", fontsize=SMALL
            )
        axes.set_xlim(0.0, 1.1 * max(whole))
        axes.set_title(f"{kind}, {own[0]['tokens']:,} tokens", fontsize=SMALL + 1)
        axes.set_xlabel("seconds of a step of all blocks, extrapolated", fontsize=SMALL + 1)
        light_grid(axes)
    figure.suptitle("A sampling step of whole models, random weights, one condition", fontsize=11)
    legend(figure, columns=2)
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
