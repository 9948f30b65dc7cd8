"""The shipped sample model makes what its prompt says."""

import os

import pytest
import torch
from comfyui_vc_attention.nodes.sample_clip import PROMPTS
from safetensors import safe_open
from sample_model.classify import count_right
from sample_model.model import load_model
from sample_model.sample import WEIGHTS, sample_clips

STEPS, CFG = 10, 2.0  # chosen: 62 of 64 clips right when trained, and a few minutes on two cores


@pytest.fixture(autouse=True)
def all_cores():
    """By far the longest test of the suite: others have ended when it still runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count())
    yield
    torch.set_num_threads(before)


def test_file_is_small_and_ours():
    assert WEIGHTS.stat().st_size < 16_000_000
    with safe_open(str(WEIGHTS), "pt") as file:
        assert file.metadata()["license"] == "Apache-2.0"
        assert file.metadata()["prompts"] == ", ".join(PROMPTS)


def test_sampled_clips_show_their_prompt():
    prompts = list(PROMPTS) * 2
    clips = sample_clips(load_model(WEIGHTS), prompts, batch=4, seed=7, steps=STEPS, cfg=CFG)
    shape, colour, both = count_right(clips, prompts)
    assert both >= 0.9 * len(prompts), f"shape right {shape}, colour right {colour} of {len(prompts)}"


def test_clips_move():
    clip = sample_clips(load_model(WEIGHTS), [PROMPTS[0]], seed=3, steps=STEPS, cfg=CFG)[0]
    assert (clip[1:] - clip[:-1]).abs().mean() > 0.005


@pytest.mark.gpu
def test_half_precision_makes_the_same_clip():
    exact, half = (load_model(WEIGHTS, "cuda", dtype) for dtype in (torch.float32, torch.float16))
    a, b = (sample_clips(model, [PROMPTS[5]], seed=3, steps=STEPS, cfg=CFG) for model in (exact, half))
    assert -10.0 * (a - b).square().mean().log10() > 30.0  # dB
