"""The node "VC-Attention Report": what the runs of a patched model did, as text and as a picture."""

from comfy_api.latest import io, ui

from .model_patch import overrides_of
from .not_active import why_not_active
from .report_picture import as_image_tensor, report_picture
from .report_text import report_text, without_paths
from .run_report import RunReport
from .wan_video_patch import HANDLE, WanVideoPatch

NOTHING = (
    "No run of this model was recorded. Either it is not the MODEL that comes out of VC-Attention Patch, or "
    "the patch is bypassed, or nothing has sampled yet: connect what the sampler makes to 'after', so that "
    "the report waits for it."
)


class VCAttentionReport(io.ComfyNode):
    """Reads the records that the patch keeps on its model; samples nothing itself."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionReport",
            display_name="VC-Attention Report",
            category="VC-Attention",
            description="After sampling: which kernel ran in which step and block, how long attention took, "
            "what grouping gained, the error of each block. No paths, no names: made to be shared.",
            search_aliases=["attention", "benchmark", "statistics"],
            is_output_node=True,
            inputs=[
                patched_model("model", "The model that comes out of VC-Attention Patch."),
                io.AnyType.Input(
                    "after", tooltip="What the sampler makes, a latent or pictures: the report waits for it."
                ),
                patched_model("model_2", "Wan 2.2: the second expert, MODEL 2 of the patch.", optional=True),
                io.Int.Input(
                    "runs",
                    default=1,
                    min=1,
                    max=8,
                    optional=True,
                    tooltip="How many of the last sampler runs of each model are shown. 1: the last one.",
                ),
            ],
            outputs=[io.Image.Output(display_name="picture"), io.String.Output(display_name="report")],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs):
        """Never cached: the same model may have sampled again."""
        return float("nan")

    @classmethod
    def execute(cls, model, after, model_2=None, runs=1):
        models = [each for each in (model, model_2) if each is not None]
        reports = [report for each in models for report in reports_of(each)[-runs:]]
        # both experts usually say the same
        missing = list(dict.fromkeys(why_nothing(each) for each in models if not reports_of(each)))
        text = "\n".join([*([report_text(reports)] if reports else ()), *missing])
        warning = next((report.warning() for report in reports if report.warning()), None)
        image = as_image_tensor(report_picture(reports, missing))
        shown = shown_on_node(image, text, warning or next(iter(missing), None))
        return io.NodeOutput(image, text, ui=shown)


def patched_model(name: str, tooltip: str, optional: bool = False):
    """An input for ComfyUI's models and for those of WanVideoWrapper."""
    types = [io.Model, io.Custom("WANVIDEOMODEL")]
    return io.MultiType.Input(name, types=types, optional=optional, tooltip=tooltip)


def reports_of(model) -> list[RunReport]:
    """Finished runs of a patched model, oldest first; none for another model."""
    overrides = overrides_of(model)
    handle = model.model_options.get("transformer_options", {}).get(HANDLE)
    if isinstance(handle, WanVideoPatch):
        overrides.append(handle.override)
    return [report for override in overrides for report in override.finished]


def why_nothing(model) -> str:
    """Why a model has no finished run, and what to do about it."""
    reason = why_not_active(model)
    return f"VC-Attention was not active: {reason}" if reason else NOTHING


def shown_on_node(image, text: str, warning: str | None = None) -> dict:
    """What the page shows; the picture is saved without the workflow in it, so that it can be shared.

    warning: a sentence that the user should see before the report.
    """
    warnings = {"vc_attention_warning": [without_paths(warning)]} if warning else {}
    return {**ui.PreviewImage(image, cls=None).as_dict(), "vc_attention_report": [text], **warnings}
