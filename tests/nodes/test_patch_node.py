import asyncio
import logging

import pytest
import torch
from comfyui_vc_attention.kernels import KERNELS
from comfyui_vc_attention.nodes.extension import VCAttentionExtension
from comfyui_vc_attention.nodes.model_patch import overrides_of
from comfyui_vc_attention.nodes.not_active import REASON, why_not_active
from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch, expected_problem
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE

# Saved workflows store widget values by place: ids, order and defaults may only be appended to.
WIDGETS = [
    ("precision", "auto"),
    ("expcast", "auto"),
    ("grouping_window", 0.25),
    ("value_format", "auto"),
    ("regroup_every", 4),
    ("clusters", 128),
    ("start_percent", 0.0),
    ("end_percent", 1.0),
    ("exact_blocks", ""),
    ("min_tokens", 0),
    ("kernel", "auto"),
]


def settings_of(model):
    return model.model_options["transformer_options"][OVERRIDE].settings


def run_node(model, **widgets):
    return VCAttentionPatch.execute(model, **{"kernel": "reference", **widgets}).args


def test_l09_widgets_are_the_documented_ones_in_their_order():
    schema = VCAttentionPatch.define_schema()
    ids = [made.id for made in schema.inputs]
    assert ids == ["model", *(name for name, _ in WIDGETS), "model_2"]
    assert [(made.id, made.default) for made in schema.inputs[1:-1]] == WIDGETS
    assert schema.node_id == "VCAttentionPatch" and schema.display_name == "VC-Attention Patch"
    assert schema.category == "model/patch" and len(schema.outputs) == 2
    assert schema.search_aliases == ["sage", "attention", "fp8", "nvfp4", "speed"]


def test_l09_every_input_added_after_the_first_four_may_be_missing():
    schema = VCAttentionPatch.define_schema()
    required = [made.id for made in schema.inputs if not getattr(made, "optional", False)]
    assert required == ["model", "precision", "expcast", "grouping_window"]
    assert all(made.tooltip for made in schema.inputs)


def test_kernel_lists_every_row_on_every_machine():
    kernel = next(made for made in VCAttentionPatch.define_schema().inputs if made.id == "kernel")
    assert kernel.options == ["auto", *(spec.name for spec in KERNELS)]


def test_l10_choices_are_stable_lower_case_words():
    by_id = {made.id: made for made in VCAttentionPatch.define_schema().inputs}
    assert by_id["precision"].options == ["auto", "8-bit", "4-bit", "off"]
    assert by_id["expcast"].options == ["auto", "on", "off"]
    assert by_id["value_format"].options == ["auto", "fp8", "int8"]


def test_the_extension_lists_the_nodes():
    names = [node.__name__ for node in asyncio.run(VCAttentionExtension().get_node_list())]
    assert names[0] == "VCAttentionPatch" and "VCAttentionSample" in names


def test_widgets_arrive_in_the_settings(make_model):
    patched, second = run_node(
        make_model(), precision="8-bit", expcast="off", grouping_window=0.5, value_format="fp8",
        regroup_every=2, clusters=64, start_percent=0.1, end_percent=0.9, exact_blocks="0,2-3", min_tokens=5,
    )  # fmt: skip
    settings = settings_of(patched)
    assert (settings.config.precision, settings.config.expcast) == ("8-bit", "off")
    assert (settings.config.value_format, settings.config.clusters) == ("fp8", 64)
    assert (settings.grouping_window, settings.regroup_every, settings.shortest) == (0.5, 2, 5)
    assert (settings.start_percent, settings.end_percent) == (0.1, 0.9)
    assert settings.exact_blocks == {0, 2, 3} and second is None


def test_l12_both_experts_are_patched_and_share_nothing(make_model):
    high, low = run_node(make_model(), model_2=make_model())
    assert [len(overrides_of(m)) for m in (high, low)] == [1, 1]
    overrides = [m.model_options["transformer_options"][OVERRIDE] for m in (high, low)]
    assert overrides[0] is not overrides[1]


def passes_through(model, base, reason):
    """Whether model is base but for the reason it carries."""
    options = {name: value for name, value in model.model_options.items() if name != REASON}
    alike = options == base.model_options and model.wrappers == base.wrappers and model.model is base.model
    return alike and reason in why_not_active(model)


def test_off_restores_both_models(make_model):
    base, base_2 = make_model(), make_model()
    patched = run_node(base, model_2=base_2)
    off = VCAttentionPatch.execute(patched[0], precision="off", model_2=patched[1]).args
    assert [len(overrides_of(m)) for m in off] == [0, 0]
    untouched = VCAttentionPatch.execute(base, precision="off", model_2=base_2).args
    assert all(
        passes_through(m, b, "precision is off") for m, b in zip(untouched, (base, base_2), strict=True)
    )
    assert VCAttentionPatch.execute(base, precision="off").args[1] is None


def test_n22_an_unknown_model_passes_with_one_line(make_model, caplog):
    other = make_model("comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel")
    with caplog.at_level(logging.INFO, "vc_attention"):
        patched, _ = run_node(other)
    assert passes_through(patched, other, "UNetModel is not a model this node knows")
    assert len(caplog.messages) == 1 and "UNetModel" in caplog.messages[0]


def test_auto_falls_back_and_says_why(make_model, caplog):
    model = make_model()
    with caplog.at_level(logging.INFO, "vc_attention"):
        patched, _ = VCAttentionPatch.execute(model).args
    assert passes_through(patched, model, "needs an NVIDIA GPU") and len(caplog.messages) == 1
    assert "output is unchanged" in caplog.messages[0] and "got a CPU" in caplog.messages[0]


@pytest.mark.parametrize(
    "widgets", [{"precision": "8-bit"}, {"precision": "4-bit"}, {"kernel": "triton_int8_fp8"}]
)
def test_an_explicit_choice_that_cannot_run_raises_before_sampling(make_model, widgets):
    with pytest.raises(ValueError, match=r"cannot run here: .*got a CPU"):
        VCAttentionPatch.execute(make_model(), **widgets)


@pytest.mark.parametrize(
    "widgets",
    [
        {"expcast": "on", "value_format": "int8"},
        {"precision": "4-bit", "expcast": "on"},
        {"precision": "4-bit", "value_format": "fp8"},
        {"exact_blocks": "x"},
        {"start_percent": 0.9, "end_percent": 0.1},
    ],
)
def test_combinations_without_a_meaning_raise(make_model, widgets):
    with pytest.raises(ValueError, match="got"):
        run_node(make_model(), **widgets)


def test_the_expected_problem_has_the_models_dtype(make_model):
    problem = expected_problem(make_model(), settings_of(run_node(make_model())[0]).config)
    assert problem.dtypes == (torch.float32,) * 3 and problem.device_type == "cpu" and problem.head_dim == 128
