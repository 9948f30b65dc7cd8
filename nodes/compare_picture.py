"""Two clips side by side with a map of their difference."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from .report_picture import EMPTY, FAINT, INK, KERNEL_COLOURS, LEFT_COLOUR, MARGIN, WIDTH, Sheet, font
from .report_text import call_rows, head_line, note_lines, without_paths
from .run_report import RunReport

GAP, TITLE = 12, 15
FULL_SCALES = (
    0.002,
    0.01,
    0.05,
    0.25,
)  # a difference of this much of the range is white; the first that fits


def full_scale(difference: torch.Tensor) -> float:
    """The finest scale that all but a thousandth of the pixels stay inside."""
    high = float(difference.flatten().kthvalue(max(1, round(0.999 * difference.numel()))).values)
    return next((scale for scale in FULL_SCALES if scale >= high), FULL_SCALES[-1])


def heat(difference: torch.Tensor, white: float) -> Image.Image:
    """Difference [H, W] in 0..1 -> black, red, yellow, white."""
    level = (difference / white).clamp(0, 1) * 3
    channels = torch.stack([level.clamp(0, 1), (level - 1).clamp(0, 1), (level - 2).clamp(0, 1)], -1)
    return as_picture(channels)


def as_picture(pixels: torch.Tensor) -> Image.Image:
    """[H, W, 3] in 0..1 -> picture."""
    return Image.fromarray((pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy())


def viewable(frame: torch.Tensor) -> torch.Tensor:
    """A frame [C, H, W] as [H, W, 3]: of latents, the first three channels."""
    frame = frame if frame.shape[0] >= 3 else frame[:1].expand(3, -1, -1)
    return frame[:3].movedim(0, -1).float()


def draw_frames(sheet: Sheet, a: torch.Tensor, b: torch.Tensor, titles: Sequence[str], frame: int) -> None:
    """a, b [N, C, H, W]: one frame of each, and the largest difference over channels."""
    width = (WIDTH - 2 * MARGIN - 2 * GAP) // 3
    height = round(width * a.shape[2] / a.shape[3])
    difference = (a[frame].float() - b[frame].float()).abs().amax(0)
    white = full_scale(difference)
    pictures = [as_picture(viewable(a[frame])), as_picture(viewable(b[frame])), heat(difference, white)]
    titles = [*titles, f"difference, white from {white:.1%}"]
    for place, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        left = MARGIN + place * (width + GAP)
        sheet.label((left, sheet.y), title, size=13)
        enlarge = Image.Resampling.NEAREST if picture.width < width else Image.Resampling.LANCZOS
        sheet.image.paste(picture.resize((width, height), enlarge), (left, sheet.y + TITLE + 5))
    sheet.y += height + TITLE + 14


def draw_curve(sheet: Sheet, values: Sequence[float], name: str, chosen: int) -> None:
    """A mark per frame between two labelled tens of dB; that of the frame shown above is green."""
    finite = [value for value in values if np.isfinite(value)]
    if len(finite) < 2:
        return
    sheet.y += 8
    low, high, height = 10 * np.floor(min(finite) / 10), 10 * np.floor(max(finite) / 10) + 10, 60
    sheet.label(
        (MARGIN, sheet.y),
        f"{name} per frame, {min(finite):.2f} to {max(finite):.2f} dB; green: the frame above",
    )
    left, top = MARGIN + 56, sheet.y + 24
    for level, y in ((high, top), (low, top + height)):
        sheet.label((MARGIN, y), f"{level:.0f} dB", anchor="lm")
        sheet.box(left, y, WIDTH - MARGIN, y + 1, EMPTY)
    column = (WIDTH - MARGIN - left) / len(values)
    for place, value in enumerate(values):
        y = top + height * (high - min(value, high)) / (high - low)
        x = left + place * column
        colour = KERNEL_COLOURS[1] if place != chosen else KERNEL_COLOURS[0]
        sheet.box(x, y - 2, x + max(1, column - 1), y + 2, colour)
    sheet.y = top + height + 14


def draw_facts(sheet: Sheet, name: str, report: RunReport) -> None:
    """One model's run, smaller than in its own report."""
    sheet.y += 6
    sheet.text(without_paths(f"{name}: {head_line(report)}"), 14)
    if report.warning():
        sheet.text(without_paths(report.warning()), 14, LEFT_COLOUR)
    for what, calls, duration in call_rows(report):
        top = sheet.y
        sheet.draw.text((MARGIN + 420, top), calls, font=font(13), fill=FAINT, anchor="ra")
        sheet.draw.text((MARGIN + 450, top), duration, font=font(13), fill=FAINT)
        sheet.text(sheet.cut(what, 13, 360), 13, FAINT, x=MARGIN + 14)
    for line in note_lines(report):
        sheet.text(line, 13, FAINT, x=MARGIN + 14)


def compare_picture(
    a, b, titles, lines: Sequence[str], psnrs: Sequence[float], frame: int, runs=(), warning: str = ""
) -> Image.Image:
    """a, b [N, C, H, W] in 0..1; titles of the two; lines of text; PSNR of every frame; the frame to show.

    runs: (name, report) of the models that made them. warning: what to see first.
    """
    sheet = Sheet()
    draw_frames(sheet, a, b, titles, frame)
    if warning:
        sheet.text(without_paths(warning), 17, LEFT_COLOUR)
    for number, line in enumerate(lines):
        big = number == 0 and not warning
        sheet.text(line, 17 if big else 13, INK if big else FAINT)
    draw_curve(sheet, psnrs, "PSNR", frame)
    for name, report in runs:
        draw_facts(sheet, name, report)
    return sheet.finish()
