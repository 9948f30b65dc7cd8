"""From a sigma to a denoising step, and to what that step does: group values, or run plain, or stay exact.

Plain numbers only; sigmas are read to the host by whoever calls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOLERANCE = 1e-4  # relative; SDE samplers nudge the first sigma by 1.25e-5, others round by 6e-8
WHOLE_START = 1e-3  # a schedule is whole if it starts this close to the model's first sigma
WHOLE_END = 1e-3  # and ends here at most; uni_pc replaces the final 0 by 0.001


@dataclass(frozen=True)
class StepPlan:
    """What one model evaluation does."""

    step: int  # index into this sampler call's schedule
    sigma: float
    active: bool  # inside start_percent..end_percent; outside, attention stays exact
    grouping: bool  # inside the grouping window: values are grouped and demeaned


def window_threshold(
    sigmas: Sequence[float], percent_to_sigma: Callable[[float], float], window: float
) -> float:
    """The sigma above which values are grouped, for a window that is a share 0..1 of the denoising.

    On a whole schedule of n steps it is sigmas[ceil(window * n)], so 0.25 means 10 of 40 steps, 2 of 8 and
    1 of 4, as in the paper. A part of a schedule (denoise < 1, a range of steps, one of two experts) cannot
    know n: there the model's own sampling places the window on the whole denoising.
    """
    if window <= 0:
        return math.inf
    whole = sigmas[0] >= float(percent_to_sigma(0.0)) - WHOLE_START and sigmas[-1] <= WHOLE_END
    if whole:
        steps = len(sigmas) - 1
        # the small shift keeps 0.1 * 30 from becoming step 4 through rounding
        return sigmas[min(steps, math.ceil(window * steps - 1e-9))]
    return float(percent_to_sigma(window))


class StepSchedule:
    """One sampler call's schedule."""

    def __init__(
        self,
        sigmas: Sequence[float],
        percent_to_sigma: Callable[[float], float],
        window: float = 0.25,
        start_percent: float = 0.0,
        end_percent: float = 1.0,
    ):
        self.sigmas = tuple(float(sigma) for sigma in sigmas)
        if not self.sigmas:
            raise ValueError("a schedule needs at least one sigma, got none")
        self.threshold = window_threshold(self.sigmas, percent_to_sigma, window)
        self._start = math.inf if start_percent <= 0 else float(percent_to_sigma(start_percent))
        self._end = -math.inf if end_percent >= 1 else float(percent_to_sigma(end_percent))

    @property
    def steps(self) -> int:
        return max(1, len(self.sigmas) - 1)

    def step_of(self, sigma: float) -> int:
        """Step i covers sigmas[i] >= sigma > sigmas[i + 1], whichever evaluation of it this is."""
        reached = sum(1 for boundary in self.sigmas if boundary * (1 + TOLERANCE) >= sigma)
        return min(max(reached - 1, 0), self.steps - 1)

    def plan(self, sigma: float) -> StepPlan:
        """What the evaluation at this sigma does."""
        active = sigma <= self._start * (1 + TOLERANCE) and above(sigma, self._end)
        return StepPlan(self.step_of(sigma), sigma, active, active and above(sigma, self.threshold))


def above(sigma: float, threshold: float) -> bool:
    """Strictly greater, by more than rounding."""
    return sigma > threshold + abs(threshold) * TOLERANCE if math.isfinite(threshold) else sigma > threshold


def regroup_due(grouped_at: int, step: int, every: int) -> bool:
    """Whether an order made at step grouped_at is too far away. Some samplers step back by one or two."""
    return abs(step - grouped_at) >= every
