"""The classifier names drawn clips right, before it may judge sampled ones."""

import torch
from comfyui_vc_attention.nodes.sample_clip import PROMPTS, decode_latent, encode_frames
from sample_model.classify import count_right, name_clip
from sample_model.clips import draw_clips


def test_names_drawn_clips():
    prompts = torch.arange(96) % len(PROMPTS)
    _, _, both = count_right(draw_clips(prompts, 21), [PROMPTS[i] for i in prompts])
    assert both >= 0.98 * len(prompts)


def test_names_blurred_and_noisy_clips():
    prompts = torch.arange(32) % len(PROMPTS)
    latents = encode_frames(draw_clips(prompts, 22))
    latents += 0.2 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    _, _, both = count_right(decode_latent(latents), [PROMPTS[i] for i in prompts])
    assert both >= 30


def test_a_grey_clip_shows_nothing():
    clip = draw_clips(torch.tensor([0]), 23)[0].mean(dim=-1, keepdim=True).expand(-1, -1, -1, 3)
    assert name_clip(clip) == ("none", "none")


def test_a_wrong_prompt_is_counted_wrong():
    clips = draw_clips(torch.tensor([0, 0]), 24)
    assert count_right(clips, ["a red square", "a blue circle"]) == (1, 1, 0)
