import math

import pytest
import torch
from comfyui_vc_attention.nodes.wan_video_schedule import Position, WanVideoSchedule, share_done


def plans(steps, first_sigma=1.0, **settings):
    schedule, shift = WanVideoSchedule(**settings), 5.0
    begun = 1 - first_sigma / (shift - (shift - 1) * first_sigma)
    made = []
    for step in range(steps):
        done = begun + (1 - begun) * step / steps
        sigma = shift * (1 - done) / (1 + (shift - 1) * (1 - done))
        made.append(schedule.plan(Position(step, step / steps, lambda sigma=sigma: sigma)))
    return made, schedule


@pytest.mark.parametrize("window", [0.0, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("steps", [1, 4, 8, 12, 16, 30, 40])
def test_the_window_is_its_share_of_the_steps_rounded_up(steps, window):
    made, _ = plans(steps, window=window)
    grouped = math.ceil(round(window * steps, 9))
    assert [plan.grouping for plan in made] == [step < grouped for step in range(steps)]


def test_steps_are_known_from_the_second_on():
    schedule = plans(12)[1]
    assert schedule.steps == 12


def test_l12_the_second_expert_does_not_group_and_a_late_start_groups_less():
    assert not any(plan.grouping for plan in plans(10, first_sigma=0.875)[0])
    # denoise 0.9: a tenth of the schedule is over when it begins
    assert sum(plan.grouping for plan in plans(18, first_sigma=4.5 / 4.6)[0]) == 3


def test_outside_the_range_nothing_is_active():
    made, _ = plans(10, start_percent=0.2, end_percent=0.8)
    assert [plan.active for plan in made] == [False] * 2 + [True] * 6 + [False] * 2
    assert not made[1].grouping and made[2].grouping


def test_a_whole_schedule_reads_sigma_once():
    read = []
    schedule = WanVideoSchedule()
    for step in range(4):
        schedule.plan(Position(step, step / 4, lambda: read.append(1) or 0.999))
    assert len(read) == 1


def test_share_done_is_the_inverse_of_the_shift():
    assert share_done(1.0) == 0 and share_done(0.0) == 1
    assert share_done(5 * 0.75 / (1 + 4 * 0.75)) == pytest.approx(0.25)


def test_position_reads_the_latest_frame():
    arguments = {"current_step": 3, "current_step_percentage": 0.3, "t": torch.tensor([[0.0, 700.0]])}
    position = Position.of(arguments)
    assert (position.step, position.share, position.sigma()) == (3, 0.3, pytest.approx(0.7))
    assert Position.of({}).sigma() == 1.0


def test_the_window_is_known_from_the_second_step_on():
    schedule, shift = WanVideoSchedule(), 5.0
    for step in range(2):
        assert schedule.groups_at(step + 20)  # nobody knows yet
        sigma = shift * (1 - step / 40) / (1 + (shift - 1) * (1 - step / 40))
        schedule.plan(Position(step, step / 40, lambda sigma=sigma: sigma))
    assert [schedule.groups_at(step) for step in (0, 9, 10, 20)] == [True, True, False, False]


@pytest.mark.parametrize(("steps", "four_bit"), [(40, range(8, 32)), (20, range(4, 16)), (8, ()), (4, ())])
def test_the_middle_may_run_at_4_bits(steps, four_bit):
    made, schedule = plans(steps)
    assert [plan.step for plan in made if plan.four_bit] == list(four_bit)
    assert schedule.few_steps == (steps < 12)


def test_the_second_expert_runs_at_4_bits_where_the_whole_would():
    begun = share_done(0.875)
    made, schedule = plans(20, first_sigma=0.875)
    done = [begun + (1 - begun) * step / 20 for step in range(20)]
    # the number of steps is known from the second on
    assert [plan.four_bit for plan in made[1:]] == [0.2 <= share < 0.8 for share in done[1:]]
    assert not schedule.few_steps and plans(4, first_sigma=0.875)[1].few_steps
