"""The plain sampler."""

import torch
from comfyui_vc_attention.nodes.sample_clip import LATENT_SHAPE
from sample_model.model import WanVideoModel, initialise
from sample_model.sample import contact_sheet, sample_latents, save_animation, shifted_sigmas


class PointModel(torch.nn.Module):
    """The exact velocity when every clip is the same point, and a note of what it was asked."""

    def __init__(self, point):
        super().__init__()
        self.head = WanVideoModel(layers=1).head
        self.point, self.timesteps = point, []

    def forward(self, x, timestep, context):
        self.timesteps.append(timestep[0].item())
        return (x - self.point) / (timestep[0] / 1000.0)


def test_euler_finds_the_point():
    point = torch.randn(LATENT_SHAPE, generator=torch.Generator().manual_seed(1))
    model = PointModel(point)
    latents = sample_latents(model, ["a red circle", "a blue cross"], steps=3)
    torch.testing.assert_close(latents, point.expand(2, *LATENT_SHAPE), atol=1e-4, rtol=0.0)
    assert len(model.timesteps) == 3
    sample_latents(model, ["a red circle"], steps=3, cfg=2.0)
    assert len(model.timesteps) == 9


def test_sigmas_fall_from_one_to_zero():
    sigmas = shifted_sigmas(4)
    torch.testing.assert_close(sigmas, torch.tensor([1.0, 0.96, 8 / 9, 8 / 11, 0.0]))


def test_clips_differ_between_seeds():
    model = initialise(WanVideoModel(layers=1)).eval()
    first, again, other = (sample_latents(model, ["a red circle"], steps=1, seed=s) for s in (1, 1, 2))
    assert first.equal(again) and not first.requires_grad  # the model's weights have gradients
    assert not first.equal(other)


def test_pictures_to_look_at(tmp_path):
    clips = torch.rand(3, 4, 8, 8, 3, generator=torch.Generator().manual_seed(3))
    assert contact_sheet(clips, every=2).size == (16, 24)
    save_animation(clips, tmp_path / "clips.webp", columns=3)
    assert (tmp_path / "clips.webp").stat().st_size > 0
