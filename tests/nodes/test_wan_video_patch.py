"""Contract tests: a stand-in does what WanVideoWrapper does (wan_video_stand_in.py)."""

import gc
import logging
from types import SimpleNamespace

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.nodes import model_patch
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.wan_video_patch import (
    HANDLE,
    is_wan_video,
    patch_wan_video,
    remove_wan_video_patch,
)

from tests.evidence.bounds import bound

LIMIT = bound("int8_int8, means, sequence")


@pytest.fixture
def patched():
    """patched(base, **settings): a clone with the patch, on the reference kernel."""

    def make(base, **settings):
        config = VCConfig("8-bit", clusters=8)
        return patch_wan_video(base, PatchSettings(config, "reference", min_tokens=1, **settings))

    return make


@pytest.fixture
def groupings(monkeypatch):
    """The values that were grouped, in order."""
    seen, original = [], model_patch.group_tokens

    def recorded(v, clusters, previous=None, key_mask=None):
        seen.append(SimpleNamespace(keys=v.shape[2], warm=previous is not None, first=float(v[0, 0, 0, 0])))
        return original(v, clusters, previous, key_mask)

    monkeypatch.setattr(model_patch, "group_tokens", recorded)
    return seen


def override_of(model):
    return model.model_options["transformer_options"][HANDLE].override


def report_of(model):
    return override_of(model).finished[-1]


def forwards(model):
    return [vars(b.self_attn).get("forward") for b in model.model.diffusion_model.blocks]


def test_square_calls_are_taken_and_close_to_exact(wan_video, patched):
    base = wan_video.make_patcher()
    model = patched(base)
    exact, ours = wan_video.sample(base), wan_video.sample(model)
    assert not ours.exact and len(exact.exact) == 2 * 8 * 2
    for one, other in zip(exact.outputs, ours.outputs, strict=True):
        assert 0 < (one - other).norm() / one.norm() < LIMIT


def test_p06_the_counts_are_the_calls_of_the_run(wan_video, patched, caplog):
    caplog.set_level(logging.INFO, "vc_attention")
    model = patched(wan_video.make_patcher())
    wan_video.sample(model)
    report = report_of(model)
    assert (report.received, report.taken, report.steps) == (32, 32, 8)
    assert report.grouped_steps == {0, 1} and report.grouped_calls == 8
    assert "LongCat-Video (WanVideoWrapper): 32 of 32 calls low-bit" in caplog.messages[-1]
    assert len(caplog.messages) == 1


def test_orders_are_made_again_every_fourth_step_of_the_window(wan_video, patched, groupings):
    wan_video.sample(patched(wan_video.make_patcher(), grouping_window=1.0), cfg=False)
    assert [seen.warm for seen in groupings] == [False, False, True, True]


def test_conditions_and_windows_never_share_an_order(wan_video, patched, groupings):
    model = patched(wan_video.make_patcher(blocks=1), grouping_window=1.0, regroup_every=1)
    wan_video.sample(model, steps=3, windows=2)
    assert len(groupings) == 3 * 4
    assert [seen.warm for seen in groupings] == [False] * 4 + [True] * 8


def test_continuation_takes_both_rectangles_with_their_own_orders(wan_video, patched, groupings):
    base = wan_video.make_patcher(blocks=1)
    model = patched(base)
    exact = wan_video.sample(base, steps=4, cfg=False, longcat_num_cond_latents=1)
    ours = wan_video.sample(model, steps=4, cfg=False, longcat_num_cond_latents=1)
    assert exact.exact == [(192, 256), (64, 64)] * 4 and not ours.exact
    assert [seen.keys for seen in groupings] == [256, 64]  # the keys', whoever asks
    for one, other in zip(exact.outputs, ours.outputs, strict=True):
        assert 0 < (one - other).norm() / one.norm() < LIMIT


def test_short_condition_calls_stay_with_the_wrapper(wan_video):
    config = VCConfig("8-bit", clusters=8)
    model = patch_wan_video(wan_video.make_patcher(), PatchSettings(config, "reference", min_tokens=100))
    ours = wan_video.sample(model, steps=2, cfg=False, longcat_num_cond_latents=1)
    assert ours.exact == [(64, 64)] * 4
    assert report_of(model).left == {"shorter than 100 tokens": 4}


def test_state_is_freed_after_the_window_and_after_the_run(wan_video, patched):
    model = patched(wan_video.make_patcher())
    runs = []
    override = override_of(model)
    taken = override.take

    def watch(args, kwargs, *rest):
        run = kwargs["transformer_options"][model_patch.FORWARD].run
        runs.append((run.plan.step, run.store.held_bytes > 0, run))
        return taken(args, kwargs, *rest)

    override.take = watch
    wan_video.sample(model)
    assert not any(held for step, held, _ in runs if step >= 2) and any(held for step, held, _ in runs)
    assert runs[-1][2].store.held_bytes == 0


class InterruptProcessing(Exception):
    """As ComfyUI's."""


@pytest.mark.parametrize("raises_at", [0, 1])
def test_an_interrupt_goes_through_and_leaves_nothing(wan_video, patched, raises_at, caplog):
    caplog.set_level(logging.INFO, "vc_attention")
    base = wan_video.make_patcher()
    model, network = patched(base, grouping_window=1.0), base.model.diffusion_model
    network.raises_at, network.error = raises_at, InterruptProcessing()
    with pytest.raises(InterruptProcessing):
        wan_video.sample(model)
    network.error = None
    gc.collect()
    assert forwards(base) == [None, None] and len(caplog.messages) == 1
    network.raises_at = None
    assert not wan_video.sample(model).exact


def test_after_ctrl_c_the_next_forward_cleans_up(wan_video, patched):
    base = wan_video.make_patcher()
    before = wan_video.sample(base).outputs
    model, network = patched(base), base.model.diffusion_model
    network.raises_at, network.error = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        wan_video.sample(model)
    network.raises_at = None
    after = wan_video.sample(base)
    assert all(torch.equal(one, other) for one, other in zip(before, after.outputs, strict=True))
    assert len(after.exact) == 32 and forwards(base) == [None, None]


def test_l01_another_clone_and_the_model_that_came_in_are_untouched(wan_video, patched):
    base = wan_video.make_patcher()
    before = wan_video.sample(base).outputs
    model = patched(base)
    wan_video.sample(model)
    after = wan_video.sample(base)
    assert len(after.exact) == 32 and forwards(base) == [None, None]
    assert all(torch.equal(one, other) for one, other in zip(before, after.outputs, strict=True))
    assert override_of(model).finished[-1].received == 32


def test_two_patches_of_one_model_do_not_mix(wan_video, patched):
    base = wan_video.make_patcher()
    first, second = patched(base), patched(base, exact_blocks=frozenset({0}))
    wan_video.sample(first)
    wan_video.sample(second)
    assert report_of(first).taken == 32 and report_of(second).taken == 16
    assert len(override_of(first).finished) == len(override_of(second).finished) == 1


def test_l04_off_removes_it_and_a_second_patch_replaces_it(wan_video, patched):
    base = wan_video.make_patcher()
    model = patched(base)
    again = patched(model)
    assert override_of(again) is not override_of(model)
    off = remove_wan_video_patch(again)
    assert HANDLE not in off.model_options["transformer_options"] and len(wan_video.sample(off).exact) == 32
    assert remove_wan_video_patch(base) is None


def test_hooks_go_with_the_last_patched_clone(wan_video, patched):
    base = wan_video.make_patcher()
    network = base.model.diffusion_model
    model = patched(base)
    assert len(network._forward_pre_hooks) == len(network._forward_hooks) == 1
    del model
    gc.collect()
    assert not network._forward_pre_hooks and not network._forward_hooks


def test_another_packs_forward_is_kept(wan_video, patched):
    base = wan_video.make_patcher()
    attention = base.model.diffusion_model.blocks[0].self_attn
    mine = attention.forward
    attention.forward = mine
    wan_video.sample(patched(base))
    assert vars(attention)["forward"] is mine


def test_runs_are_told_apart_by_the_copy_of_the_options(wan_video, patched):
    model = patched(wan_video.make_patcher())
    wan_video.sample(model)
    wan_video.sample(model, cfg=False)
    assert [report.received for report in override_of(model).finished] == [32, 16]


def test_a_sampler_that_does_not_copy_and_a_loop_of_passes(wan_video, patched):
    model = patched(wan_video.make_patcher())
    wan_video.sample(model, copies=False, steps=3)
    wan_video.sample(model, copies=False, steps=3)
    assert [report.received for report in override_of(model).finished] == [12, 12]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mode": "sageattn_ultravico"}, "attention mode sageattn_ultravico"),
        ({"mode": "radial_sage_attention"}, "attention mode radial_sage_attention"),
        ({"mode": "flash_attn_2", "seq_len": 200}, "padded keys"),
        ({"ref": torch.zeros(1, 1, 1, 1)}, "the wrapper's onetoall_ref"),
    ],
)
def test_what_is_not_plain_attention_stays_with_the_wrapper(wan_video, patched, arguments, reason):
    base = wan_video.make_patcher()
    model = patched(base)
    exact, ours = wan_video.sample(base, steps=2, **arguments), wan_video.sample(model, steps=2, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(exact.outputs, ours.outputs, strict=True))
    assert report_of(model).left == {reason: 8} and len(ours.exact) == 8


def test_a_mode_the_user_set_for_some_blocks_is_respected(wan_video, patched):
    model = patched(wan_video.make_patcher())
    model.model_options["transformer_options"]["attention_mode_override"] = {"mode": "sdpa"}
    assert len(wan_video.sample(model, steps=2, mode="sdpa").exact) == 8


def test_kernel_failure_falls_back_to_the_wrapper(wan_video, patched, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "vc_attention")
    base = wan_video.make_patcher()
    exact = wan_video.sample(base).outputs
    monkeypatch.setattr(model_patch, "prepare_call", lambda *a, **k: 1 / 0)
    model = patched(base)
    ours = wan_video.sample(model)
    assert all(torch.equal(a, b) for a, b in zip(exact, ours.outputs, strict=True))
    assert "kernel reference failed and is off for this run" in caplog.messages[0]


def test_vace_blocks_are_counted_with_the_block_they_feed(wan_video, patched):
    model = patched(wan_video.make_patcher(vace=1), exact_blocks=frozenset({1}))
    wan_video.sample(model, steps=2, cfg=False)
    report = report_of(model)
    assert report.taken == 2 and report.left == {"kept exact by exact_blocks": 4}


def test_only_models_of_the_wrapper_are_known(wan_video):
    assert is_wan_video(wan_video.make_patcher().model.diffusion_model)
    native = type("WanModel", (), {"__module__": "comfy.ldm.wan.model", "__qualname__": "WanModel"})()
    assert not is_wan_video(native)


def test_x05_a_compiled_block_keeps_moving(wan_video, patched):
    base = wan_video.make_patcher(blocks=1)
    network = base.model.diffusion_model
    compiled = torch.compile(network.blocks[0], backend="eager")
    network.blocks[0] = compiled
    model = patched(base)
    wan_video.sample(model, steps=8, cfg=False)
    report = report_of(model)
    assert report.taken == 8 and report.grouped_steps == {0, 1}
    assert len(wan_video.sample(base, steps=2, cfg=False).exact) == 2


def test_a_compiled_network_keeps_moving(wan_video, patched):
    """The wrapper can compile the whole network instead of its blocks."""
    base = wan_video.make_patcher(blocks=1)
    model = patched(base)
    network = base.model.diffusion_model
    compiled = torch.compile(network, backend="eager")
    run = wan_video.sample(model, steps=8, cfg=False, network=compiled)
    report = report_of(model)
    assert not run.exact and report.taken == 8 and report.grouped_steps == {0, 1}
