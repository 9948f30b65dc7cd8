"""Pictures of the tables, drawn from the JSON files: nothing is measured again."""

import json
from pathlib import Path


def draw(stage, out: Path) -> list[Path]:
    """Draw the pictures of one stage from <stage>.json in out; returns their paths.

    Without matplotlib it says so and draws nothing: tables are the result, pictures show them.
    """
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no pictures", flush=True)
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))
    pictures = []
    for name, paint in PICTURES[stage].items():
        figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
        if paint(axes, data):
            card, commit = data["measured_on"]["card"], data["measured_on"]["commit"]
            figure.supxlabel(f"{card}, commit {commit}", x=0.99, ha="right", fontsize=7, color="0.4")
            pictures.append(out / f"{stage}-{name}.png")
            figure.savefig(pictures[-1], dpi=110)
        plt.close(figure)
    return pictures


def table(data, title):
    """The first table whose title starts so, as a list of dicts; empty if there is none."""
    for entry in data["tables"]:
        if entry["title"].startswith(title):
            return [dict(zip(entry["columns"], row, strict=True)) for row in entry["rows"]]
    return []


def shown_methods(rows):
    """The rows that a bar chart has room for: published recipes, packages and our grouped recipes."""
    return [
        row
        for row in rows
        if row["source"] in ("recipe", "package", "torch")
        or (row["source"] == "ours" and row["method"].endswith(("means, grouped", ", no means")))
    ]


COLOURS = {
    "ours": "tab:red",
    "recipe": "tab:blue",
    "package": "tab:cyan",
    "torch": "0.5",
    "variant": "tab:pink",
}
SOURCES = "red: ours, pink: a variant of it, cyan: a package, blue: our reference of one"
BAR_INCHES = 0.22


def bars(axes, rows, key, label, name="method", best="smallest", error=None):
    """Horizontal bars. best: "smallest" or "largest" is on top, or None: as listed. error: of whiskers."""
    rows = [row for row in rows if row.get(key) is not None][::-1]
    if best:
        rows.sort(key=lambda row: row[key], reverse=best == "smallest")
    axes.figure.set_size_inches(9, max(3.0, 1.4 + BAR_INCHES * len(rows)))
    axes.barh(range(len(rows)), [row[key] for row in rows],
              color=[COLOURS.get(row.get("source"), "0.5") for row in rows],
              xerr=[row[error] for row in rows] if error else None, ecolor="0.2")  # fmt: skip
    axes.set_yticks(range(len(rows)), [row[name] for row in rows], fontsize=7)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(label)
    return bool(rows)


def error_bars(kind):
    def paint(axes, data):
        from matplotlib.ticker import LogLocator

        rows = shown_methods(table(data, "Output error"))
        key = next((name for name in (rows[0] if rows else ()) if name.startswith(kind)), None)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(axis="x", which="both", alpha=0.3)
        axes.set_title(f"Output error, {key}\n{SOURCES}", fontsize=10)
        return key is not None and bars(axes, rows, key, "relative L2 against exact attention")

    return paint


def clip_bars(axes, data):
    axes.set_title(f"Clips of the sample model against exact attention, same seed\n{SOURCES}", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    rows = table(data, "Clips")
    return bars(axes, rows, "PSNR", "PSNR, dB (standard error)", best="largest", error="standard error")


def schedule_bars(axes, data):
    axes.set_title("Which steps group: clips of the sample model against exact attention", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    rows = [
        {
            **row,
            "name": f"{row['recipe']}: {row['steps that group']}",
            "source": SCHEDULE_COLOUR[row["recipe"]],
        }
        for row in table(data, "Where grouping sits")
    ]
    label = "PSNR, dB (standard error)"
    return bars(axes, rows, "PSNR", label, "name", best="largest", error="standard error")


# recipes in the place of sources: the bars' colours tell them apart
SCHEDULE_COLOUR = {"int8_fp8 + ExpCast": "ours", "int8_int8": "recipe", "nvfp4": "torch"}


def lines(axes, rows, x, y, by, y_label, log_y=False):
    from matplotlib.ticker import FuncFormatter, NullLocator

    for i, name in enumerate(dict.fromkeys(row[by] for row in rows)):
        points = sorted((row[x], row[y]) for row in rows if row[by] == name and row[y] is not None)
        if points:  # broken lines and open marks: kernels of one recipe lie on one another
            axes.plot(*zip(*points, strict=True), "-" if i % 2 else "--", marker="osD^v<>"[i % 7], label=name,
                      fillstyle="none", color=f"C{i % 10}")  # fmt: skip
    places = thinned(sorted({row[x] for row in rows if row[y] is not None}))
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    if log_y:
        axes.set_yscale("log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.grid(alpha=0.3)
    axes.set_xlabel(x)
    axes.set_ylabel(y_label)
    if rows:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return bool(places)


def thinned(places, share=0.1):
    """Those whose labels have room on a logarithmic axis, the last included; share: of the axis, for one."""
    kept = []
    for place in reversed(places):
        if not kept or kept[-1] >= place * (places[-1] / places[0]) ** share:
            kept.append(place)
    return kept[::-1]


def length_lines(axes, data):
    axes.set_title("Output error over length, N(0, 1), no means")
    rows = [row for row in table(data, "Length") if row["layout"] == "contiguous"]
    return lines(axes, rows, "keys", "error", "kernel", "relative L2 in sampled rows", log_y=True)


def speed_lines(title, shown, x):
    """Speed over cuDNN of one speed table's kernels, alone and without means, over column x."""

    def paint(axes, data):
        rows = table(data, title)
        axes.set_title(f"Kernels over cuDNN bf16, each alone, no means; {shown}", fontsize=10)
        return lines(axes, rows, x, "kernel over cuDNN", "kernel", "times as fast as cuDNN bf16")

    return paint


def shape_bars(axes, data):
    """Every kernel at every shape of the paper, grouped, alone."""
    rows = [
        {**row, "name": f"{row['tensors']} ({row['heads']} heads): {row['kernel']}"}
        for row in table(data, "The paper's shapes")
    ]
    for row in rows:
        row["source"] = "ours" if row["kernel grouped over cuDNN"] else "package"
        row["speed"] = row["call grouped over cuDNN"] or row["call over cuDNN"]
    axes.set_title("Whole calls with means and an order over cuDNN bf16, each alone", fontsize=10)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    rows = [row for row in rows if not row["kernel"].startswith("cuDNN")]
    return bars(axes, rows, "speed", "times as fast as cuDNN bf16 (line: cuDNN)", "name", best=None)


def ladder_bars(axes, data):
    rows = [{**row, "source": "ours"} for row in table(data, "Preparation ladder")]
    axes.set_title("Preparation, more and more of it fused", fontsize=10)
    return bars(axes, rows, "ms", "milliseconds", "rung", best=None)


def sweep_lines(axes, data):
    axes.set_title("Energy that tile means remove, by clusters (10 steps)")
    rows = [row for row in table(data, "Clusters and Lloyd steps") if row["cold steps"] == 10]
    return lines(axes, rows, "clusters", "energy removed", "tensors", "share of the value energy")


PICTURES = {
    "fidelity": {
        "structured": error_bars("structured"),
        "captured": error_bars("captured"),
        "clusters": sweep_lines,
    },
    "clips": {"psnr": clip_bars, "schedules": schedule_bars},
    "length": {"error": length_lines},
    "speed": {
        "length": speed_lines("Speed over length", "40 heads (of the longest 12)", "tokens"),
        "heads": speed_lines("Speed over heads", "32,768 tokens", "heads"),
        "shapes": shape_bars,
        "preparation": ladder_bars,
    },
}
