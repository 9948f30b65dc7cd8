"""4 bits in the middle of the schedule, 8 at its ends: what runs, and what the report says of it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, choose_kernel
from comfyui_vc_attention.kernels.prepare import reference
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2
from comfyui_vc_attention.nodes import patch_node
from comfyui_vc_attention.nodes.families import family_of
from comfyui_vc_attention.nodes.model_patch import patch_attention
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.report_text import report_text
from comfyui_vc_attention.nodes.run_report import RunReport
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE

from tests.evidence.bounds import bound

FOUR, EIGHT = "reference nvfp4", "reference int8_int8"
EIGHT_BITS = bound("int8_int8, means, sequence")  # relative L2 that 8 bits keep and 4 bits do not


def settings(precision="4-bit", kernel="reference", **choices):
    return PatchSettings(VCConfig(precision, clusters=2), kernel, min_tokens=1, **choices)


def sampled(make_model, sigmas, chosen, evaluations=None):
    """(report, relative L2 of each call) of one run: a block's self-attention in each evaluation."""
    model = make_model()
    patched = patch_attention(model, chosen, family_of(model.model.diffusion_model))
    override = patched.model_options["transformer_options"][OVERRIDE]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 140, 2 * 128, generator=generator) for _ in range(3))
    heads_first = [x.unflatten(-1, (2, 128)).transpose(1, 2) for x in (q, k, v)]
    exact = exact_attention(*heads_first)[0].transpose(1, 2).flatten(2)

    def forward(options):
        options = {**options, "block_type": "double", "block_index": 0, "block": ("double", 0)}
        return override(lambda q, *args, **kwargs: q, q, k, v, 2, transformer_options=options)

    outputs = patched.sample(sigmas, forward, conditions=(((0,), 40),), evaluations=evaluations)
    return override.finished[-1], [relative_l2(out, exact) for out in outputs]


def test_8_bit_ends_and_a_4_bit_middle(make_model, simple_sigmas):
    report, errors = sampled(make_model, simple_sigmas(20), settings())
    assert report.kernels == {FOUR: 12, EIGHT: 8}
    assert [error > EIGHT_BITS for error in errors] == [4 <= step < 16 for step in range(20)]
    assert report.record.steps_of("nvfp4") == set(range(4, 16))
    told = "4 bits in 12 of 20 steps, 8 bits in the first and the last ones"
    assert told in report.summary() and told in report_text([report])
    assert len(report.grouped_steps) == 5  # the window and the precision are apart


@pytest.mark.parametrize(
    ("config", "means"),
    [
        (VCConfig("8-bit", value_format="int8"), set(range(20))),
        (VCConfig("8-bit", value_format="fp8"), set(range(5))),
        (VCConfig("8-bit", expcast="on"), set(range(5))),
        (VCConfig("4-bit"), set(range(20))),
    ],
    ids=["int8", "fp8", "expcast", "hybrid"],
)
def test_after_the_window_all_but_fp8_have_means(make_model, simple_sigmas, monkeypatch, config, means):
    prepare, calls = reference.prepare, []

    def recorded(q, k, v, recipe, *, order, **options):
        calls.append((order is not None, recipe.demean))
        return prepare(q, k, v, recipe, order=order, **options)

    monkeypatch.setattr(reference, "prepare", recorded)
    chosen = replace(settings(), config=replace(config, clusters=2))
    report, _ = sampled(make_model, simple_sigmas(20), chosen)
    assert calls == [(step < 5, step in means) for step in range(20)]
    assert report.grouped_steps == set(range(5))  # token order is no grouping


def test_few_steps_all_run_at_8_bits_and_the_report_says_so(make_model, simple_sigmas):
    report, errors = sampled(make_model, simple_sigmas(4), settings())
    assert report.kernels == {EIGHT: 4} and max(errors) < EIGHT_BITS
    told = "no 4 bits: with 4 steps each counts, so all ran at 8 bits"
    assert told in report.summary() and told in report_text([report])


@pytest.mark.parametrize(
    "part, told",
    [
        (slice(10, 21), "4 bits in 10 of 10 steps; "),
        (slice(0, 11), "4 bits in 4 of 10 steps, 8 bits in the first ones"),
        (slice(20, 31), "4 bits in 4 of 10 steps, 8 bits in the last ones"),
        (slice(26, 31), "no 4 bits: every step lies at an end of the denoising, which stays at 8 bits"),
        (slice(12, 14), "4 bits in 1 of 1 step; "),
    ],
)
def test_a_part_of_a_schedule_is_told_as_it_ran(make_model, simple_sigmas, part, told):
    """A range of steps, or denoise below 1, may hold one end of the denoising or none."""
    report, _ = sampled(make_model, simple_sigmas(30)[part], settings())
    assert told in report.summary() + "; " and told.rstrip("; ") in report_text([report])


def test_a_stopped_hybrid_run_claims_no_last_steps():
    report = RunReport("Wan", 20, settings())
    for step in range(2):
        report.record.add(step, 0, EIGHT)
    report.taken = 2
    assert report.precisions() == "4 bits in 0 of 20 steps, 8 bits in the first ones"


def test_evaluations_are_counted_as_they_ran(make_model, simple_sigmas):
    """Two evaluations a step, as second-order samplers make: the interval decides, not the count."""
    sigmas = simple_sigmas(12)
    evaluations = [s for a, b in pairwise(sigmas) for s in (a, 0.5 * (a + b))]
    report, _ = sampled(make_model, sigmas, settings(), evaluations)
    assert report.kernels == {FOUR: 12, EIGHT: 12}


def test_8_bits_asked_for_are_8_bits(make_model, simple_sigmas):
    report, _ = sampled(make_model, simple_sigmas(12), settings("8-bit"))
    assert report.kernels == {EIGHT: 12} and report.precisions() is None


def test_a_kernel_that_knows_4_bits_only_runs_every_step(make_model, simple_sigmas):
    chosen = settings(kernel="cuda_nvfp4_sm120")
    assert not chosen.hybrid and chosen.configs == (chosen.config,)
    report, _ = sampled(make_model, simple_sigmas(12), chosen)  # not on this card: counted, not hidden
    assert report.taken == 0 and sum(report.left.values()) == 12
    assert any("cuda_nvfp4_sm120: needs" in reason for reason in report.left)


def test_what_a_hybrid_run_may_use():
    chosen = PatchSettings(VCConfig("4-bit", expcast="off", clusters=7))
    assert chosen.hybrid and chosen.configs == (chosen.config, chosen.edge_config)
    assert chosen.edge_config == VCConfig("8-bit", expcast="off", clusters=7)
    assert not PatchSettings(VCConfig()).hybrid


def test_4_bits_that_cannot_run_are_an_error_before_sampling(make_model):
    with pytest.raises(ValueError, match="VC-Attention cannot run here: "):
        patch_node.VCAttentionPatch.execute(make_model(), precision="4-bit")


def test_8_bits_that_cannot_run_are_said_when_the_node_executes(make_model, monkeypatch):
    said = []
    monkeypatch.setattr(patch_node, "say", lambda text, node_id=None: said.append(text))

    def choose(problem, device, chosen):
        if problem.config.precision == "8-bit":
            return type(choose_kernel(problem))(None, "every kernel needs a card")
        return choose_kernel(problem, "reference")

    monkeypatch.setattr(patch_node, "choose_tested", choose)
    patch_node.VCAttentionPatch.execute(make_model(), precision="4-bit")
    assert said == ["the first and last steps keep the usual attention: every kernel needs a card"]
