"""The node "VC-Attention Compare": two clips of the same seed, and how far they are apart."""

import math

import torch
from comfy_api.latest import io

from .compare_picture import compare_picture
from .likeness import frames_of_images, frames_of_latents, psnr, ssim
from .not_active import why_not_active
from .report_node import patched_model, reports_of, shown_on_node
from .report_picture import as_image_tensor
from .report_text import machine_line, run_lines, without_paths
from .run_report import RunReport

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
                patched_model("model_a", "What sampled clip A: adds times and errors.", optional=True),
                patched_model("model_b", "What sampled clip B: adds times and errors.", optional=True),
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
        models = ((name_a, model_a), (name_b, model_b))
        identical = peak == math.inf
        warning = f"The clips are identical. {why_identical(models)}" if identical else ""
        lines = [] if identical else [
            f"PSNR {peak:.2f} dB, SSIM {alike:.4f} of the {what}, {len(psnrs)} frames",
            f"worst frame {worst + 1}: {float(psnrs[worst]):.2f} dB, SSIM {float(ssims[worst]):.4f}",
        ]  # fmt: skip
        runs = runs_of(models)
        picture = compare_picture(a, b, (name_a, name_b), lines, psnrs.tolist(), shown, runs, warning)
        image = as_image_tensor(picture)
        told = [line for name, report in runs for line in (f"{name}:", *run_lines(report))]
        head = [machine_line(), f"A: {name_a}, B: {name_b}", *([warning] if warning else ())]
        text = without_paths("\n".join([*head, *lines, *told]))
        return io.NodeOutput(image, text, peak, alike, ui=shown_on_node(image, text, warning))


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


def runs_of(models) -> list[tuple[str, RunReport]]:
    """models: (clip's name, MODEL or None) -> the last run of each; none of a model without VC-Attention."""
    pairs = ((name, reports_of(model)) for name, model in models if model is not None)
    return [(name, reports[-1]) for name, reports in pairs if reports]


def why_identical(models) -> str:
    """What the models of two clips without a difference say about it, that of clip B first."""
    (_, model_a), (_, model_b) = models
    for clip, model in (("B", model_b), ("A", model_a)):
        if model is not None and why_not_active(model):
            return f"VC-Attention did not run in {clip}: {why_not_active(model)}"
    if model_b is not None and not reports_of(model_b):
        return "VC-Attention did not run in B: no patch is active on its model"
    return "What was to differ between them did not run"
