import logging

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens
from comfyui_vc_attention.nodes.families import family_of
from comfyui_vc_attention.nodes.model_patch import patch_attention
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.sampling_hooks import FORWARD, OVERRIDE, RUN, chain_of, name_of


@pytest.fixture
def model(make_model):
    made = make_model()
    settings = PatchSettings(VCConfig(clusters=4), "reference", min_tokens=1)
    return patch_attention(made, settings, family_of(made.model.diffusion_model))


def test_each_call_of_the_model_gets_its_own_forward(model, simple_sigmas):
    forwards = model.sample(
        simple_sigmas(4), lambda options: options[FORWARD], conditions=(((0,), 7), ((1,), 9))
    )
    assert (
        len({id(forward) for forward in forwards}) == 8
        and len({id(forward.run) for forward in forwards}) == 1
    )
    assert [forward.notes.text_tokens for forward in forwards[:2]] == [7, 9]
    assert [forward.plan.step for forward in forwards] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_runs_share_nothing(model, simple_sigmas):
    runs = [model.sample(simple_sigmas(2), lambda options: options[FORWARD].run)[0] for _ in range(2)]
    assert runs[0] is not runs[1]
    clone_run = model.clone().sample(simple_sigmas(2), lambda options: options[FORWARD].run)[0]
    assert clone_run not in runs


def test_nothing_is_left_on_the_model(model, simple_sigmas):
    model.sample(simple_sigmas(2), lambda options: None)
    assert set(model.model_options["transformer_options"]) == {OVERRIDE}


def test_sigma_is_read_once_per_evaluation(model, simple_sigmas, monkeypatch):
    reads = []
    original = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append(1) or original(self))
    model.sample(simple_sigmas(4), lambda options: None, conditions=(((0,), 7), ((1,), 9)))
    assert len(reads) == 4


def test_a_sampler_that_announces_nothing_still_has_a_plan(model, simple_sigmas):
    model.wrappers["predict_noise"].clear()
    plans = model.sample(simple_sigmas(4), lambda options: options[FORWARD].plan)
    assert plans[0].step == 0 and plans[0].grouping


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_aborted_run_frees_what_it_held(model, simple_sigmas, error):
    held = []

    def forward(options):
        run = options[FORWARD].run
        v = torch.randn(1, 1, 32, 16)
        run.store.grouping("layer", ["cond"], v, lambda v, previous, rows: group_tokens(v, 4), 0, 4)
        held.append((run, run.store.held_bytes))
        raise error

    with pytest.raises(error):
        model.sample(simple_sigmas(4), forward)
    run, before = held[0]
    assert before > 0 and run.store.held_bytes == 0
    assert model.sample(simple_sigmas(2), lambda options: options[FORWARD].run)[0] is not run


def test_orders_are_freed_at_cleanup(model, simple_sigmas):
    """Before the host counts its free memory, which is before OUTER_SAMPLE returns."""
    order = []

    def forward(options):
        run = options[FORWARD].run
        original = run.store.clear
        run.store.clear = lambda *args: order.append("cleared") or original(*args)

    model.add_callback_with_key("on_cleanup", "test", lambda patcher: order.append("host's turn"))
    model.sample([1.0, 0.0], forward)
    assert order.index("cleared") < order.index("host's turn")


def test_zero_calls_name_who_replaced_us(model, simple_sigmas, caplog):
    def other_pack(func, *args, **kwargs):
        return func(*args, **kwargs)

    model.model_options["transformer_options"][OVERRIDE] = other_pack
    with caplog.at_level(logging.INFO, "vc_attention"):
        model.sample(simple_sigmas(2), lambda options: None)
    assert "received 0 calls" in caplog.messages[-1] and "other_pack replaced" in caplog.messages[-1]
    assert caplog.records[-1].levelno == logging.WARNING


def test_zero_calls_name_a_replaced_forward(model, simple_sigmas, caplog):
    def fast_forward():
        pass

    model.object_patches = {"diffusion_model.blocks.0.self_attn.forward": fast_forward}
    with caplog.at_level(logging.INFO, "vc_attention"):
        model.sample(simple_sigmas(2), lambda options: None)
    assert "fast_forward on diffusion_model.blocks.0.self_attn.forward replaced" in caplog.messages[-1]


def test_zero_calls_name_a_replaced_block(model, simple_sigmas, caplog):
    def sparse_block():
        pass

    model.model_options["transformer_options"]["patches_replace"] = {
        "dit": {("double_block", 0): sparse_block}
    }
    with caplog.at_level(logging.INFO, "vc_attention"):
        model.sample(simple_sigmas(2), lambda options: None)
    assert "sparse_block replaced" in caplog.messages[-1]


def test_a_prompt_that_fails_before_any_call_is_not_blamed_on_others(model, simple_sigmas, caplog):
    def forward(options):
        raise RuntimeError("no such conditioning")

    with caplog.at_level(logging.INFO, "vc_attention"), pytest.raises(RuntimeError):
        model.sample(simple_sigmas(2), forward)
    assert not caplog.messages


def test_progress_is_shown_once_per_step(model, simple_sigmas, monkeypatch):
    from comfyui_vc_attention.nodes import sampling_hooks

    shown = []
    monkeypatch.setattr(sampling_hooks, "show_text", lambda text, node: shown.append(text))
    sigmas = simple_sigmas(3)
    model.sample(
        sigmas, lambda options: None, evaluations=[sigmas[0], sigmas[1], sigmas[1], sigmas[2], sigmas[2]]
    )
    assert [text.split(":")[0] for text in shown[:-1]] == ["step 1 of 3", "step 2 of 3"]


def test_another_patch_run_is_not_ours(model, simple_sigmas):
    def foreign(options):
        return FORWARD in options

    model.wrappers["outer_sample"].clear()
    assert model.sample(simple_sigmas(2), foreign) == [False, False]
    assert RUN not in model.model_options["transformer_options"]


def test_a_chain_that_bites_its_tail_ends():
    class Link:
        _vc_previous = None

    link = Link()
    link._vc_previous = link
    assert list(chain_of(link)) == [link]


def test_names_are_for_people():
    assert name_of(chain_of).endswith("sampling_hooks.chain_of")
    assert name_of(object()) == "builtins.object"
