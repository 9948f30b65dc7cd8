import math

import pytest
from comfyui_vc_attention.nodes.step_schedule import StepSchedule, percent_of, regroup_due, window_threshold


def schedule(model, sigmas, **settings):
    return StepSchedule(sigmas, model.percent_to_sigma, **settings)


def grouped_steps(model, sigmas, window=0.25):
    made = schedule(model, sigmas, window=window)
    return [made.plan(sigma).step for sigma in sigmas[:-1] if made.plan(sigma).grouping]


@pytest.mark.parametrize("steps, count", [(40, 10), (8, 2), (4, 1), (6, 2), (30, 8), (1, 1)])
def test_a_quarter_of_a_whole_schedule_is_grouped_as_in_the_paper(make_model, simple_sigmas, steps, count):
    assert grouped_steps(make_model(), simple_sigmas(steps)) == list(range(count))


def test_n25_few_step_schedules_are_resolved_as_documented(make_model, simple_sigmas):
    counts = [len(grouped_steps(make_model(), simple_sigmas(steps))) for steps in (4, 8, 20, 50)]
    assert counts == [1, 2, 5, 13]


def test_window_ends(make_model, simple_sigmas):
    sigmas = simple_sigmas(8)
    assert grouped_steps(make_model(), sigmas, window=0.0) == []
    assert grouped_steps(make_model(), sigmas, window=1.0) == list(range(8))
    assert window_threshold(sigmas, make_model().percent_to_sigma, 0.0) == math.inf


def test_rounding_adds_no_step(make_model, simple_sigmas):
    assert 0.1 * 30 > 3 - 1e-12 and len(grouped_steps(make_model(), simple_sigmas(30), window=0.1)) == 3


def test_denoise_below_one_measures_the_window_on_the_whole_denoising(make_model, simple_sigmas):
    whole = simple_sigmas(40)
    assert grouped_steps(make_model(), whole[20:]) == []  # denoise 0.5 starts after the window
    assert grouped_steps(make_model(), whole[4:]) == list(range(6))  # denoise 0.9: steps 4 to 9 of 40


def test_two_experts_share_one_window(make_model, simple_sigmas):
    whole = simple_sigmas(40)
    high, low = whole[:21], whole[20:]
    assert grouped_steps(make_model(), high) == list(range(10))
    assert grouped_steps(make_model(), low) == []


def test_early_split_groups_in_the_low_expert_too(make_model, simple_sigmas):
    whole = simple_sigmas(40)
    assert grouped_steps(make_model(), whole[4:]) == list(range(6))


def test_every_sampler_is_placed_in_its_step(recorded, make_model):
    for name, seen in recorded["samplers"].items():
        made = StepSchedule(seen["sigmas"], make_model().percent_to_sigma)
        for sigma, at in zip(seen["seen"], seen["at"], strict=True):
            expected = int(str(at).lstrip("~").split("..")[0])
            assert made.step_of(sigma) == min(expected, made.steps - 1), (name, sigma, at)


def test_window_counts_the_same_steps_for_every_sampler(recorded, make_model):
    """6 steps: ceil(6 / 4) = 2 are grouped, however often and where a sampler evaluates them."""
    for name, seen in recorded["samplers"].items():
        made = StepSchedule(seen["sigmas"], make_model().percent_to_sigma)
        grouped = {made.plan(sigma).step for sigma in seen["seen"] if made.plan(sigma).grouping}
        assert grouped == {0, 1}, name


def test_percent_range_is_the_hosts(make_model, simple_sigmas):
    sigmas = simple_sigmas(40)
    made = schedule(make_model(), sigmas, start_percent=0.25, end_percent=0.5)
    assert [step for step, sigma in enumerate(sigmas[:-1]) if made.plan(sigma).active] == list(range(10, 20))


def test_outside_the_range_nothing_is_grouped(make_model, simple_sigmas):
    made = schedule(make_model(), simple_sigmas(8), start_percent=0.9)
    assert not made.plan(1.0).active and not made.plan(1.0).grouping


def test_regroup_tolerates_samplers_that_step_back():
    assert not regroup_due(4, 3, every=4) and not regroup_due(0, 3, every=4)
    assert regroup_due(0, 4, every=4) and regroup_due(8, 4, every=4)


@pytest.mark.parametrize("steps, count", [(40, 10), (8, 2), (4, 1)])
def test_the_window_is_known_beforehand(make_model, steps, count):
    sigmas = [1 - step / steps for step in range(steps + 1)]
    made = schedule(make_model(), sigmas)
    assert [made.groups_at(step) for step in range(steps + 3)] == [step < count for step in range(steps + 3)]


def test_empty_schedule_is_refused(make_model):
    with pytest.raises(ValueError, match="at least one sigma"):
        StepSchedule([], make_model().percent_to_sigma)


def four_bit_steps(model, sigmas):
    made = schedule(model, sigmas)
    return [made.plan(sigma).step for sigma in sigmas[:-1] if made.plan(sigma).four_bit]


@pytest.mark.parametrize(("steps", "first", "last"), [(50, 10, 39), (40, 8, 31), (20, 4, 15), (12, 3, 8)])
def test_the_middle_of_a_whole_schedule_may_run_at_4_bits(make_model, simple_sigmas, steps, first, last):
    assert four_bit_steps(make_model(), simple_sigmas(steps)) == list(range(first, last + 1))


@pytest.mark.parametrize("steps", [1, 4, 8, 11])
def test_no_step_of_a_few_runs_at_4_bits(make_model, simple_sigmas, steps):
    assert four_bit_steps(make_model(), simple_sigmas(steps)) == []
    assert schedule(make_model(), simple_sigmas(steps)).few_steps


def test_parts_of_a_schedule_run_at_4_bits_where_the_whole_would(make_model, simple_sigmas):
    """Two experts, or denoise below 1; and a few steps of a part may be many of the whole."""
    whole, model = simple_sigmas(40), make_model()
    for split in (4, 13, 20):
        high, low = whole[: split + 1], whole[split:]
        steps = four_bit_steps(model, high) + [split + step for step in four_bit_steps(model, low)]
        assert steps == list(range(8, 32)), split
    few = simple_sigmas(8)
    assert schedule(model, few[:5]).few_steps and schedule(model, few[4:]).few_steps


def test_every_evaluation_of_a_step_has_its_precision(make_model, simple_sigmas):
    """Samplers evaluate within steps, and round: the interval counts, not the number of calls."""
    sigmas = simple_sigmas(20)
    made = schedule(make_model(), sigmas)
    for step in range(20):
        inside = (sigmas[step], sigmas[step] * (1 - 6e-8), 0.5 * (sigmas[step] + sigmas[step + 1]))
        assert [made.plan(sigma).four_bit for sigma in inside] == [4 <= step < 16] * 3


def test_percent_of_is_the_inverse(make_model):
    convert = make_model().percent_to_sigma
    for percent in (0.05, 0.3, 0.8):
        assert abs(percent_of(float(convert(percent)), convert) - percent) < 1e-3
