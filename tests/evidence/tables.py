"""Results as Markdown and JSON, with what they were measured on in the header."""

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from comfyui_vc_attention.kernels.benchmark import MEASURING_FAILS
from comfyui_vc_attention.kernels.validation import first_line

CHANGED = " and changes"  # after a commit: the checkout has more
RESULTS = Path(__file__).resolve().parent / "results"
# of kernels, of packages and of memory; anything else is our mistake and ends the stage
FAILURES = MEASURING_FAILS
PACKAGES = ("torch", "triton", "flash-attn-4", "sageattention", "sageattn3", "comfy-kitchen")


@dataclass
class Table:
    """question: what the table answers, a sentence. rows: cells as text or numbers, None for no value."""

    title: str
    question: str
    columns: list[str]
    rows: list[list] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.question, ""]
        lines += [f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        lines += [f"| {' | '.join(shown(cell) for cell in row)} |" for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def shown(cell) -> str:
    """A table cell: four significant digits of a float, thousands apart of an integer, - for None."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        if cell != 0 and abs(cell) < 1e-3:
            return f"{cell:.2e}"
        return f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.4g}"
    return str(cell)


@contextlib.contextmanager
def named_failure(table: Table, what: str):
    """A row, or some, of a table: where one fails, a note of the table says why, and the stage goes on."""
    try:
        yield
    except FAILURES as error:
        table.notes.append(f"{what}: failed, {first_line(error)}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def environment(commit: str | None = None) -> dict[str, str]:
    """Card, driver, versions and commit; commit: where the checkout has no git."""
    here = Path(__file__).parent

    def said(*command):
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=here)
        except FileNotFoundError:
            return "unknown"
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else "unknown"

    facts = {"card": f"CPU ({platform.machine()})", "python": platform.python_version()}
    if torch.cuda.is_available():
        facts["card"] = torch.cuda.get_device_name()
        facts["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["CUDA of torch"] = torch.version.cuda or "none"
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    changed = (
        said("git", "status", "--porcelain", "--", "../..", ":(exclude,top)tests/evidence/results")
        != "unknown"
    )
    facts["date"] = datetime.date.today().isoformat()
    facts["commit"] = commit or said("git", "rev-parse", "--short", "HEAD") + CHANGED * changed
    return facts


def folder_name(facts) -> str:
    """Name of the folder for one card's results."""
    card = facts["card"].lower().replace("nvidia", "").strip()
    return "cpu" if card.startswith("cpu") else "-".join(card.split())


def write(stage, tables, data, out: Path, facts, finished=False, earlier=None) -> Path:
    """Write <stage>.md and <stage>.json into out, each whole or not at all; returns the Markdown file.

    finished: False marks them as what a run that was cut short has left; then what only the run before it,
    earlier, had made stays in them.
    """
    out.mkdir(parents=True, exist_ok=True)
    if earlier and not finished:
        tables = with_earlier(tables, earlier)
    header = ", ".join(f"{name} {value}" for name, value in facts.items())
    text = f"# Evidence: {stage}\n\nMeasured on: {header}.\n\n"
    text += "" if finished else "**Not finished: rows and tables are missing.**\n\n"
    text += "\n".join(table.markdown() for table in tables)
    whole = {"measured_on": facts, "finished": finished, **data, "tables": [vars(t) for t in tables]}
    replace_text(out / f"{stage}.md", text)
    replace_text(out / f"{stage}.json", json.dumps(whole, indent=1) + "\n")
    return out / f"{stage}.md"


def unfinished(stage, out: Path, facts) -> dict | None:
    """What a run that was cut short left in out, as write() wrote it; None of another commit or machine."""
    path = out / f"{stage}.json"
    if not path.exists():
        return None
    earlier = json.loads(path.read_text(encoding="utf-8"))
    same = {**earlier["measured_on"], "date": None} == {**facts, "date": None}
    known = facts["commit"] != "unknown" and not facts["commit"].endswith(CHANGED)
    return earlier if same and known and not earlier["finished"] else None


def with_earlier(made: list[Table], earlier: dict) -> list[Table]:
    """made, and what earlier alone has of tables and rows; rows are told by their first cells."""
    tables = {table.title: replace(table, rows=list(table.rows)) for table in made}
    for before in earlier["tables"]:
        table = tables.setdefault(before["title"], Table(**{**before, "rows": []}))
        known = {label(row) for row in table.rows}
        table.rows += [row for row in before["rows"] if label(row) not in known]
    return list(tables.values())


def label(row: list) -> tuple:
    """The cells before the first measured one."""
    return tuple(itertools.takewhile(lambda cell: isinstance(cell, (str, int)), row))


def earlier_row(earlier, table, lead):
    """The row of table that begins so in the results of a run that was cut short, or None."""
    tables = earlier["tables"] if earlier else ()
    rows = next((each["rows"] for each in tables if each["title"] == table.title), ())
    return next((row for row in rows if row[: len(lead)] == list(lead)), None)


def rows_of(data: dict, title: str) -> list[dict]:
    """Rows of a stage's first table whose title starts so, by column; empty if there is none."""
    for entry in data["tables"]:
        if entry["title"].startswith(title):
            return [dict(zip(entry["columns"], row, strict=True)) for row in entry["rows"]]
    return []


def replace_text(path: Path, text: str) -> None:
    """Write beside the file and rename: who is stopped in between leaves the file that was there."""
    beside = path.with_suffix(path.suffix + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
