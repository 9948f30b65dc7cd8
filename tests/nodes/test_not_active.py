from comfyui_vc_attention.nodes.not_active import why_not_active
from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch
from comfyui_vc_attention.nodes.wan_video_node import VCAttentionPatchWanVideo


def test_the_reason_travels_with_clones_and_leaves_the_model_alone(make_model):
    base = make_model()
    inactive = VCAttentionPatch.execute(base).args[0]
    assert "needs an NVIDIA GPU" in why_not_active(inactive) == why_not_active(inactive.clone())
    assert why_not_active(base) is None


def test_a_patch_after_an_inactive_one_says_nothing_of_it(make_model, wan_video):
    for node, base in (
        (VCAttentionPatch, make_model()),
        (VCAttentionPatchWanVideo, wan_video.make_patcher()),
    ):
        inactive = node.execute(base).args[0]
        assert (
            why_not_active(inactive)
            and why_not_active(node.execute(inactive, kernel="reference").args[0]) is None
        )
