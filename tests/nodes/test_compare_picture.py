import numpy as np
import pytest
import torch
from comfyui_vc_attention.nodes.compare_picture import compare_picture, full_scale, heat
from comfyui_vc_attention.nodes.report_picture import WIDTH


def test_heat_goes_from_black_to_white():
    colours = np.asarray(heat(torch.tensor([[0.0, 1 / 12, 0.25, 1.0]]), 0.25))[0]
    assert colours.tolist() == [[0, 0, 0], [255, 0, 0], [255, 255, 255], [255, 255, 255]]


@pytest.mark.parametrize("largest, scale", [(0.001, 0.002), (0.03, 0.05), (0.9, 0.25), (0.0, 0.002)])
def test_small_differences_are_amplified(largest, scale):
    assert full_scale(torch.full((8, 8), largest)) == scale


@pytest.mark.parametrize("channels, frames", [(3, 5), (16, 2), (1, 1)])
def test_pictures_and_latents_make_a_page(channels, frames):
    a, b = torch.rand(2, frames, channels, 24, 32)
    picture = compare_picture(a, b, ("a", "b"), ["PSNR", "more"], [20.0 + i for i in range(frames)], 0)
    assert picture.width == WIDTH and picture.height > 250
