import torch
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.nodes.families import family_of
from comfyui_vc_attention.nodes.model_patch import patch_attention
from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.report_node import NOTHING, VCAttentionReport, reports_of
from comfyui_vc_attention.nodes.run_report import RunReport
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE
from comfyui_vc_attention.nodes.wan_video_node import VCAttentionPatchWanVideo


def sampled(make_model, runs=1):
    """A patched model that has sampled: 3 blocks, 4 steps, 256 tokens."""
    model = make_model()
    settings = PatchSettings(VCConfig(clusters=4), "reference", min_tokens=1, exact_blocks=frozenset({2}))
    patched = patch_attention(model, settings, family_of(model.model.diffusion_model))
    q, k, v = (torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def forward(options):
        for index in range(3):
            call = {**options, "block_index": index, "block_type": "double"}
            options[OVERRIDE](lambda q, k, v, heads, **kw: q, q, k, v, heads=2, transformer_options=call)

    for _ in range(runs):
        patched.sample([1.0, 0.9, 0.8, 0.5, 0.0], forward)
    return patched


def test_the_last_run_is_told(make_model):
    output = VCAttentionReport.execute(sampled(make_model, runs=2), after=None)
    image, text = output.args
    assert image.ndim == 4
    for part in (
        "8 of 12 video attention calls taken",
        "kept exact by exact_blocks",
        "measured error of a call",
    ):
        assert part in text
    assert text.count("settings:") == 1 and output.ui["vc_attention_report"] == [text] and output.ui["images"]


def test_more_runs_on_request_oldest_first(make_model):
    text = VCAttentionReport.execute(sampled(make_model, runs=3), None, runs=2).args[1]
    assert text.count("settings:") == 2


def test_clones_of_the_patched_model_tell_the_same(make_model):
    assert len(reports_of(sampled(make_model).clone())) == 1


def test_both_experts_are_told(make_model):
    text = VCAttentionReport.execute(sampled(make_model), None, model_2=sampled(make_model)).args[1]
    assert text.count("settings:") == 2


def test_an_unpatched_model_gets_advice(make_model):
    output = VCAttentionReport.execute(make_model(), None)
    assert output.args[1] == NOTHING and output.ui["vc_attention_warning"] == [NOTHING]


def test_an_inactive_patch_says_why(make_model):
    inactive = VCAttentionPatch.execute(make_model()).args[0]
    output = VCAttentionReport.execute(inactive, None, model_2=inactive)
    text = output.args[1]
    assert (
        text.startswith("VC-Attention was not active: every kernel needs an NVIDIA GPU") and "\n" not in text
    )
    assert output.ui["vc_attention_warning"] == [text]
    both = VCAttentionReport.execute(sampled(make_model), None, model_2=inactive).args[1]
    assert both.splitlines()[-1] == text and "8 of 12 video attention calls taken" in both


def test_the_settings_say_what_auto_came_to(make_model):
    patched = VCAttentionPatch.execute(make_model(), kernel="reference", min_tokens=1).args[0]
    override = patched.model_options["transformer_options"][OVERRIDE]
    override.finished.append(RunReport("Wan", 4, override.settings))
    assert (
        "settings: precision auto (8-bit), expcast auto" in VCAttentionReport.execute(patched, None).args[1]
    )
    assert (
        "settings: precision 8-bit, expcast" in VCAttentionReport.execute(sampled(make_model), None).args[1]
    )


def test_a_model_of_the_wrapper_is_told(wan_video):
    model = VCAttentionPatchWanVideo.execute(
        wan_video.make_patcher(), kernel="reference", min_tokens=1, clusters=4
    ).args[0]
    assert VCAttentionReport.execute(model, None).args[1] == NOTHING
    wan_video.sample(model)
    text = VCAttentionReport.execute(model.clone(), None).args[1]
    assert "LongCat-Video (WanVideoWrapper)" in text and "video attention calls taken" in text
    off = VCAttentionPatchWanVideo.execute(model, precision="off").args[0]
    assert VCAttentionReport.execute(off, None).args[1] == "VC-Attention was not active: precision is off"
