"""Procedural clips: deterministic, in range, and as their prompt says (test_classify.py)."""

import torch
from comfyui_vc_attention.nodes.sample_clip import CLIP_FRAMES, CLIP_SIZE, PROMPTS
from sample_model.clips import RANDOM_NUMBERS, UniformNumbers, draw_clips


def test_clips_follow_from_the_seed():
    prompts = torch.tensor([0, 5])
    first, again, other = (draw_clips(prompts, seed, frames=2) for seed in (3, 3, 4))
    assert first.equal(again)
    assert not first.equal(other)


def test_shape_and_range():
    clips = draw_clips(torch.arange(len(PROMPTS)), 1)
    assert clips.shape == (len(PROMPTS), CLIP_FRAMES, CLIP_SIZE, CLIP_SIZE, 3)
    assert clips.min() >= 0.0
    assert clips.max() <= 1.0


def test_pictures_of_a_clip_move():
    clip = draw_clips(torch.tensor([0]), 2)[0]
    assert (clip[1:] - clip[:-1]).abs().mean(dim=(1, 2, 3)).min() > 0.005


def test_a_smaller_clip_is_the_same_scene():
    large, small = (draw_clips(torch.tensor([6]), 7, frames=2, size=size) for size in (96, 48))
    shrunk = torch.nn.functional.avg_pool2d(large[0].movedim(-1, 1), 2).movedim(1, -1)
    assert (shrunk - small[0]).abs().mean() < 0.02


def test_numbers_per_clip_suffice():
    numbers = UniformNumbers(torch.zeros(1, RANDOM_NUMBERS), 1.0)
    assert numbers(2.0, 3.0).shape == (1, 1, 1, 1)
    assert numbers(2.0, 3.0, pixels=True) == 2.0
