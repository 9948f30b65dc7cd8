"""The node "VC-Attention Compare": two clips of the same seed, and how far they are apart."""

import torch
from comfy_api.latest import io

from .compare_picture import compare_picture
from .likeness import frames_of_images, frames_of_latents, psnr, ssim
from .report_node import reports_of, shown_on_node
from .report_picture import as_image_tensor
from .report_text import machine_line, run_lines, without_paths

WORST = "worst"


class VCAttentionCompare(io.ComfyNode):
    """Measures two finished clips; it samples nothing, so any sampler and any pair of settings will do."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionCompare",
            display_name="VC-Attention Compare",
            category="VC-Attention",
            description="Two clips from the same seed, for example without and with VC-Attention: PSNR, "
            "SSIM, a picture with the difference, and the blocks with the largest error.",
            search_aliases=["psnr", "ssim", "difference", "quality", "ab"],
            is_output_node=True,
            inputs=[
                io.Image.Input(
                    "images_a", optional=True, tooltip="Pictures of clip A, usually the exact one."
                ),
                io.Image.Input("images_b", optional=True, tooltip="Pictures of clip B, usually patched."),
                io.Latent.Input("latent_a", optional=True, tooltip="Used where there are no pictures."),
                io.Latent.Input("latent_b", optional=True, tooltip="Used where there are no pictures."),
                io.Model.Input(
                    "model_a", optional=True, tooltip="What sampled clip A: adds times and errors."
                ),
                io.Model.Input(
                    "model_b", optional=True, tooltip="What sampled clip B: adds times and errors."
                ),
                io.Combo.Input(
                    "frame",
                    options=[WORST, "first", "middle", "last"],
                    default=WORST,
                    tooltip="Which frame the picture shows. worst: the one with the lowest PSNR.",
                ),
                io.String.Input("name_a", default="exact", tooltip="Title of clip A in the picture."),
                io.String.Input("name_b", default="VC-Attention", tooltip="Title of clip B in the picture."),
            ],
            outputs=[
                io.Image.Output(display_name="picture"),
                io.String.Output(display_name="report"),
                io.Float.Output(display_name="PSNR"),
                io.Float.Output(display_name="SSIM"),
            ],
        )

    @classmethod
    def execute(
        cls,
        frame=WORST,
        name_a="exact",
        name_b="VC-Attention",
        images_a=None,
        images_b=None,
        latent_a=None,
        latent_b=None,
        model_a=None,
        model_b=None,
    ):
        """Raises ValueError without a pair, or if the two clips have different shapes."""
        a, b, what = pair_of(images_a, images_b, latent_a, latent_b)
        psnrs, ssims = psnr(a, b), ssim(a, b)
        # of identical clips every PSNR is infinite; so is their mean
        peak = float(-10 * (a.double() - b.double()).square().mean().log10())
        alike = float(ssims.mean())
        shown = frame_number(frame, psnrs)
        worst = int(psnrs.argmin())
        lines = [
            f"PSNR {peak:.2f} dB, SSIM {alike:.4f} of the {what}, {len(psnrs)} frames",
            f"worst frame {worst + 1}: {float(psnrs[worst]):.2f} dB, SSIM {float(ssims[worst]):.4f}",
            *told_by_models(name_a, model_a, name_b, model_b),
        ]
        image = as_image_tensor(compare_picture(a, b, (name_a, name_b), lines, psnrs.tolist(), shown))
        text = without_paths("\n".join([machine_line(), f"A: {name_a}, B: {name_b}", *lines]))
        return io.NodeOutput(image, text, peak, alike, ui=shown_on_node(image, text))


def pair_of(images_a, images_b, latent_a, latent_b):
    """(a, b, what): frames [N, C, H, W] of both clips in 0..1, pictures if there are any."""
    if images_a is not None and images_b is not None:
        a, b, what = frames_of_images(images_a), frames_of_images(images_b), "pictures"
    elif latent_a is not None and latent_b is not None:
        a, b, what = latent_a["samples"], latent_b["samples"], "latents"
    else:
        raise ValueError("connect images_a and images_b, or latent_a and latent_b")
    if a.shape != b.shape:
        raise ValueError(f"both clips must have one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    if what == "latents":
        a, b = frames_of_latents(a, b)
    return a, b, what


def frame_number(frame: str, psnrs: torch.Tensor) -> int:
    last = len(psnrs) - 1
    return {"first": 0, "middle": last // 2, "last": last}.get(frame, int(psnrs.argmin()))


def told_by_models(name_a, model_a, name_b, model_b) -> list[str]:
    """What the models' last runs recorded; nothing for a model without VC-Attention."""
    lines = []
    for name, model in ((name_a, model_a), (name_b, model_b)):
        reports = reports_of(model) if model is not None else []
        if reports:
            lines += [f"{name}:", *run_lines(reports[-1])]
    return lines
