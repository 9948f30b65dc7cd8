"""Where a run of WanVideoWrapper's sampler is. It tells the model its own step, and no schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from .step_schedule import EDGE, FEW_STEPS, StepPlan

WHOLE_START = 0.995  # chosen: a run whose first sigma lies below began later on the schedule
ASSUMED_SHIFT = 5.0  # the default of the wrapper's sampler; a part of a schedule does not tell its own
ROUNDING = 1e-9  # keeps 3 / 30 from lying below 0.1


@dataclass(frozen=True)
class Position:
    """What the wrapper tells one forward."""

    step: int
    share: float  # steps done / steps of this sampler node
    sigma: Callable[[], float]  # reads it from the device

    @classmethod
    def of(cls, forward_arguments) -> "Position":
        """From the keyword arguments of the model's forward."""
        step = int(forward_arguments.get("current_step", 0))
        share = float(forward_arguments.get("current_step_percentage", 0.0))
        timestep = forward_arguments.get("t")
        if timestep is None:  # then nothing says that it began late
            return cls(step, share, lambda: 1.0)
        # frames that are only looked at stand at 0
        return cls(step, share, lambda: float(timestep.max()) / 1000)


class WanVideoSchedule:
    """A sampler node's schedule: share p of the denoising is done at step p * n, so the window of NUMERICS.md
    is share < window. A node that starts late (denoise < 1, the second expert) places it by sigma instead."""

    def __init__(self, window: float = 0.25, start_percent: float = 0.0, end_percent: float = 1.0):
        self.window = window
        self.start = start_percent
        self.end = end_percent if end_percent < 1 else math.inf
        self.steps = 0  # known from the second step on
        self._whole: bool | None = None
        self._skipped = 0.0  # share of the denoising before the first step

    def groups_at(self, step: int) -> bool:
        """Whether the window may reach that far; nothing tells before the second step."""
        return not self._whole or self.steps <= 1 or step / self.steps < self.window - ROUNDING

    def plan(self, position: Position) -> StepPlan:
        """What the evaluation at this position does."""
        sigma = math.nan
        if self._whole is None:
            sigma = position.sigma()
            self._whole = sigma >= WHOLE_START
            self._skipped = 0.0 if self._whole else share_done(sigma)
        done = position.share
        if not self._whole:
            sigma = position.sigma()
            done = share_done(sigma)
        self.steps = round(position.step / position.share) if position.share else max(1, self.steps)
        active = self.start <= done + ROUNDING and done < self.end - ROUNDING
        grouping = active and done < self.window - ROUNDING
        middle = EDGE - ROUNDING <= done < 1 - EDGE - ROUNDING
        return StepPlan(position.step, sigma, active, grouping, middle and not self.few_steps)

    @property
    def few_steps(self) -> bool:
        """Whether no step may run at 4 bits, because there are few; true until their number is known."""
        return self.steps < FEW_STEPS * (1 - self._skipped) - 1e-6


def share_done(sigma: float, shift: float = ASSUMED_SHIFT) -> float:
    """Share of a whole schedule that lies before sigma, for flow sampling with a shift."""
    return 1 - sigma / (shift - (shift - 1) * sigma)
