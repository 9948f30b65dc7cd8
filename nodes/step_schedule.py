"""From a sigma to a denoising step, and to what that step does: group values, or run plain, stay exact, and
whether it may run at 4 bits.

Plain numbers only; sigmas are read to the host by whoever calls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOLERANCE = 1e-4  # relative; SDE samplers nudge the first sigma by 1.25e-5, others round by 6e-8
WHOLE_START = 1e-3  # a schedule is whole if it starts this close to the model's first sigma
WHOLE_END = 1e-3  # and ends here at most; uni_pc replaces the final 0 by 0.001
# Share of the denoising, at either end, that stays at 8 bits. Chosen: no other share was measured. What this
# one buys: tests/evidence, "Clips by method", row "nvfp4, int8_int8 in the first and last fifth".
EDGE = 0.2
FEW_STEPS = 12  # chosen, not measured: distilled models take 4 to 8 steps, and each of them counts


@dataclass(frozen=True)
class StepPlan:
    """What one model evaluation does."""

    step: int  # index into this sampler call's schedule
    sigma: float
    active: bool  # inside start_percent..end_percent; outside, attention stays exact
    grouping: bool  # inside the grouping window
    four_bit: bool = False  # in the middle of the denoising, where 4 bits are enough


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
    if is_whole(sigmas, percent_to_sigma):
        return sigmas[steps_in(window, len(sigmas) - 1)]
    return float(percent_to_sigma(window))


def is_whole(sigmas: Sequence[float], percent_to_sigma: Callable[[float], float]) -> bool:
    return sigmas[0] >= float(percent_to_sigma(0.0)) - WHOLE_START and sigmas[-1] <= WHOLE_END


def steps_in(share: float, steps: int) -> int:
    """Steps that a share of them takes, a begun one included."""
    # the small shift keeps 0.1 * 30 from becoming step 4 through rounding
    return min(steps, math.ceil(share * steps - 1e-9))


def four_bit_range(
    sigmas: Sequence[float], percent_to_sigma: Callable[[float], float]
) -> tuple[float, float] | None:
    """(high, low): where high >= sigma > low, a run of both precisions takes 4 bits. None for few steps.

    On a whole schedule of n steps all but the first and the last ceil(EDGE * n). On a part of one the model's
    own sampling places the edges, and what the part covers tells how many steps the whole would have.
    """
    steps = len(sigmas) - 1
    if is_whole(sigmas, percent_to_sigma):
        edge = steps_in(EDGE, steps)
        return (sigmas[edge], sigmas[steps - edge]) if steps >= FEW_STEPS else None
    covered = percent_of(sigmas[-1], percent_to_sigma) - percent_of(sigmas[0], percent_to_sigma)
    if steps < FEW_STEPS * covered - 1e-6:
        return None
    return float(percent_to_sigma(EDGE)), float(percent_to_sigma(1 - EDGE))


def percent_of(sigma: float, percent_to_sigma: Callable[[float], float]) -> float:
    """Share of the denoising that lies before sigma: the inverse of percent_to_sigma, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if float(percent_to_sigma(middle)) > sigma else (low, middle)
    return low


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
        self._four_bit = four_bit_range(self.sigmas, percent_to_sigma)
        self._start = math.inf if start_percent <= 0 else float(percent_to_sigma(start_percent))
        self._end = -math.inf if end_percent >= 1 else float(percent_to_sigma(end_percent))

    @property
    def steps(self) -> int:
        return max(1, len(self.sigmas) - 1)

    @property
    def few_steps(self) -> bool:
        """Whether no step may run at 4 bits, because there are few."""
        return self._four_bit is None

    def step_of(self, sigma: float) -> int:
        """Step i covers sigmas[i] >= sigma > sigmas[i + 1], whichever evaluation of it this is."""
        reached = sum(1 for boundary in self.sigmas if boundary * (1 + TOLERANCE) >= sigma)
        return min(max(reached - 1, 0), self.steps - 1)

    def groups_at(self, step: int) -> bool:
        """Whether the window reaches that far."""
        return step < self.steps and above(self.sigmas[step], self.threshold)

    def plan(self, sigma: float) -> StepPlan:
        """What the evaluation at this sigma does."""
        active = sigma <= self._start * (1 + TOLERANCE) and above(sigma, self._end)
        four_bit = self._four_bit is not None and not above(sigma, self._four_bit[0])
        four_bit = four_bit and above(sigma, self._four_bit[1])
        grouping = active and above(sigma, self.threshold)
        return StepPlan(self.step_of(sigma), sigma, active, grouping, four_bit)


def above(sigma: float, threshold: float) -> bool:
    """Strictly greater, by more than rounding."""
    return sigma > threshold + abs(threshold) * TOLERANCE if math.isfinite(threshold) else sigma > threshold


def regroup_due(grouped_at: int, step: int, every: int) -> bool:
    """Whether an order made at step grouped_at is too far away. Some samplers step back by one or two."""
    return abs(step - grouped_at) >= every
