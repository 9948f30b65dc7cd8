import numpy as np
import pytest
import torch
from comfyui_vc_attention.nodes.report_picture import (
    GROUPING_COLOUR,
    KERNEL_COLOURS,
    LEFT_COLOUR,
    WIDTH,
    as_image_tensor,
    report_picture,
)


def pixels_of(picture, colour):
    return int((np.asarray(picture) == colour).all(-1).sum())


def test_every_part_of_a_run_is_drawn(finished_report):
    picture = report_picture([finished_report])
    assert picture.width == WIDTH
    for colour in (KERNEL_COLOURS[0], LEFT_COLOUR, GROUPING_COLOUR):
        assert pixels_of(picture, colour) > 50


def test_more_runs_make_a_longer_page(finished_report):
    one, two = (report_picture([finished_report] * count) for count in (1, 2))
    assert two.height > 1.6 * one.height


def test_a_run_without_calls_is_a_line(finished_report):
    from comfyui_vc_attention.nodes.run_report import RunReport

    assert report_picture([RunReport("Wan", 20)]).height < report_picture([finished_report]).height / 2
    assert report_picture([]).height > 0


@pytest.mark.parametrize("steps, blocks", [(4, 1), (150, 60)])
def test_any_number_of_steps_and_blocks_fits(make_report, steps, blocks):
    picture = report_picture([make_report(steps=steps, blocks=blocks)])
    assert picture.height < 800


def test_tensor_is_comfyuis_image(finished_report):
    image = as_image_tensor(report_picture([finished_report]))
    assert image.dtype == torch.float32 and image.shape[0] == 1 and image.shape[3] == 3
    assert image.min() >= 0 and image.max() <= 1
