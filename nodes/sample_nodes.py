"""Nodes that make a clip with the pack's own tiny Wan model: the patch can be tried without a download."""

from pathlib import Path

import torch
from comfy_api.latest import io

from .sample_clip import LATENT_SHAPE, PROMPTS, decode_latent, prompt_embedding

WEIGHTS = Path(__file__).parent / "sample_model" / "wan_sample.safetensors"
CATEGORY = "VC-Attention/sample"


class VCAttentionSample(io.ComfyNode):
    """The sample model with everything a sampler needs: MODEL, positive, negative and an empty LATENT."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionSample",
            display_name="VC-Attention Sample Model",
            category=CATEGORY,
            description="A tiny Wan 2.1 text-to-video model that ships with the pack, with its conditioning "
            "and an empty latent. Sample it with any sampler, then use VC-Attention Sample Decode.",
            search_aliases=["wan", "test", "demo"],
            inputs=[
                io.Combo.Input(
                    "prompt",
                    options=list(PROMPTS),
                    default=PROMPTS[0],
                    tooltip="What the clip shows. The model knows these prompts and no others.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
                io.Latent.Output(display_name="LATENT"),
            ],
        )

    @classmethod
    def execute(cls, prompt):
        """Loads the shipped file as ComfyUI's own loader does. Raises FileNotFoundError if it is missing."""
        import comfy.sd

        if not WEIGHTS.exists():
            raise FileNotFoundError(f"the sample model ships with the pack, but {WEIGHTS} is missing")
        model = comfy.sd.load_diffusion_model(str(WEIGHTS))
        positive, negative = ([[prompt_embedding(text), {}]] for text in (prompt, ""))
        return io.NodeOutput(model, positive, negative, {"samples": torch.zeros(1, *LATENT_SHAPE)})


class VCAttentionSampleDecode(io.ComfyNode):
    """LATENT of the sample model -> IMAGE [B * T, H, W, 3] in 0..1: a fixed linear map, no VAE."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionSampleDecode",
            display_name="VC-Attention Sample Decode",
            category=CATEGORY,
            description="Turns a latent of the VC-Attention sample model into pictures. It is no VAE: "
            "latents of other models come out as noise.",
            inputs=[
                io.Latent.Input("latent", tooltip="A sampled latent of VC-Attention Sample Model."),
                io.Int.Input(
                    "enlarge",
                    default=4,
                    min=1,
                    max=8,
                    tooltip="How many times larger the 96 x 96 pictures become. 1: the model's own pixels.",
                ),
            ],
            outputs=[io.Image.Output(display_name="IMAGE")],
        )

    @classmethod
    def execute(cls, latent, enlarge=4):
        """Raises ValueError for a latent that is not [B, 16, T, h, w]."""
        from comfy.latent_formats import Wan21

        frames = decode_latent(Wan21().process_in(latent["samples"].float())).flatten(0, 1).cpu()
        return io.NodeOutput(enlarge_frames(frames, enlarge))


def enlarge_frames(frames, factor):
    """Frames [N, H, W, 3] -> [N, factor * H, factor * W, 3], bicubic, still in 0..1."""
    if factor == 1:
        return frames
    pictures = torch.nn.functional.interpolate(frames.movedim(-1, 1), scale_factor=factor, mode="bicubic")
    return pictures.movedim(1, -1).clamp(0.0, 1.0).contiguous()
