"""Pictures of stages speed and models."""

import re

from .marks import (
    SMALL,
    VERMILION,
    WIDTH,
    by_recipe,
    commonest,
    dots,
    having,
    kernel_style,
    legend,
    light_grid,
    log_ticks,
    one_panel,
    other_heads,
    over_sizes,
    recipe_of,
    source_style,
    split_heads,
    two_panels,
)
from .tables import rows_of


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


def window_panels(figure, rows, apart, x, label, title):
    """Kernels alone over cuDNN as inside and as outside the window; apart: rows not to join to the lines."""
    panels = two_panels(
        figure, 5.2, "inside the grouping window: grouped, with means", "outside it: keys in token order",
        sharey=True,
    )  # fmt: skip
    for axes, value in zip(panels, ("inside", "outside"), strict=True):
        over_sizes(axes, rows, apart, x, value, label, "name", 0.13)
    panels[0].set_ylim(bottom=0.0)  # of both, when both have their lines
    panels[0].set_ylabel("times as fast as cuDNN bf16", fontsize=SMALL + 1)
    figure.suptitle(title, fontsize=11)
    return panels


def speed_over_length(figure, data):
    rows = speed_rows(rows_of(data, "Speed over length"))
    if not rows:
        return False
    heads, joined, apart = split_heads(rows)
    title = f"Kernels alone over cuDNN bf16, {heads} heads, N(0, 1)"
    window_panels(figure, joined, apart, "tokens", "tokens (logarithmic)", title)
    legend(figure, *other_heads(apart))
    return True


def speed_over_heads(figure, data):
    """The table of heads, and from that of lengths the number of heads that it leaves out."""
    rows = rows_of(data, "Speed over heads")
    if not rows:
        return False
    tokens = commonest(row["tokens"] for row in rows)
    rows = speed_rows(rows + [row for row in rows_of(data, "Speed over length") if row["tokens"] == tokens])
    title = f"Kernels alone over cuDNN bf16, {tokens:,} tokens, N(0, 1)"
    window_panels(figure, rows, [], "heads", "heads (logarithmic)", title)
    legend(figure)
    return True


def memory(figure, data):
    """Peak memory of a call over length, and over its inputs at the longest."""
    rows = having(by_recipe(rows_of(data, "Speed over length")), "peak MiB")
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
    over_sizes(left, joined, apart, "tokens", "peak MiB", "tokens (logarithmic)")
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
    rows = having(by_recipe(rows_of(data, "Speed over length")), "TFLOP/s")
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
        over_sizes(axes, joined, apart, "tokens", value, "tokens (logarithmic)", share=0.14)
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
        row for row in by_recipe(rows_of(data, "The paper's shapes")) if not row["kernel"].startswith("cuDNN")
    ]
    places = list(dict.fromkeys(row["tensors"] for row in rows_of(data, "The paper's shapes")))
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
    rows = having(rows_of(data, "Preparation ladder"), "ms")
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
    rows = having(having(rows_of(data, "Steps of whole models"), seconds), share)
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
