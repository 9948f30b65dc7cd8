"""The report of finished runs as text: for people, for bug reports, without paths and user names."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from ..kernels import KERNELS
from ..kernels.device_record import record_of
from ..kernels.registry import EXPERIMENTAL_CARDS
from .pack_version import pack_version
from .run_record import GROUPING, USUAL
from .run_report import RunReport

WORST_BLOCKS = 5
MOST_SPANS = 12  # of steps or blocks that something else ran in; chosen, a line that can still be read

# everything of a path up to its last separator; Windows folder names may hold spaces
WINDOWS_PATH = r"[A-Za-z]:[\\/][^\"'\n|<>*?]*[\\/]"
POSIX_PATH = r"(?<![\w.:/])~?/(?:[^\s\"'/]+/)+"


def without_paths(text: str) -> str:
    """The text with every path cut down to its last part. Module names of ComfyUI packs are paths, too."""
    text = text.replace(str(Path.home()), "~")
    return re.sub(POSIX_PATH, "", re.sub(WINDOWS_PATH, "", text))


def comfyui_version() -> str:
    try:
        from comfyui_version import __version__
    except ImportError:
        return "unknown"
    return __version__


def machine_line() -> str:
    """Pack, card, PyTorch and ComfyUI, on one line."""
    card = "no NVIDIA GPU"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        card = f"{torch.cuda.get_device_name()} sm_{major}{minor}"
    versions = f"torch {torch.__version__}, ComfyUI {comfyui_version()}"
    return f"VC-Attention {pack_version()}: {card}, {versions}"


def record_lines() -> list[str]:
    """What the self-tests on this card found: why auto takes the kernel it takes."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return []
    capability = torch.cuda.get_device_capability()
    entries = record_of(torch.cuda.get_device_name(), capability).entries(spec.name for spec in KERNELS)
    if capability in EXPERIMENTAL_CARDS and not entries:
        return ["  experimental: the kernels are compiled for such cards, and were never tested on this one"]
    return [f"  {name}: {entry.summary}" for name, entry in entries.items()]


def settings_line(report: RunReport) -> str:
    """The node's choices, those first that change numbers."""
    settings = report.settings
    if settings is None:
        return "unknown"
    asked, precision = settings.precision, settings.config.precision
    choices = {
        "precision": precision if asked in ("", precision) else f"{asked} ({precision})",
        "expcast": settings.config.expcast,
        "value_format": settings.config.value_format,
        "kernel": settings.kernel,
        "grouping_window": f"{settings.grouping_window:g}",
        "regroup_every": settings.regroup_every,
        "clusters": settings.config.clusters,
        "percent": f"{settings.start_percent:g}..{settings.end_percent:g}",
        "exact_blocks": ",".join(map(str, sorted(settings.exact_blocks))) or "none",
        "min_tokens": settings.shortest,
    }
    return ", ".join(f"{name} {value}" for name, value in choices.items())


def call_rows(report: RunReport) -> list[tuple[str, str, str]]:
    """(what, calls, time) for each kernel, then for what was left to the usual attention."""
    record = report.record

    def duration(what):
        calls, total = record.timed_calls[what], record.milliseconds.get(what, 0.0)
        return f"{total / 1e3:.2f} s, {total / calls:.2f} ms each" if calls else ""

    rows = [(name, f"{calls:,}", duration(name)) for name, calls in report.kernels.most_common()]
    if record.timed_calls[GROUPING]:
        rows.append(("  of it, grouping", f"{record.timed_calls[GROUPING]:,}", duration(GROUPING)))
    if record.timed_calls[USUAL]:
        rows.append((f"{USUAL} of the video", f"{record.timed_calls[USUAL]:,}", duration(USUAL)))
    rows += [(f"left alone: {reason}", f"{calls:,}", "") for reason, calls in report.declined.most_common()]
    return rows


def head_line(report: RunReport) -> str:
    """The model, its clip, and the share of the attention that was taken."""
    share = f"{report.taken:,} of {report.video_calls:,} video attention calls taken"
    return f"{report.model_name}, {report.steps} steps, up to {report.tokens:,} tokens: {share}"


def spans(report: RunReport, axis: int) -> str:
    """What ran in each step (axis 0) or block (1): "1-5 kernel, grouped; 6-20 kernel". Steps count from 1."""
    ran: dict[int, Counter[str]] = {}
    for cell, counts in report.record.cells.items():
        ran.setdefault(cell[axis], Counter()).update(counts)
    parts: list[tuple[int, int, str]] = []
    for place in sorted(ran):
        what = " and ".join(name for name, _ in ran[place].most_common())
        if axis == 0 and place in report.grouped_steps:
            what += ", grouped"
        if parts and parts[-1][1:] == (place - 1, what):
            parts[-1] = (parts[-1][0], place, what)
        else:
            parts.append((place, place, what))
    first = 1 - axis
    told = [
        (f"{begin + first}" if begin == end else f"{begin + first}-{end + first}") + f" {what}"
        for begin, end, what in parts[:MOST_SPANS]
    ]
    return "; ".join(told + (["..."] if len(parts) > MOST_SPANS else []))


def note_lines(report: RunReport) -> list[str]:
    """What else was measured in a run, and its settings."""
    lines = []
    precisions = report.precisions()
    if precisions:
        lines.append(precisions)
    if report.grouped_steps:
        lines.append(
            f"values grouped in {len(report.grouped_steps)} of {report.steps} steps, order made "
            f"{report.groupings_made:,} times, {report.state_bytes / 2**20:.1f} MiB at most"
        )
    energy = report.record.mean_energy()
    if energy:
        lines.append(
            f"tile means removed {energy[1]:.0%} of the value energy, {energy[0]:.0%} in token order"
        )
    errors = report.record.block_errors()
    if errors:
        worst = ", ".join(f"{block} ({error:.2%})" for block, error in errors[:WORST_BLOCKS])
        mean = sum(error for _, error in errors) / len(errors)
        lines.append(f"measured error of a call: {mean:.2%} on average over blocks; worst blocks {worst}")
    if report.record.seconds:
        lines.append(f"sampling took {report.record.seconds:.1f} s")
    if report.record.peak_bytes:
        lines.append(f"PyTorch held {report.record.peak_bytes / 2**30:.2f} GiB at most since it started")
    return [*lines, f"settings: {settings_line(report)}"]


def run_lines(report: RunReport) -> list[str]:
    """One run, without its machine."""
    warning = report.warning()
    rows = call_rows(report)
    width = max((len(row[0]) for row in rows), default=0)
    calls_width = max((len(row[1]) for row in rows), default=0)
    return [
        head_line(report),
        *([f"! {warning}"] if warning else ()),
        *(f"  {what:<{width}}  {calls:>{calls_width}}  {time}".rstrip() for what, calls, time in rows),
        *([f"  steps: {spans(report, 0)}", f"  blocks: {spans(report, 1)}"] if report.record.cells else ()),
        *(f"  {line}" for line in note_lines(report)),
    ]


def report_text(reports: Sequence[RunReport]) -> str:
    """What the copy button and the report node give."""
    lines = [machine_line(), *record_lines()]
    for report in reports:
        lines += run_lines(report)
    return without_paths("\n".join(lines))
