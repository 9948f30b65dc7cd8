"""HunyuanVideo, HunyuanVideo-1.5 and MiniMax-H3 in ComfyUI's own sampling code."""

import logging

import pytest

pytestmark = pytest.mark.comfyui

# kind -> attention calls per forward that are video self-attention, and that are not
CALLS = {"hunyuan": (4, 2), "hunyuan15": (3, 2), "h3": (3, 0)}


@pytest.fixture(autouse=True)
def hear_us(caplog):
    caplog.set_level(logging.INFO, "vc_attention")


@pytest.mark.parametrize("kind", CALLS)
def test_joint_blocks_are_taken_and_the_rest_is_left(
    load_tiny, patch, watch, sampling, caplog, kind, call_limit
):
    watched = watch(patch(load_tiny(kind)))
    sampling.sample(watched.model, steps=2, kind=kind, text_tokens=(40, 24))
    ours, others = CALLS[kind]
    assert len(watched.taken) == ours * 2 * 2 and len(watched.calls) == (ours + others) * 2 * 2
    assert all(0 < call.error < call_limit for call in watched.taken)
    assert all(call.error == 0 for call in watched.calls if not call.taken)
    assert f"{ours * 4} of {(ours + others) * 4} calls low-bit" in caplog.messages[-1]


@pytest.mark.parametrize("kind", ["hunyuan", "hunyuan15"])
def test_padded_text_is_dropped_from_the_keys(load_tiny, patch, watch, sampling, kind, call_limit):
    """The blocks' mask hides text columns; a refiner's mask differs by query and is left to the host."""
    watched = watch(patch(load_tiny(kind)))
    sampling.sample(watched.model, steps=2, kind=kind, cfg=1.0, padded=10)
    ours, _ = CALLS[kind]
    assert len(watched.taken) == ours * 2
    assert all(0 < call.error < call_limit for call in watched.taken)


def test_h3_comes_in_boxes(load_tiny, patch, sampling, monkeypatch):
    """MiniMax-H3 hands q, k and v over; we take them, and never through the tensor form."""
    from comfyui_vc_attention.nodes.model_patch import AttentionOverride

    def unboxed(*args, **kwargs):
        raise AssertionError("called with tensors")

    monkeypatch.setattr(AttentionOverride, "__call__", unboxed)
    exact = sampling.sample(load_tiny("h3"), steps=2, kind="h3")
    close = sampling.sample(patch(load_tiny("h3")), steps=2, kind="h3")
    for ours, theirs in zip(close.unbind(), exact.unbind(), strict=True):
        assert 40 < sampling.psnr(ours, theirs) < 200


def test_d12_h3_blocks_are_numbered_by_their_place(load_tiny, patch, sampling, monkeypatch):
    from comfyui_vc_attention.nodes.families import MiniMaxH3

    seen = []
    original = MiniMaxH3.layer
    monkeypatch.setattr(MiniMaxH3, "layer", lambda *args: seen.append(original(*args)) or seen[-1])
    sampling.sample(patch(load_tiny("h3")), steps=2, kind="h3")
    assert [layer.index for layer in seen] == [0, 1, 2] * 4  # two steps, two conditions


def test_exact_blocks_count_single_blocks_after_double_ones(load_tiny, patch, watch, sampling):
    watched = watch(patch(load_tiny("hunyuan"), exact_blocks="1-2"))
    sampling.sample(watched.model, steps=1, kind="hunyuan", cfg=1.0)
    blocks = [call for call in watched.calls if call.block is not None]
    assert [call.taken for call in blocks] == [True, False, False, True]
