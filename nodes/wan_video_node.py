"""The node for models of WanVideoWrapper: WANVIDEOMODEL in, WANVIDEOMODEL out."""

import torch
from comfy_api.latest import io

from .not_active import with_reason
from .patch_node import OFF, WAY_OUT, advanced_inputs, main_inputs, problem_on, ready_settings, settings_of
from .patch_settings import PatchSettings
from .run_report import say
from .wan_video_patch import is_wan_video, patch_wan_video, remove_wan_video_patch


class VCAttentionPatchWanVideo(io.ComfyNode):
    """VC-Attention in a model of WanVideoWrapper, LongCat-Video among them."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionPatchWanVideo",
            display_name="VC-Attention Patch (WanVideoWrapper)",
            category="model/patch",
            description="Faster self-attention for models of WanVideoWrapper: LongCat-Video and Wan. Put it "
            "between WanVideo Model Loader and WanVideo Sampler.",
            search_aliases=["sage", "attention", "fp8", "nvfp4", "speed", "longcat", "kijai"],
            inputs=[
                wan_video_model().Input("model", tooltip="From WanVideo Model Loader, or a node after it."),
                *main_inputs(),
                *advanced_inputs(),
            ],
            outputs=[wan_video_model().Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
            # equal nodes would share one cached model, which knows one node's id to report to
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model, **widgets):
        if widgets.get("precision") == "off":
            return io.NodeOutput(unpatched(model, OFF))
        return io.NodeOutput(patch_model(model, settings_of(cls, **widgets)))


def wan_video_model():
    return io.Custom("WANVIDEOMODEL")


def patch_model(model, settings: PatchSettings):
    """A patched clone; an unpatched one, with one line, if the model is unknown or nothing can run.

    Raises ValueError if the user asked for a precision or a kernel that cannot run here.
    """
    diffusion_model = model.model.diffusion_model
    if not is_wan_video(diffusion_model):
        reason = f"{type(diffusion_model).__name__} is not a model of WanVideoWrapper"
        say(f"{reason}; it passes through unchanged", settings.node_id)
        return unpatched(model, reason)
    if (getattr(model.model, "pipeline", {}).get("compile_args") or {}).get("fullgraph"):
        reason = "fullgraph is on in WanVideo Torch Compile Settings, and the patch stands outside the graph"
        if settings.by_name:
            raise ValueError(f"VC-Attention cannot run here: {reason}. {WAY_OUT}")
        say(f"not active, output is unchanged: {reason}", settings.node_id)
        return unpatched(model, reason)
    device = torch.device(model.load_device)
    problem = problem_on(device, model.model["base_dtype"], settings.config)
    ready = ready_settings(problem, device, settings)
    if isinstance(ready, str):
        return unpatched(model, ready)
    return patch_wan_video(model, ready)


def unpatched(model, reason: str):
    """A clone without our patch that knows why."""
    return with_reason(remove_wan_video_patch(model) or model.clone(), reason)
