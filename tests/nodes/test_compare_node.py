import math

import pytest
import torch
from comfyui_vc_attention.nodes.compare_node import VCAttentionCompare, frame_number
from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch


@pytest.fixture
def clips():
    a = torch.rand(4, 24, 32, 3, generator=torch.Generator().manual_seed(0)) * 0.5
    b = a.clone()
    b[2] += 0.1
    return a, b


def test_pictures_are_measured_frame_by_frame(clips):
    output = VCAttentionCompare.execute(images_a=clips[0], images_b=clips[1], name_b="patched")
    image, text, psnr, ssim = output.args
    assert psnr == pytest.approx(10 * math.log10(4 / 0.01), abs=1e-3) and 0.9 < ssim < 1
    assert "worst frame 3: 20.00 dB" in text and "B: patched" in text
    assert image.ndim == 4 and output.ui["vc_attention_report"] == [text]


def identical(clips, **models):
    output = VCAttentionCompare.execute(images_a=clips[0], images_b=clips[0], **models)
    _, text, psnr, ssim = output.args
    assert psnr == math.inf and ssim == pytest.approx(1) and "inf" not in text
    (warning,) = output.ui["vc_attention_warning"]
    assert warning in text and warning.startswith("The clips are identical. ")
    return warning


def test_identical_clips_are_called_so(clips):
    assert "did not run" in identical(clips)


def test_identical_clips_say_why_the_patch_did_not_run(clips, make_model):
    inactive = VCAttentionPatch.execute(make_model()).args[0]
    warning = identical(clips, model_a=make_model(), model_b=inactive)
    assert "did not run in B: every kernel needs an NVIDIA GPU, got a CPU" in warning
    off = VCAttentionPatch.execute(make_model(), precision="off").args[0]
    assert "precision is off" in identical(clips, model_b=off)
    assert "no patch is active on its model" in identical(clips, model_b=make_model())


def test_latents_do_without_pictures():
    latent = {"samples": torch.randn(1, 16, 3, 8, 8)}
    other = {"samples": latent["samples"] + 0.01}
    assert "of the latents, 3 frames" in VCAttentionCompare.execute(latent_a=latent, latent_b=other).args[1]


def test_half_a_pair_is_refused(clips):
    with pytest.raises(ValueError, match="connect images_a and images_b, or latent_a and latent_b"):
        VCAttentionCompare.execute(images_a=clips[0], latent_b={"samples": torch.zeros(1)})


def test_different_shapes_are_refused(clips):
    with pytest.raises(ValueError, match="one shape, got"):
        VCAttentionCompare.execute(images_a=clips[0], images_b=clips[1][:2])


@pytest.mark.parametrize("name, number", [("first", 0), ("middle", 1), ("last", 3), ("worst", 2)])
def test_frame_shown(name, number):
    assert frame_number(name, torch.tensor([30.0, 25.0, 20.0, 40.0])) == number


def test_titles_with_paths_are_cut(clips):
    text = VCAttentionCompare.execute(images_a=clips[0], images_b=clips[1], name_a="/home/ann/x/wan.st").args[
        1
    ]
    assert "ann" not in text.splitlines()[1]
