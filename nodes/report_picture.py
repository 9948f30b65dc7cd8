"""Finished runs as one picture: which kernel ran in which step and block, where the time went, the errors."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .report_text import machine_line, note_lines, without_paths
from .run_record import GROUPING, USUAL
from .run_report import RunReport

WIDTH, MARGIN, LINE = 1080, 28, 22
GRID_HEIGHT = 260
BACKGROUND, INK, FAINT, EMPTY = (24, 26, 29), (232, 234, 237), (150, 155, 162), (44, 47, 52)
KERNEL_COLOURS = ((63, 166, 107), (75, 159, 213), (150, 120, 214), (64, 190, 190), (198, 120, 170))
LEFT_COLOUR, GROUPING_COLOUR, ERROR_COLOUR = (217, 146, 46), (250, 214, 120), (214, 92, 92)
BARS = 60  # most blocks that get a bar of their own


def font(size: int):
    return ImageFont.load_default(size)


class Sheet:
    """A page that grows downwards."""

    def __init__(self):
        self.image = Image.new("RGB", (WIDTH, 4000), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.y = MARGIN

    def text(self, text: str, size: int = 15, colour=INK, x: int = MARGIN) -> None:
        """A paragraph: goes on in the next line where the page ends."""
        for line in self.wrapped(text, size, WIDTH - MARGIN - x):
            self.draw.text((x, self.y), line, font=font(size), fill=colour)
            self.y += round(size * 1.5)

    def wrapped(self, text: str, size: int, width: int) -> list[str]:
        """The text in lines of at most width; what is longer than a line and has no spaces is cut."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".lstrip()
            if lines[-1] and self.length(longer, size) > width:
                lines.append(word)
            else:
                lines[-1] = longer
        return [self.cut(line, size, width) for line in lines]

    def cut(self, line: str, size: int, width: int) -> str:
        while line and self.length(line, size) > width:
            line = line[:-2] + "…"
        return line

    def length(self, text: str, size: int) -> float:
        return self.draw.textlength(text, font=font(size))

    def label(self, xy, text: str, colour=FAINT, size: int = 12, anchor: str = "la") -> None:
        self.draw.text(xy, text, font=font(size), fill=colour, anchor=anchor)

    def box(self, left, top, right, bottom, colour) -> None:
        left, top, right, bottom = (round(edge) for edge in (left, top, right, bottom))
        if right > left and bottom > top:
            self.draw.rectangle((left, top, right - 1, bottom - 1), fill=colour)

    def finish(self) -> Image.Image:
        return self.image.crop((0, 0, WIDTH, self.y + MARGIN // 2))


def colours_of(report: RunReport) -> dict[str, tuple[int, int, int]]:
    """A colour per kernel, most used first; everything else is the colour of what was left alone."""
    names = [name for name, _ in report.kernels.most_common()]
    return {name: KERNEL_COLOURS[i % len(KERNEL_COLOURS)] for i, name in enumerate(names)}


def draw_grid(sheet: Sheet, report: RunReport) -> None:
    """Steps from left to right, blocks from top to bottom."""
    cells = report.record.cells
    blocks = 1 + max((block for _, block in cells), default=0)
    steps = max(report.steps, 1 + max((step for step, _ in cells), default=0))
    colours = colours_of(report)
    left, top = MARGIN + 56, sheet.y + 34
    width, height = WIDTH - MARGIN - left, min(GRID_HEIGHT, 22 * blocks)
    # whole pixels, so that all gaps look alike
    column, row = (size if size < 3 else int(size) for size in (width / steps, height / blocks))
    gap = 1 if min(column, row) >= 4 else 0
    sheet.label((left, sheet.y), f"step 1 to {steps}; yellow: values grouped")
    sheet.label((MARGIN, top), "block 0")
    sheet.label((MARGIN, top + row * blocks), f"block {blocks - 1}", anchor="ld")
    for step in range(steps):
        x = left + step * column
        if step in report.grouped_steps:
            sheet.box(x, top - 10, x + column - gap, top - 4, GROUPING_COLOUR)
        for block in range(blocks):
            ran: Counter[str] = cells.get((step, block), Counter())
            colour = colours.get(ran.most_common(1)[0][0], LEFT_COLOUR) if ran else EMPTY
            y = top + block * row
            sheet.box(x, y, x + column - gap, y + row - gap, colour)
    sheet.y = round(top + row * blocks + 14)


def draw_legend(sheet: Sheet, report: RunReport) -> None:
    colours = colours_of(report)
    rows = [(name, calls, colours[name]) for name, calls in report.kernels.most_common()]
    rows += [(reason, calls, LEFT_COLOUR) for reason, calls in report.left.most_common() if calls]
    for name, calls, colour in rows:
        sheet.box(MARGIN + 56, sheet.y + 3, MARGIN + 70, sheet.y + 16, colour)
        sheet.text(f"{calls:,} calls  {name}", 13, x=MARGIN + 80)


def draw_times(sheet: Sheet, report: RunReport) -> None:
    """A bar as long as the sampling took: the attention in it by kernel, grouping marked inside the first."""
    record, colours = report.record, colours_of(report)
    parts = [(name, record.milliseconds.get(name, 0.0), colours[name]) for name in colours]
    parts.append((USUAL, record.milliseconds.get(USUAL, 0.0), LEFT_COLOUR))
    total = sum(milliseconds for _, milliseconds, _ in parts)
    if not total:
        return
    sheet.y += 8
    grouping = record.milliseconds.get(GROUPING, 0.0)
    share = f", {grouping / total:.0%} of it grouping" if grouping else ""
    sheet.text(f"video attention: {total / 1e3:.1f} s of {record.seconds:.1f} s sampling{share}", 14)
    x, scale = MARGIN + 56, (WIDTH - 2 * MARGIN - 56) / max(total, 1e3 * record.seconds)
    sheet.box(x, sheet.y, WIDTH - MARGIN, sheet.y + 16, EMPTY)  # all else that sampling did
    for name, milliseconds, colour in parts:
        sheet.box(x, sheet.y, x + milliseconds * scale, sheet.y + 16, colour)
        if name in colours and grouping:
            sheet.box(x, sheet.y + 12, x + min(grouping, milliseconds) * scale, sheet.y + 16, GROUPING_COLOUR)
            grouping = 0.0
        x += milliseconds * scale
    sheet.y += 28


def draw_errors(sheet: Sheet, report: RunReport) -> None:
    """A bar per block: the relative L2 error of one measured call."""
    errors = sorted(report.record.block_errors())
    if not errors:
        return
    worst = max(error for _, error in errors) or 1e-9
    at = max(errors, key=lambda item: item[1])[0]
    sheet.text(f"measured error of one call per block; worst: block {at}, {worst:.2%}", 14)
    left, height = MARGIN + 56, 70
    shown = errors[:: -(-len(errors) // BARS)]
    column = min(40.0, (WIDTH - MARGIN - left) / len(shown))
    sheet.label((MARGIN, sheet.y), f"{worst:.2%}")
    sheet.label((MARGIN, sheet.y + height), "0", anchor="ld")
    for place, (_, error) in enumerate(shown):
        x, bottom = left + place * column, sheet.y + height
        sheet.box(x, bottom - max(1, height * error / worst), x + column - 2, bottom, ERROR_COLOUR)
    sheet.y += height + 3
    sheet.label((left, sheet.y), f"block {shown[0][0]}")
    if len(shown) > 4:
        sheet.label((left + len(shown) * column - 2, sheet.y), f"block {shown[-1][0]}", anchor="ra")
    sheet.y += LINE


def draw_run(sheet: Sheet, report: RunReport) -> None:
    sheet.y += 10
    sheet.text(
        f"{report.model_name}: {report.taken:,} of {report.video_calls:,} video attention calls, "
        f"{report.steps} steps, up to {report.tokens:,} tokens",
        18,
    )
    warning = report.warning()
    if warning:
        sheet.text(without_paths(warning), colour=LEFT_COLOUR)
    if not report.record.cells:
        return
    draw_grid(sheet, report)
    draw_legend(sheet, report)
    draw_times(sheet, report)
    draw_errors(sheet, report)
    for line in note_lines(report):
        sheet.text(line, 13, FAINT)


def report_picture(reports: Sequence[RunReport], missing: Sequence[str] = ()) -> Image.Image:
    """All runs below each other, then why others are missing; the page is as long as they need."""
    sheet = Sheet()
    sheet.text(machine_line(), 13, FAINT)
    for report in reports:
        draw_run(sheet, report)
    for reason in missing:
        sheet.y += 10
        sheet.text(without_paths(reason), 18, LEFT_COLOUR)
    return sheet.finish()


def as_image_tensor(picture: Image.Image) -> torch.Tensor:
    """ComfyUI's IMAGE: float32 [1, H, W, 3] in 0..1."""
    return torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0)[None]
