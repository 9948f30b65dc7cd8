import logging

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.nodes import attention_capture
from comfyui_vc_attention.nodes.attention_capture import CaptureSettings, capture_attention
from comfyui_vc_attention.nodes.families import family_of
from comfyui_vc_attention.nodes.model_patch import patch_attention
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE
from safetensors.torch import load_file

SIGMAS = [1.0, 0.9, 0.8, 0.5, 0.0]


@pytest.fixture
def capture(make_model, tmp_path, monkeypatch):
    """capture(model, **settings): a captured model that writes into tmp_path."""
    monkeypatch.setattr(attention_capture, "output_folder", lambda: tmp_path)

    def make(model=None, blocks=(1,), steps=(0, 2), heads=2, max_bytes=2**20, prefix="test"):
        model = model or make_model()
        settings = CaptureSettings(frozenset(blocks), frozenset(steps), heads, max_bytes, prefix)
        return capture_attention(model, settings, family_of(model.model.diffusion_model))

    return make


def sample(model, batch=2, conditions=(((1, 0), 40),)):
    """Three blocks of 4 heads, self- and cross-attention, 64 tokens; the host returns q."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 64, 4 * 16, generator=generator) for _ in range(3))

    def forward(options):
        for index in range(3):
            named = {"heads": 4, "transformer_options": {**options, "block_index": index}}
            out = options[OVERRIDE](lambda q, k, v, heads, **kw: q, q, k, v, **named)
            options[OVERRIDE](lambda q, k, v, heads, **kw: q, q, k[:, :40], v[:, :40], **named)
        return out

    outputs = model.sample(SIGMAS, forward, conditions)
    return (q, k, v), outputs


def saved(tmp_path):
    (path,) = tmp_path.glob("*.safetensors")
    return load_file(path)


def test_chosen_calls_are_saved_as_they_were(capture, tmp_path):
    (q, _, v), outputs = sample(capture())
    tensors = saved(tmp_path)
    assert sorted(tensors) == [f"step{s}.block1.call0.{part}" for s in (0, 2) for part in "kqv"]
    heads = q.unflatten(-1, (4, 16)).transpose(1, 2)
    assert torch.equal(
        tensors["step0.block1.call0.q"], heads[1:2, ::2]
    )  # the prompted row, every second head
    assert tensors["step2.block1.call0.v"].shape == (1, 2, 64, 16)
    assert all(torch.equal(out, q) for out in outputs) and v.shape[0] == 2


def test_unprompted_calls_are_left_out(capture, tmp_path):
    sample(capture(steps=(0,)), batch=1, conditions=(((1,), 40), ((0,), 40)))
    assert len(saved(tmp_path)) == 3


def test_bytes_are_bounded_and_what_did_not_fit_is_said(capture, tmp_path, caplog):
    one_call = 3 * 2 * 64 * 16 * 4
    with caplog.at_level(logging.INFO, "vc_attention"):
        sample(capture(blocks=(0, 1, 2), max_bytes=4 * one_call))
    assert len(saved(tmp_path)) == 12
    assert "captured 4 calls" in caplog.text and "2 calls did not fit" in caplog.text


def test_nothing_to_save_is_a_warning(capture, tmp_path, caplog):
    sample(capture(blocks=(99,)))
    assert not list(tmp_path.iterdir()) and "captured nothing" in caplog.text


def test_the_file_carries_no_path_and_the_log_only_its_name(capture, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "vc_attention"):
        sample(capture())
    (path,) = tmp_path.glob("*")
    assert path.name == "test_00001.safetensors" and path.name in caplog.text
    assert str(tmp_path) not in caplog.text and str(tmp_path).encode() not in path.read_bytes()


def test_a_patch_below_still_takes_its_calls(capture, make_model, tmp_path, caplog):
    model = make_model()
    settings = PatchSettings(VCConfig(clusters=4), "reference", min_tokens=1)
    patched = patch_attention(model, settings, family_of(model.model.diffusion_model))
    with caplog.at_level(logging.INFO, "vc_attention"):
        sample(capture(patched))
    assert "12 of 24 calls low-bit" in caplog.text and len(saved(tmp_path)) == 6


def test_boxes_are_looked_into_and_passed_on(capture, monkeypatch, tmp_path):
    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

        def peek(self):
            return self.tensor

    monkeypatch.setattr(attention_capture, "hand_over", lambda previous, boxes, args, kwargs: boxes[0].peek())
    tensor = torch.randn(1, 2, 64, 16)

    def forward(options):
        named = {"transformer_options": {**options, "block_index": 1}, "skip_reshape": True}
        return options[OVERRIDE].container_function(*(Box(tensor) for _ in range(3)), 2, **named)

    assert capture(steps=(0,)).sample(SIGMAS, forward, (((0,), 40),))[0] is tensor
    assert torch.equal(saved(tmp_path)["step0.block1.call0.k"], tensor)
