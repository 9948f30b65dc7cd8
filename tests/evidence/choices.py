"""Tool "choices": what the code does by default, the numbers that decided it, and whether they still do.

The modules decisions*.py have the entries. Every number is looked up in the committed tables by
stage, table, row and column; an unknown row is an error.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .bounds import TABLES
from .tables import replace_text, shown

STAGES = ("fidelity", "clips", "length", "speed")
# Tables of this commit lack rows that the stages make since then: such a number is shown as missing, and what
# depends on it as not measured yet. Goes, with NotMeasured and WAITS, once the tables are made again.
PENDING = "d21b26b"
HOLDS, FAILS, WAITS = "holds", "**no longer holds**", "not measured yet"
PSNR = "PSNR, dB"
EQUAL = 5e-4  # relative: less is called equal


HEADER = """\
{}; commits of the tables: {}. Made by `python tests/evidence choices` from the tables beside;
`test_choices.py` holds this page to them, every check to its numbers and every default to the code
(`DENSE_...` are the recipes as parameters, which `test_dense.py` holds to the pack's reference). Errors are
relative L2 against exact attention: lower is better; listed differences are in percent of the second. Of
clips a higher PSNR and SSIM is better, a lower GMSD; standard error: of the mean PSNR. Tensors and methods:
`tests/evidence/README.md`; sections named by letter and number, as C3 or I1: `kernels/NUMERICS.md`."""


class NotMeasured(LookupError):
    """A number that the tables of commit PENDING do not have."""


@dataclass(frozen=True)
class Grid:
    """Part of one table. title: what the table's title begins with.

    rows: {short name: (label for the reader, {column: cell} that only this row has)}.
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
    whose PSNR is compared. Only paper and quotes may have numbers of their own.
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


def lookup(folder: Path, stage: str, title: str, where: dict, column: str):
    """The cell of the one row of the one table that fits; LookupError if there is none or more than one."""
    whole = results(folder, stage)
    found = [table for table in whole["tables"] if table["title"].startswith(title)]
    if not found and whole["measured_on"]["commit"] == PENDING:
        return None
    if len(found) != 1:
        raise LookupError(f"{stage} must have one table {title!r}, got {len(found)}")
    rows = [dict(zip(found[0]["columns"], row, strict=True)) for row in found[0]["rows"]]
    rows = [row for row in rows if all(row.get(key) == cell for key, cell in where.items())]
    if len(rows) == 1 and column in rows[0]:
        return rows[0][column]
    if whole["measured_on"]["commit"] == PENDING and len(rows) < 2:
        return None
    raise LookupError(
        f"{stage}, {title}: must have one row {where} and column {column!r}, got {len(rows)} rows"
    )


class Numbers:
    """Of one choice: numbers[row, heading]. NotMeasured for a number that is not there."""

    def __init__(self, choice: Choice, folder: Path):
        self.cells, self.labels, self.headings = {}, {}, {}
        for grid in choice.grids:
            for name, (label, where) in grid.rows.items():
                if name in self.labels:
                    raise ValueError(f"{choice.name}: row names must differ, got {name} twice")
                self.labels[name], self.headings[name] = label, list(grid.columns)
                for heading, column in grid.columns.items():
                    self.cells[name, heading] = lookup(folder, grid.stage, grid.title, where, column)

    def __getitem__(self, place):
        cell = self.cells[place]
        if cell is None:
            raise NotMeasured(f"{self.labels[place[0]]}, {place[1]}")
        return cell

    def less(self, name, other, *headings, factor=1.0):
        """Whether row name is under factor times row other: in those columns, or in all that both have."""
        columns = headings or [each for each in self.headings[name] if self.cells[name, each] is not None]
        return all(self[name, each] < factor * self[other, each] for each in columns)

    def above(self, name, other, errors=2.0):
        """Whether clips of row name are nearer to exact ones by so many standard errors of the difference."""
        return self[name, PSNR] - self[other, PSNR] > errors * self.spread(name, other)

    def spread(self, name, other):
        """Standard error of the difference of two means, as if their clips were not of the same seeds."""
        return (self[name, "standard error"] ** 2 + self[other, "standard error"] ** 2) ** 0.5

    def gains(self, name, errors=3.0):
        """Whether a schedule is nearer than the shipped one on the same clips, by so many standard errors."""
        return self[name, "over first quarter, dB"] > errors * self[name, "its error"]

    def loses(self, name, errors=2.0):
        return self[name, "over first quarter, dB"] < -errors * self[name, "its error"]


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
    for name, (label, _) in grid.rows.items():
        cells = [shown(numbers.cells[name, heading]) for heading in grid.columns]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return [*lines, ""]


def nearer(numbers: Numbers, name: str, other: str) -> str:
    """Whose clips are nearer to exact ones, and how sure that is."""
    labels = f"Clips of {numbers.labels[name]}, against {numbers.labels[other]}"
    try:
        gain, spread = numbers[name, PSNR] - numbers[other, PSNR], numbers.spread(name, other)
        return f"{labels}: {gain:+.1f} dB of PSNR, {abs(gain) / spread:.1f} standard errors."
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
    points += [nearer(numbers, *pair) for pair in choice.nearer]
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
    if any(each["commit"] == PENDING for _, each in facts):
        lines += [f"At {PENDING} `int8_int8` had no means after the window; its clips are of that.", ""]
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
    replace_text(folder / "choices.md", page(folder, all_choices()))
    print(folder / "choices.md")
