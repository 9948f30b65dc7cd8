import pytest
from comfyui_vc_attention.nodes.attention_capture import CaptureOverride
from comfyui_vc_attention.nodes.capture_node import VCAttentionCapture
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE


def test_a_known_model_gets_an_outermost_override(make_model):
    model = make_model()
    (captured,) = VCAttentionCapture.execute(model, blocks="0-2").args
    assert isinstance(captured.model_options["transformer_options"][OVERRIDE], CaptureOverride)
    assert OVERRIDE not in model.model_options["transformer_options"]


def test_an_unknown_model_passes_through(make_model):
    model = make_model("comfy.ldm.flux.model", "Flux")
    assert VCAttentionCapture.execute(model).args == (model,)


def test_lists_that_are_none_are_refused(make_model):
    with pytest.raises(ValueError, match="numbers and ranges"):
        VCAttentionCapture.execute(make_model(), blocks="all")
