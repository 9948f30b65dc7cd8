import logging

import pytest
from comfyui_vc_attention.nodes.not_active import why_not_active
from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch
from comfyui_vc_attention.nodes.wan_video_node import VCAttentionPatchWanVideo
from comfyui_vc_attention.nodes.wan_video_patch import HANDLE


def run_node(model, **widgets):
    return VCAttentionPatchWanVideo.execute(model, **{"kernel": "reference", **widgets}).args[0]


def options(model):
    return model.model_options["transformer_options"]


def passes_through(model, base, reason):
    """Whether model is base but for the reason it carries."""
    unchanged = options(model) == options(base) and model.model is base.model
    return unchanged and reason in why_not_active(model)


def test_l09_same_widgets_in_the_same_order_without_model_2():
    ours, native = (node.define_schema() for node in (VCAttentionPatchWanVideo, VCAttentionPatch))
    assert [made.id for made in ours.inputs] == [made.id for made in native.inputs][:-1]
    assert [getattr(made, "default", None) for made in ours.inputs[1:]] == [
        made.default for made in native.inputs[1:-1]
    ]
    assert ours.node_id == "VCAttentionPatchWanVideo"
    assert ours.display_name == "VC-Attention Patch (WanVideoWrapper)"


def test_l17_a_wrapper_model_is_patched_with_the_widgets(wan_video):
    base = wan_video.make_patcher()
    model = run_node(base, grouping_window=0.5, exact_blocks="0", min_tokens=7)
    settings = options(model)[HANDLE].override.settings
    assert (settings.grouping_window, settings.exact_blocks, settings.shortest) == (0.5, {0}, 7)
    assert HANDLE not in options(base)


def test_off_gives_the_model_back(wan_video):
    base = wan_video.make_patcher()
    assert HANDLE not in options(run_node(run_node(base), precision="off"))
    assert passes_through(run_node(base, precision="off"), base, "precision is off")


def test_auto_without_a_kernel_passes_and_says_why(wan_video, caplog):
    caplog.set_level(logging.INFO, "vc_attention")
    base = wan_video.make_patcher()
    assert passes_through(VCAttentionPatchWanVideo.execute(base).args[0], base, "needs an NVIDIA GPU")
    assert "output is unchanged" in caplog.messages[-1]


def test_an_explicit_choice_that_cannot_run_raises(wan_video):
    with pytest.raises(ValueError, match=r"cannot run here: .*got a CPU"):
        VCAttentionPatchWanVideo.execute(wan_video.make_patcher(), precision="8-bit")


def test_n22_another_model_passes_with_one_line(wan_video, caplog):
    caplog.set_level(logging.INFO, "vc_attention")
    base = wan_video.make_patcher()
    base.model.diffusion_model = base.model.diffusion_model.blocks[0]
    assert passes_through(run_node(base), base, "Block is not a model of WanVideoWrapper")
    assert "Block is not a model of WanVideoWrapper" in caplog.messages[-1]


def test_a_full_graph_is_not_broken(wan_video, caplog):
    """A compiled block that must be one graph would raise in the first step."""
    caplog.set_level(logging.INFO, "vc_attention")
    base = wan_video.make_patcher()
    base.model.pipeline["compile_args"] = {"fullgraph": True}
    assert passes_through(VCAttentionPatchWanVideo.execute(base).args[0], base, "fullgraph is on")
    assert "fullgraph is on" in caplog.messages[-1]
    with pytest.raises(ValueError, match="fullgraph is on"):
        run_node(base)
    base.model.pipeline["compile_args"] = {"fullgraph": False}
    assert HANDLE in options(run_node(base))
