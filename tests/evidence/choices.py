"""Tool "choices": what the code does by default, the numbers that decided it, and whether they still do.

The modules decisions*.py have the entries. Every number is looked up in the committed tables by
stage, table, row and column; an unknown row is an error.
"""

import collections
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .bounds import TABLES
from .clips import gain
from .tables import replace_text, rows_of, shown

STAGES = ("fidelity", "clips", "length", "speed")
HOLDS, FAILS, WAITS = "holds", "**no longer holds**", "not measured yet"
EQUAL = 5e-4  # relative: less is called equal
# What another draw of the tensors may change in the ratio of two rows: see HEADER.
SURE = {"N(0, 1)": 1.02, "captured": 1.02}
DRAW = 1.1


HEADER = """\
{}; commits of the tables: {}. Made by `python tests/evidence choices` from the tables beside;
`test_choices.py` holds this page to them, every check to its numbers and every default to the code
(`DENSE_...` are the recipes as parameters, which `test_dense.py` holds to the pack's reference). Errors are
relative L2 against exact attention: lower is better; listed differences are in percent of the second. Of
clips a higher PSNR and SSIM is better, a lower GMSD; two rows are compared on the clips that both have (the
means beside each other may be of 32 and of 128), and the standard error is that of the mean difference.
Tensors and methods: `tests/evidence/README.md`; sections named by letter and number, as C3 or I1:
`kernels/NUMERICS.md`.

**What a difference means.** Made tensors are one draw of two heads. On another one (fidelity of d21b26b)
errors moved by a tenth on average, on outlier channels of K by a fifth, at most by two thirds. The ratio of
a recipe's two ways moved less: half of the ratios by a twentieth at most, nine of ten by a fifth, and by a
tenth without ExpCast and outlier channels. Some changed sides: with ExpCast grouping lost on structured
tensors there and wins here. So "surely" means here: by over a tenth on made tensors, by over two percent on
N(0, 1), where no ratio moved by more, and on captured ones, which are always the same. A check asks for what
decided, and that nothing else is surely lost unless it says so."""


class NotMeasured(LookupError):
    """A number that unfinished tables do not have yet."""


@dataclass(frozen=True)
class Grid:
    """Part of one table. title: what the table's title begins with.

    rows: {short name: (label for the reader or "", {column: cell} that only this row has)}.
    columns: {heading: column}.
    """

    stage: str
    title: str
    rows: dict[str, tuple[str, dict]]
    columns: dict[str, str]


@dataclass(frozen=True)
class Default:
    """name: as in the code. value: what it must be. read: takes it from the code."""

    name: str
    value: object
    read: Callable


@dataclass(frozen=True)
class Quote:
    """A line of another file's measurements. text: exactly as it stands there."""

    label: str
    place: str  # relative to the pack's root
    text: str


@dataclass(frozen=True)
class Choice:
    """One decision.

    claim: what holds() checks, in words. paper: what the paper says or does. compare: pairs of rows whose
    differences are listed, lower better, so that nothing lost is left out. nearer: pairs of rows of clips,
    whose PSNR is compared clip by clip. Only paper and quotes may have numbers of their own.
    """

    name: str
    defaults: tuple[Default, ...]
    question: str
    grids: tuple[Grid, ...]
    decided: str
    claim: str
    holds: Callable
    paper: str = ""
    compare: tuple[tuple[str, str], ...] = ()
    nearer: tuple[tuple[str, str], ...] = ()
    quotes: tuple[Quote, ...] = field(default=())


@functools.cache
def results(folder: Path, stage: str) -> dict:
    return json.loads((folder / f"{stage}.json").read_text(encoding="utf-8"))


def lookup(folder: Path, stage: str, title: str, where: dict) -> dict | None:
    """The one row that fits, by column; None where it was not measured: a package, or a run cut short.

    Raises LookupError where more than one fits.
    """
    rows = rows_of(results(folder, stage), title)
    rows = [row for row in rows if all(row.get(key) == cell for key, cell in where.items())]
    if len(rows) > 1:
        raise LookupError(f"{stage}, {title}: must have one row {where}, got {len(rows)}")
    return rows[0] if rows else None


class Numbers:
    """Of one choice: numbers[row, heading]. NotMeasured for a number that is not there.

    each: {row: PSNR of each of its clips}. missing: names of rows that the tables do not have.
    """

    def __init__(self, choice: Choice, folder: Path):
        self.cells, self.labels, self.headings, self.each, self.missing = {}, {}, {}, {}, []
        for grid in choice.grids:
            for name, (label, where) in grid.rows.items():
                if name in self.labels:
                    raise ValueError(f"{choice.name}: row names must differ, got {name} twice")
                row = lookup(folder, grid.stage, grid.title, where)
                self.missing += [name] * (row is None)
                ours = row is None or row.get("source") != "recipe"
                self.labels[name] = label or where["method"] + ("" if ours else ", our reference")
                self.headings[name] = list(grid.columns)
                for heading, column in grid.columns.items():
                    self.cells[name, heading] = None if row is None else row[column]
                if grid.stage == "clips" and row is not None:
                    key = ", ".join(list(row.values())[: list(row).index("clips")])
                    self.each[name] = results(folder, "clips")["PSNR of each clip"][key]

    def __getitem__(self, place):
        cell = self.cells[place]
        if cell is None:
            raise NotMeasured(f"{self.labels[place[0]]}, {place[1]}")
        return cell

    def less(self, name, other, *headings, factor=1.0):
        """Whether row name is under factor times row other: in those columns, or in all that both have."""
        columns = headings or [each for each in self.headings[name] if self.cells[name, each] is not None]
        if not columns:
            raise NotMeasured(self.labels[name])
        return all(self[name, each] < factor * self[other, each] for each in columns)

    def keeps(self, name, other, *headings):
        """Whether row name has nowhere surely more error than row other: in those columns, or in all."""
        return all(
            self.less(name, other, each, factor=SURE.get(each, DRAW))
            for each in headings or self.headings[name]
        )

    def gain(self, name, other):
        """(mean difference of PSNR, its standard error, number of clips) on the clips that both rows have."""
        for row in (name, other):
            if row not in self.each:
                raise NotMeasured(self.labels[row])
        count = min(len(self.each[name]), len(self.each[other]))
        return (*gain(self.each[name][:count], self.each[other]), count)

    def nearer(self, name, other, errors=2.0):
        """Whether clips of row name are nearer to exact ones by so many standard errors."""
        mean, error, _ = self.gain(name, other)
        return mean > errors * error


def compared(numbers: Numbers, name: str, other: str) -> str:
    """Where row name has less and where it has more than row other, with the differences in percent."""
    less, same, more = [], [], []
    for heading in numbers.headings[name]:
        if numbers.cells[name, heading] is None or numbers.cells[other, heading] is None:
            continue
        change = numbers[name, heading] / numbers[other, heading] - 1
        kind = same if abs(change) < EQUAL else more if change > 0 else less
        kind.append(heading if kind is same else f"{heading} ({change:+.1%})")
    parts = [f"{word} on {', '.join(each)}" for word, each in (("less", less), ("more", more)) if each]
    parts += [f"equal on {', '.join(same)}"] if same else []
    return f"{numbers.labels[name]}, against {numbers.labels[other]}: {'; '.join(parts) or WAITS}."


def state(choice: Choice, numbers: Numbers) -> str:
    try:
        return HOLDS if choice.holds(numbers) else FAILS
    except NotMeasured:
        return WAITS


def grid_lines(grid: Grid, numbers: Numbers) -> list[str]:
    lines = [f"| {grid.stage}, {grid.title} | {' | '.join(grid.columns)} |"]
    lines.append(f"|---|{'---|' * len(grid.columns)}")
    for name in grid.rows:
        cells = [shown(numbers.cells[name, heading]) for heading in grid.columns]
        lines.append(f"| {numbers.labels[name]} | {' | '.join(cells)} |")
    return [*lines, ""]


def paired(numbers: Numbers, name: str, other: str) -> str:
    """Whose clips are nearer to exact ones, and how sure that is."""
    labels = f"Clips of {numbers.labels[name]}, against {numbers.labels[other]}"
    try:
        mean, error, count = numbers.gain(name, other)
        return f"{labels}: {mean:+.2f} dB of PSNR on {count}, {abs(mean) / error:.1f} standard errors."
    except NotMeasured:
        return f"{labels}: {WAITS}."


def named(choice: Choice) -> str:
    """The defaults as name: value."""
    values = [
        ", ".join(map(str, each.value)) if isinstance(each.value, tuple) else str(each.value)
        for each in choice.defaults
    ]
    return "; ".join(f"`{each.name}`: {value}" for each, value in zip(choice.defaults, values, strict=True))


def section(number: int, choice: Choice, numbers: Numbers) -> list[str]:
    lines = [f"## {number}. {choice.name}", "", choice.question, "", f"Default: {named(choice)}.", ""]
    for grid in choice.grids:
        lines += grid_lines(grid, numbers)
    points = [compared(numbers, *pair) for pair in choice.compare]
    points += [paired(numbers, *pair) for pair in choice.nearer]
    for quote in choice.quotes:
        text = quote.text.strip("| ").replace(" | ", "; ")
        points.append(f"{quote.label} (`{quote.place}`): {text}")
    lines += [*(f"- {point}" for point in points), ""] if points else []
    lines += [f"**Decided.** {choice.decided}", ""]
    lines += [f"**The paper.** {choice.paper}", ""] if choice.paper else []
    return [*lines, f"**Checked:** {choice.claim}: {state(choice, numbers)}.", ""]


def page(folder: Path, choices) -> str:
    """choices.md of a folder of tables."""
    facts = [(stage, results(folder, stage)["measured_on"]) for stage in STAGES]
    commits = ", ".join(f"{stage} {each['commit']}" for stage, each in facts)
    lines = ["# Choices, and the numbers behind them", "", HEADER.format(facts[0][1]["card"], commits), ""]
    lines += ["| choice | default | the check |", "|---|---|---|"]
    sections = []
    for number, choice in enumerate(choices, 1):
        numbers = Numbers(choice, folder)
        lines.append(f"| {number}. {choice.name} | {named(choice)} | {state(choice, numbers)} |")
        sections += section(number, choice, numbers)
    return "\n".join([*lines, "", *sections]).rstrip() + "\n"


def all_choices() -> tuple[Choice, ...]:
    from . import decisions, decisions_formats, decisions_grouping, decisions_schedule, decisions_values

    modules = decisions, decisions_grouping, decisions_schedule, decisions_formats, decisions_values
    return tuple(choice for module in modules for choice in module.CHOICES)


def run(device, out=None, weights=None):
    """Write choices.md beside the tables: of out, where it has those of every stage, else of results/h200."""
    whole = out is not None and all((out / f"{stage}.json").exists() for stage in STAGES)
    folder = out if whole else TABLES
    choices = all_choices()
    replace_text(folder / "choices.md", page(folder, choices))
    states = collections.Counter(state(choice, Numbers(choice, folder)) for choice in choices)
    print(f"{folder / 'choices.md'}: {', '.join(f'{count} {each}' for each, count in states.items())}")
