"""A benchmark as a picture: a bar of time per attention function, with its error."""

from collections.abc import Sequence

from PIL import Image

from ..kernels.benchmark import Result, Shape
from .report_picture import FAINT, KERNEL_COLOURS, LEFT_COLOUR, MARGIN, WIDTH, Sheet
from .report_text import machine_line

OURS, OTHERS, GROUPED = KERNEL_COLOURS[0], KERNEL_COLOURS[1], (121, 205, 155)
NAME_WIDTH, BAR, TEXT_WIDTH = 300, 20, 330


def is_ours(result: Result) -> bool:
    return result.grouped_milliseconds > 0


def told(result: Result, base: float) -> str:
    speed = f", {base / result.milliseconds:.2f}x PyTorch" if base else ""
    grouped = f" (grouped {result.grouped_error:.2%})" if is_ours(result) else ""
    return f"{result.milliseconds:.2f} ms{speed}, error {result.error:.2%}{grouped}"


def draw_bar(sheet: Sheet, result: Result, base: float, scale: float) -> None:
    sheet.label((MARGIN, sheet.y + 3), result.name, size=13)
    left = MARGIN + NAME_WIDTH
    right = left + max(2, result.milliseconds * scale)
    sheet.box(left, sheet.y, right, sheet.y + BAR, OURS if is_ours(result) else OTHERS)
    if is_ours(result):
        sheet.box(left, sheet.y + BAR, left + result.grouped_milliseconds * scale, sheet.y + BAR + 5, GROUPED)
        right = max(right, left + result.grouped_milliseconds * scale)
    sheet.label((right + 8, sheet.y + 3), told(result, base), size=13)
    sheet.y += BAR + 14


def benchmark_picture(shape: Shape, results: Sequence[Result]) -> Image.Image:
    """Fastest first; what could not be measured is listed with its reason."""
    sheet = Sheet()
    sheet.text(machine_line(), 13, FAINT)
    sheet.text(f"{shape.name}: {shape.heads} heads of {shape.head_dim}, {shape.tokens:,} tokens", 18)
    sheet.text("whole call, quantization included; thin bar: inside the grouping window", 13, FAINT)
    sheet.y += 10
    measured = sorted((r for r in results if not r.refusal), key=lambda r: r.milliseconds)
    base = next((r.milliseconds for r in measured if r.name == "PyTorch"), 0.0)
    longest = max((max(r.milliseconds, r.grouped_milliseconds) for r in measured), default=1.0)
    scale = (WIDTH - 2 * MARGIN - NAME_WIDTH - TEXT_WIDTH) / longest
    for result in measured:
        draw_bar(sheet, result, base, scale)
    for result in results:
        if result.refusal:
            sheet.label((MARGIN, sheet.y), result.name, size=13)
            sheet.text(result.refusal, 13, LEFT_COLOUR, x=MARGIN + NAME_WIDTH)
    return sheet.finish()
