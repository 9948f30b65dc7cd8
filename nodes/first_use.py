"""Before a kernel first runs on a card it is built, tested and timed there, unless install.py did that.

When a patch node executes, so before sampling: never in an attention call, never inside a recorded graph.
"""

from dataclasses import replace

import torch

from ..kernels import AttentionProblem, Choice, choose_kernel
from ..kernels.device_record import known
from ..kernels.validation import UNTESTED, steps, validate
from .patch_settings import PatchSettings
from .run_report import say


def choose_tested(problem: AttentionProblem, device: torch.device, settings: PatchSettings) -> Choice:
    """choose_kernel for the settings, after what it would take was tried on the card of device.

    Takes seconds the first time, with ComfyUI's progress bar. Raises what ComfyUI raises when the user
    cancels, and ContextLost.
    """
    while True:
        choice = choose_kernel(problem, settings.kernel, untested=True)
        if choice.kernel is None or not problem.device_name or known(problem, choice.kernel.name):
            return choice
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return choose_kernel(problem, settings.kernel)
        kernel = choice.kernel
        say(f"{kernel.name} runs on this card for the first time: testing it", settings.node_id)
        entry = validate(kernel, device, progress(steps()), waiting=stop_if_cancelled)
        if entry.state == UNTESTED:
            if settings.kernel != "auto":
                return choice
            return Choice(None, f"{kernel.name}: {entry.reason}")
        verdict = f"works, from {entry.min_tokens:,} tokens on faster" if entry.min_tokens else "works"
        say(f"{kernel.name}: {entry.why_not_auto or verdict}", settings.node_id)


def with_measured_tokens(settings: PatchSettings, problem: AttentionProblem, choice: Choice) -> PatchSettings:
    """The settings with what the card's record says about short calls."""
    entry = known(problem, choice.kernel.name)
    return replace(settings, measured_tokens=entry.min_tokens or 0) if entry else settings


def stop_if_cancelled() -> None:
    """Raises what ComfyUI raises when the user cancels."""
    from comfy.model_management import throw_exception_if_processing_interrupted

    throw_exception_if_processing_interrupted()


def progress(total: int):
    """A function to call after each of total steps: moves ComfyUI's bar, and stops where the user cancels."""
    from comfy.utils import ProgressBar

    bar = ProgressBar(total)

    def advance():
        bar.update(1)
        stop_if_cancelled()

    return advance
