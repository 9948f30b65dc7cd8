"""A patched model in ComfyUI's own sampling code, judged call by call against ComfyUI's own attention."""

import itertools
import logging
import math

import pytest
import torch

pytestmark = pytest.mark.comfyui

BLOCKS = 3


def summary(caplog):
    return next(message for message in reversed(caplog.messages) if "[VC-Attention]" in message)


@pytest.fixture(autouse=True)
def hear_us(caplog):
    caplog.set_level(logging.INFO, "vc_attention")


@pytest.mark.parametrize(
    "kind, blocks, cross", [("t2v", 3, 1), ("i2v", 3, 2), ("5b", 3, 1), ("s2v", 3, 1), ("animate", 5, 2)]
)
def test_taken_calls_are_blocks_times_evaluations_times_conditions(
    load_tiny, patch, watch, sampling, caplog, kind, blocks, cross, call_limit
):
    """Texts of two lengths keep ComfyUI from batching the conditions, so each makes its own calls."""
    watched = watch(patch(load_tiny(kind)))
    sampling.sample(watched.model, steps=4, kind=kind, text_tokens=(40, 24))
    expected = blocks * 4 * 2
    assert len(watched.taken) == expected and len(watched.calls) == expected * (1 + cross)
    assert all(call.square for call in watched.taken)
    assert all(0 < call.error < call_limit for call in watched.taken)
    assert all(call.error == 0 for call in watched.calls if not call.taken)
    assert f"{expected} of {expected * (1 + cross)} calls low-bit" in summary(caplog)


def test_batched_conditions_share_their_calls(load_tiny, patch, watch, sampling, call_limit):
    watched = watch(patch(load_tiny()))
    sampling.sample(watched.model, steps=4)
    assert len(watched.taken) == BLOCKS * 4 and {call.conditions for call in watched.taken} == {2}
    assert all(0 < call.error < call_limit for call in watched.taken)


def psnr_of(sampling, model, patched):
    return sampling.psnr(sampling.sample(patched), sampling.sample(model))


def test_the_latent_is_close_and_not_equal(load_tiny, patch, sampling, psnr_limit):
    value = psnr_of(sampling, load_tiny(), patch(load_tiny()))
    assert math.isfinite(value) and value > psnr_limit


def test_the_latent_test_fails_for_a_pass_through(load_tiny, patch, sampling):
    """An override that hands everything to ComfyUI gives the same latent: not finite."""
    passing = patch(load_tiny())
    passing.model_options["transformer_options"]["optimized_attention_override"] = (
        lambda func, *args, **kwargs: func(*args, **kwargs)
    )
    assert psnr_of(sampling, load_tiny(), passing) == math.inf


def test_l01_a_run_without_the_node_makes_no_call_into_us(load_tiny, patch, sampling, monkeypatch):
    from comfyui_vc_attention.nodes.model_patch import AttentionOverride

    model = load_tiny()
    before = sampling.sample(model)
    sampling.sample(patch(model))
    entered = []
    original = AttentionOverride.__call__
    monkeypatch.setattr(
        AttentionOverride, "__call__", lambda *a, **kw: entered.append(1) or original(*a, **kw)
    )
    after = sampling.sample(model)
    assert not entered and torch.equal(before, after)
    sampling.sample(patch(model))
    assert entered  # the counter works


def test_two_runs_and_another_model_between_are_bit_identical(load_tiny, patch, sampling):
    patched, other = patch(load_tiny()), patch(load_tiny(seed=1))
    first = sampling.sample(patched)
    sampling.sample(other)
    assert torch.equal(first, sampling.sample(patched))
    assert torch.equal(first, sampling.sample(patched.clone()))


def test_l04_auto_off_auto(load_tiny, patch, sampling):
    from comfyui_vc_attention.nodes.model_patch import overrides_of

    model = load_tiny()
    exact = sampling.sample(model)
    first = patch(model)
    off = patch(first, precision="off")
    again = patch(off)
    assert [len(overrides_of(m)) for m in (first, off, again)] == [1, 0, 1]
    assert torch.equal(sampling.sample(off), exact)
    assert torch.equal(sampling.sample(first), sampling.sample(again))


SAMPLERS = ["euler", "heun", "heunpp2", "dpm_2", "dpmpp_2m", "res_multistep", "uni_pc", "seeds_3", "dpm_fast"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_groups_in_the_first_quarter(load_tiny, patch, watch, sampling, caplog, sampler):
    """8 steps: the first two, at whatever sigmas a sampler evaluates in them."""
    watched = watch(patch(load_tiny()))
    sampling.sample(watched.model, steps=8, sampler=sampler)
    taken = watched.taken
    end = taken[0].schedule[2]
    assert all(call.grouping == (call.step_sigma > end * 1.0001) for call in taken)
    assert any(call.grouping for call in taken) and not all(call.grouping for call in taken)
    # dpm_fast goes its own way and evaluates only once before the window ends
    assert f"grouped in {1 if sampler == 'dpm_fast' else 2} of 8 steps" in summary(caplog)


def test_dpm_adaptive_finds_its_own_way(load_tiny, patch, watch, sampling):
    watched = watch(patch(load_tiny(), grouping_window=0.25))
    sigmas = sampling.schedule(watched.model, 4)
    sampling.sample(watched.model, steps=4, sampler="dpm_adaptive")
    assert all(call.grouping == (call.step_sigma > sigmas[1] * 1.0001) for call in watched.taken)


def grouped_steps(sampling, watched, steps):
    sigmas = [round(float(sigma), 4) for sigma in sampling.schedule(watched.model, steps)]
    return [sigmas.index(sigma) for sigma in watched.grouped_sigmas]


@pytest.mark.parametrize(
    "start, end, expected", [(0, 4, [0, 1]), (0, 1, [0]), (1, 8, [1]), (2, 8, []), (4, 8, [])]
)
def test_ranges_of_steps_measure_the_window_on_the_whole(
    load_tiny, patch, watch, sampling, start, end, expected
):
    """KSamplerAdvanced from step to step of 8."""
    watched = watch(patch(load_tiny()))
    sampling.sample(watched.model, steps=8, start_step=start, last_step=end, force_full_denoise=False)
    assert grouped_steps(sampling, watched, 8) == expected


def test_denoise_below_one_starts_where_it_starts(load_tiny, patch, watch, sampling):
    latent = torch.randn(sampling.empty_latent().shape, generator=torch.Generator().manual_seed(3))
    half = watch(patch(load_tiny()))
    sampling.sample(half.model, steps=4, denoise=0.5, latent=latent)
    assert half.taken and not any(call.grouping for call in half.taken)
    most = watch(patch(load_tiny()))
    sampling.sample(most.model, steps=7, denoise=7 / 8, latent=latent)  # the last 7 of 8 steps
    assert grouped_steps(sampling, most, 8) == [1]


@pytest.mark.parametrize("split, high_steps, low_steps", [(4, [0, 1], []), (1, [0], [1])])
def test_l12_two_experts_share_one_window(load_tiny, patch, watch, sampling, split, high_steps, low_steps):
    """Wan 2.2: the low-noise expert groups only while its sigma is inside the whole schedule's window."""
    high, low = watch(patch(load_tiny(seed=21))), watch(patch(load_tiny(seed=22)))
    middle = sampling.sample(high.model, steps=8, last_step=split, force_full_denoise=False)
    sampling.sample(
        low.model, steps=8, start_step=split, last_step=10000, disable_noise=True, latent=middle,
        force_full_denoise=True,
    )  # fmt: skip
    assert grouped_steps(sampling, high, 8) == high_steps and grouped_steps(sampling, low, 8) == low_steps
    assert len(high.taken) == BLOCKS * split and len(low.taken) == BLOCKS * (8 - split)


def test_vace_blocks_under_one_number_keep_their_own_orders(load_tiny, patch, watch, sampling, call_limit):
    watched = watch(patch(load_tiny("vace")))
    runs = runs_of(watched)
    sampling.sample(watched.model, steps=2, kind="vace")
    per_forward = BLOCKS * 2  # each control block runs under the number of a main block
    assert len(watched.taken) == per_forward * 2
    assert all(0 < call.error < call_limit for call in watched.taken)
    assert runs[0].report.groupings_made == per_forward * 2  # one per condition


@pytest.mark.parametrize("kind", ["t2v", "i2v", "vace"])
def test_d10_text_as_long_as_the_clip(load_tiny, patch, watch, sampling, kind):
    """Self- and cross-attention then look the same; the model's modules tell which is which."""
    watched = watch(patch(load_tiny(kind)))
    modules = []
    for block in [*watched.model.model.diffusion_model.blocks, *vace_blocks(watched.model)]:
        for name in ("self_attn", "cross_attn"):
            module = getattr(block, name)
            modules.append((module, module.register_forward_pre_hook(lambda *_, n=name: order.append(n))))
    order = []
    try:
        sampling.sample(watched.model, steps=2, kind=kind, text_tokens=48)
    finally:
        for _, hook in modules:
            hook.remove()
    calls = iter(watched.calls)
    for name in order:
        call = next(calls)
        if name == "cross_attn" and kind == "i2v":
            assert not call.taken  # the image
            call = next(calls)
        assert call.square and call.taken == (name == "self_attn")
    assert next(calls, None) is None


def vace_blocks(model):
    return getattr(model.model.diffusion_model, "vace_blocks", [])


def runs_of(watched):
    """The runs that the watched model will start, as they start."""
    from comfyui_vc_attention.nodes.sampling_hooks import RUN

    runs = []
    original = watched.__class__.__call__

    class Listening(watched.__class__):
        def __call__(self, func, q, k, v, heads, *args, **kwargs):
            run = kwargs["transformer_options"].get(RUN)
            if run is not None and run not in runs:
                runs.append(run)
            return original(self, func, q, k, v, heads, *args, **kwargs)

    watched.__class__ = Listening
    return runs


def test_a_batch_of_latents_is_grouped_row_by_row(load_tiny, patch, sampling, psnr_limit):
    """Row for row what each latent gets alone, up to the batch's own rounding in the rest of the model."""
    model = patch(load_tiny())
    batch = sampling.sample(model, batch=2, seed=5)
    exact = sampling.sample(load_tiny(), batch=2, seed=5)
    assert all(sampling.psnr(batch[row], exact[row]) > psnr_limit for row in (0, 1))


def test_cfg_1_makes_one_call_per_block(load_tiny, patch, watch, sampling):
    watched = watch(patch(load_tiny()))
    sampling.sample(watched.model, steps=2, cfg=1.0)
    assert len(watched.taken) == BLOCKS * 2 and {call.conditions for call in watched.taken} == {1}


def test_batching_may_flip_in_the_middle_of_a_run(load_tiny, patch, watch, sampling, monkeypatch, call_limit):
    """Little free memory splits the conditions. The orders stay theirs, so the result stays close."""
    watched = watch(patch(load_tiny(), grouping_window=1.0))
    runs = runs_of(watched)
    free = itertools.cycle(
        (0, 0, 10**12)
    )  # asked twice in an evaluation that splits, once in one that does not
    monkeypatch.setattr(watched.model, "get_free_memory", lambda device=None: next(free))
    sampling.sample(watched.model, steps=4)
    assert {call.conditions for call in watched.taken} == {1, 2}
    assert all(0 < call.error < call_limit for call in watched.taken)
    assert runs[0].report.groupings_made == BLOCKS * 2  # made in step 0, for both, and never again


def test_memory_is_given_back_when_the_window_closes_and_at_the_end(load_tiny, patch, watch, sampling):
    watched = watch(patch(load_tiny()))
    runs, held = runs_of(watched), []
    sampling.sample(watched.model, steps=8, callback=lambda *_: held.append(runs[0].store.held_bytes))
    assert held[0] > 0 and held[1] > 0 and held[2:] == [0] * 6
    tokens = 48  # and no centroids: in a window of two steps nothing is grouped again
    assert runs[0].report.state_bytes == BLOCKS * 2 * 2 * tokens * 4


def test_an_interrupt_frees_the_run_and_the_next_is_as_ever(load_tiny, patch, watch, sampling):
    import comfy.model_management

    patched = patch(load_tiny(), grouping_window=1.0)
    expected = sampling.sample(patched)
    watched = watch(patched)
    runs = runs_of(watched)

    def interrupt(step, *_):
        if step == 1:
            raise comfy.model_management.InterruptProcessingException

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sampling.sample(watched.model, callback=interrupt)
    assert runs[0].report.groupings_made and runs[0].store.held_bytes == 0
    assert torch.equal(sampling.sample(patched), expected)


def test_a_kernel_error_gives_the_usual_picture(load_tiny, patch, sampling, monkeypatch, caplog):
    from comfyui_vc_attention.nodes import model_patch

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image is available")

    exact = sampling.sample(load_tiny())
    monkeypatch.setattr(model_patch, "attend_call", broken)
    assert torch.equal(sampling.sample(patch(load_tiny())), exact)
    assert sum("off for this run" in message for message in caplog.messages) == 1


def test_n22_an_unknown_model_passes_unchanged(patch, caplog):
    """ComfyUI's patcher around a network of no family: a clone of it, with nothing of ours but the reason."""
    from comfy.model_patcher import ModelPatcher
    from comfyui_vc_attention.nodes.not_active import REASON

    network = torch.nn.Module()
    network.diffusion_model = torch.nn.Linear(1, 1)
    unknown = ModelPatcher(network, torch.device("cpu"), torch.device("cpu"))
    passed = patch(unknown)
    assert passed.model is network and "Linear is not a model" in summary(caplog)
    assert "Linear is not a model" in passed.model_options.pop(REASON)
    assert passed.model_options == unknown.model_options
    assert passed.wrappers == unknown.wrappers and passed.callbacks == unknown.callbacks
