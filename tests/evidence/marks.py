"""What the pictures are made of: colours and marks, dot plots, lines over sizes, legends."""

from collections import Counter

# Okabe and Ito's palette, which colour-blind readers can tell apart; marks say the same once more
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
VERMILION, ORANGE, PURPLE = "#D55E00", "#E69F00", "#CC79A7"
BROWN, GREY = "#7A5C20", "0.5"
SMALL = 8  # points, the smallest text

SOURCES = {
    "ours": ("ours", {"color": VERMILION, "marker": "o"}),
    "variant": (
        "a variant of ours, measured only",
        {"color": VERMILION, "marker": "o", "markerfacecolor": "white"},
    ),
    "package": ("a peer's package", {"color": BLUE, "marker": "s"}),
    "recipe": (
        "our reference of a peer's recipe",
        {"color": BLUE, "marker": "s", "markerfacecolor": "white"},
    ),
    "torch": ("PyTorch", {"color": "0.25", "marker": "X"}),
}
RECIPES = {"int8_fp8": VERMILION, "int8_int8": BLUE, "fp8_fp8": GREEN, "nvfp4": PURPLE}
BUILDS = {"reference": "h", "triton": "^", "sm90": "o", "sm89": "D", "sm120": "v", "sm100": ">", "cuda": "s"}
PEER_LOOKS = {
    "cuDNN": ("black", "."),
    "reference": ("0.25", "x"),
    "comfy-kitchen": (ORANGE, "P"),
    "SageAttention 1": (SKY, "d"),
    "SageAttention": (SKY, "X"),
    "FlashAttention": (BROWN, "*"),
}


def source_style(source):
    """(label, style) of a row's source."""
    return SOURCES.get(source, (source, {"color": GREY, "marker": "d"}))


def recipe_of(name):
    """The numerics that a kernel's or a recipe's name tells; None of a peer's."""
    return next((recipe for recipe in RECIPES if recipe in name), None)


def recipe_style(name):
    """(label, style) of a recipe: its colour, which its kernels share."""
    marks = dict(zip(RECIPES, "osD^", strict=True))
    recipe = recipe_of(name)
    return name, {"color": RECIPES.get(recipe, GREY), "marker": marks.get(recipe, "d")}


def kernel_style(name):
    """(label, style) of a kernel: colour by recipe, mark by build; of a peer both by its name.

    Without ExpCast where others of the recipe have it: dotted, half a mark.
    """
    recipe = recipe_of(name)
    if recipe:
        mark = next((mark for build, mark in BUILDS.items() if build in name), "p")
        cast = name.endswith("expcast off") or name in ("reference int8_fp8", "reference fp8_fp8")
        look = {"color": RECIPES[recipe], "marker": mark, "linestyle": "-"}
        return name, look | ({"fillstyle": "bottom", "linestyle": ":"} if cast else {})
    colour, mark = next((look for peer, look in PEER_LOOKS.items() if name.startswith(peer)), (GREY, "d"))
    return name, {"color": colour, "marker": mark, "linestyle": "--"}


def by_recipe(rows, column="kernel"):
    """Rows in the order in which legends name them: recipe by recipe, then peers."""
    order = [*RECIPES, None]
    return sorted(rows, key=lambda row: order.index(recipe_of(row[column])))


def dots(axes, rows, value, line, series, style, error=None):
    """A dot plot: one line for each different row[line], the first on top; a dot at row[value] or none.

    style(row[series]) -> (label, style); series that share lines stand below each other there. error: of
    whiskers. Nothing is joined to an edge of the axis, so that it need not begin at 0.
    """
    names = list(dict.fromkeys(row[line] for row in rows))
    kinds = list(dict.fromkeys(row[series] for row in rows))
    step = 0.72 / len(kinds) if len(rows) > len(names) else 0.0
    for i, kind in enumerate(kinds):
        chosen = [row for row in rows if row[series] == kind and row.get(value) is not None]
        places = [names.index(row[line]) + step * (i - (len(kinds) - 1) / 2) for row in chosen]
        whiskers = [row.get(error) or 0.0 for row in chosen] if error else None
        label, look = style(kind)
        if chosen:
            axes.errorbar([row[value] for row in chosen], places, xerr=whiskers, label=label,
                          **{"markersize": 5.5, "elinewidth": 1.0, **look, "linestyle": "none"})  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    axes.set_ylim(len(names) - 0.45, -0.55)
    light_grid(axes)
    if step:  # what stands together is told by the gaps
        axes.grid(visible=False, axis="y")
        for place in range(len(names) - 1):
            axes.axhline(place + 0.5, color="0.8", linewidth=0.6, zorder=0)


def light_grid(axes):
    axes.grid(which="both", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def lines(axes, rows, x, y, series="kernel", style=kernel_style, joined=True):
    """One line for each different row[series] over column x: open marks, for kernels of one recipe lie on one
    another; or unjoined full marks of the same look."""
    for name in dict.fromkeys(row[series] for row in rows):
        points = sorted((row[x], row[y]) for row in rows if row[series] == name and row.get(y) is not None)
        label, look = style(name)
        look = {"markersize": 5.5, "linewidth": 1.2, "fillstyle": "none", **look}
        if not joined:
            look |= {"linestyle": "none"} | ({"fillstyle": "full"} if look["fillstyle"] == "none" else {})
        if label in axes.get_legend_handles_labels()[1]:
            label = None
        if points:
            axes.plot(*zip(*points, strict=True), **look, label=label)
    light_grid(axes)


def sizes_axis(axes, rows, x, label, share=0.115):
    """A logarithmic x axis with ticks where rows are; share: of the axis, what one tick's label needs."""
    from matplotlib.ticker import NullLocator

    places = thinned(sorted({row[x] for row in rows}), share)
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label, fontsize=SMALL + 1)


def over_sizes(axes, joined, apart, x, y, label, series="kernel", share=0.115):
    """Lines of rows over column x, lone marks of the rows apart, the axis of both; share as sizes_axis."""
    lines(axes, joined, x, y, series)
    lines(axes, apart, x, y, series, joined=False)
    sizes_axis(axes, joined + apart, x, label, share)


def thinned(places, share):
    """Those whose labels have room on a logarithmic axis, the last included."""
    kept = []
    for place in reversed(places):
        if not kept or kept[-1] >= place * (places[-1] / places[0]) ** share:
            kept.append(place)
    return kept[::-1]


def log_ticks(axis, text="{x:,g}"):
    """Ticks at 1, 2 and 5 of each decade, written out."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter(text))
    axis.set_minor_formatter(NullFormatter())


def having(rows, value):
    return [row for row in rows if row.get(value) is not None]


def split_heads(rows):
    """(heads of most rows, rows with so many, rows of other shapes)."""
    heads = commonest(row["heads"] for row in rows)
    same = [row for row in rows if row["heads"] == heads]
    return heads, same, [row for row in rows if row["heads"] != heads]


def other_heads(apart, how=""):
    """The legend's entry for marks that are not joined to the lines; nothing if there are none."""
    heads = ", ".join(map(str, sorted({row["heads"] for row in apart})))
    return [(f"filled: {heads} heads{how}", {"marker": "o"})] if apart else []


def commonest(values):
    """The value that most rows have; of equally many the first."""
    return Counter(values).most_common(1)[0][0]


def two_panels(figure, height, left, right, **options):
    """Axes of two panels side by side, titled."""
    figure.set_size_inches(WIDTH, height)
    panels = figure.subplots(1, 2, **options)
    for axes, title in zip(panels, (left, right), strict=True):
        axes.set_title(title, fontsize=SMALL + 1)
    return panels


WIDTH, CORNER = 8.0, 0.2  # inches: of a picture; of the line below it that names the card


def one_panel(figure, entries, per_entry=0.2):
    """Axes of a dot plot with so many dots below each other."""
    figure.set_size_inches(WIDTH, 1.7 + per_entry * entries)
    return figure.subplots()


def legend(figure, *more, columns=3):
    """One legend of all panels, below them; more: (label, style) of what no panel has a label for."""
    from matplotlib.lines import Line2D

    named = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    for label, style in more:
        named[label] = Line2D([], [], **{"linestyle": "none", "color": "0.25", **style})
    place = 0.5, CORNER / figure.get_figheight()
    figure.legend(named.values(), named.keys(), loc="lower center", bbox_to_anchor=place, ncols=columns,
                  fontsize=SMALL, frameon=False).set_in_layout(False)  # fmt: skip


def sign(figure, text):
    """Write text into the lower right corner, and leave it and the legend above it their room."""
    legends = sum(each.get_window_extent().height for each in figure.legends) / figure.dpi
    bottom = (CORNER + legends) / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0.0, bottom, 1.0, 1.0 - bottom))
    figure.text(0.995, 0.004, text, ha="right", va="bottom", fontsize=SMALL - 1, color="0.4")
