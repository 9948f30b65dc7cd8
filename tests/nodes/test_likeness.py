import math

import pytest
import torch
from comfyui_vc_attention.nodes.likeness import frames_of_images, frames_of_latents, psnr, ssim


@pytest.fixture
def clip():
    generator = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(
        torch.rand(3, 3, 8, 8, generator=generator), size=64, mode="bilinear"
    )
    return smooth


def test_equal_clips(clip):
    assert psnr(clip, clip).tolist() == [math.inf] * 3
    assert ssim(clip, clip).tolist() == pytest.approx([1.0] * 3)


def test_psnr_of_a_known_error(clip):
    assert psnr(clip, clip + 0.1).tolist() == pytest.approx([20.0] * 3, abs=1e-4)


def test_ssim_of_constant_pictures_by_hand():
    a, b = torch.full((1, 1, 16, 16), 0.5), torch.full((1, 1, 16, 16), 0.7)
    assert float(ssim(a, b)) == pytest.approx((2 * 0.35 + 1e-4) / (0.25 + 0.49 + 1e-4), abs=1e-6)


def test_ssim_falls_with_noise_and_more_than_with_brightness(clip):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(clip.shape, generator=generator)
    small, large = (float(ssim(clip, clip + level * noise).mean()) for level in (0.02, 0.1))
    assert large < small < 1
    assert large < float(ssim(clip, clip + 0.1).mean())


def test_ssim_of_pictures_smaller_than_its_window():
    tiny = torch.rand(2, 16, 6, 6)
    assert ssim(tiny, tiny).tolist() == pytest.approx([1.0, 1.0])


def test_images_become_frames():
    assert frames_of_images(torch.zeros(5, 8, 12, 3)).shape == (5, 3, 8, 12)


@pytest.mark.parametrize("shape, frames", [((2, 16, 3, 4, 5), 6), ((2, 4, 8, 8), 2)])
def test_latents_become_frames_on_one_scale(shape, frames):
    a = torch.randn(shape) * 3 + 1
    scaled_a, scaled_b = frames_of_latents(a, a + 0.5)
    assert scaled_a.shape == (frames, shape[1], *shape[-2:])
    assert (scaled_a.amin(), scaled_a.amax()) == (0.0, 1.0)
    assert (scaled_b - scaled_a).mean().item() == pytest.approx(0.5 / float(a.amax() - a.amin()), rel=1e-4)
