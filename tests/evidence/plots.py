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
        figure, axes = plt.subplots(figsize=(9, 5.5))
        if paint(axes, data):
            card, commit = data["measured_on"]["card"], data["measured_on"]["commit"]
            figure.text(0.99, 0.01, f"{card}, commit {commit}", ha="right", fontsize=7, color="0.4")
            figure.tight_layout()
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


def bars(axes, rows, key, label):
    """Horizontal bars, one a method, best on top."""
    rows = sorted((row for row in rows if row.get(key) is not None), key=lambda row: -row[key])
    axes.barh([row["method"] for row in rows], [row[key] for row in rows],
              color=[COLOURS.get(row.get("source"), "0.5") for row in rows])  # fmt: skip
    axes.set_xlabel(label)
    axes.tick_params(axis="y", labelsize=7)
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
        axes.set_title(f"Output error, {key}\nred: ours, cyan: a package, blue: our reference of one")
        return key is not None and bars(axes, rows, key, "relative L2 against exact attention")

    return paint


def clip_bars(axes, data):
    rows = [{**row, "PSNR": -row["PSNR"]} for row in table(data, "Clips")]
    axes.set_title("Clips of the sample model against exact attention, same seed; red: ours")
    done = bars(axes, rows, "PSNR", "PSNR, dB")
    for patch in axes.patches:
        patch.set_width(-patch.get_width())
    axes.set_xlim(left=0, right=1.05 * max((-row["PSNR"] for row in rows), default=1))
    return done


def lines(axes, rows, x, y, by, y_label, log_y=False):
    for name in dict.fromkeys(row[by] for row in rows):
        points = sorted((row[x], row[y]) for row in rows if row[by] == name and row[y] is not None)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y_label)
    axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    if rows:
        axes.legend(fontsize=7)
    return bool(rows)


def length_lines(axes, data):
    axes.set_title("Output error over length; kernels of one recipe lie on one another")
    rows = [row for row in table(data, "Length") if row["layout"] == "contiguous"]
    return lines(axes, rows, "keys", "error", "kernel", "relative L2 in sampled rows", log_y=True)


def speed_lines(axes, data):
    axes.set_title("Speed over cuDNN bf16, kernel alone")
    rows = [row for row in table(data, "Speed over length")]
    return lines(axes, rows, "tokens", "kernel over cuDNN", "kernel", "times as fast as cuDNN bf16")


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
    "clips": {"psnr": clip_bars},
    "length": {"error": length_lines},
    "speed": {"length": speed_lines},
}
