"""The node "VC-Attention Report": what the runs of a patched model did, as text and as a picture."""

from comfy_api.latest import io, ui

from .model_patch import AttentionOverride
from .report_picture import as_image_tensor, report_picture
from .report_text import report_text
from .run_report import RunReport
from .sampling_hooks import OVERRIDE, chain_of

NOTHING = (
    "No run of this model was recorded. Either VC-Attention Patch is not active on it (its log line says "
    "why), or this is not the MODEL that comes out of the patch, or nothing has sampled: connect what the "
    "sampler makes to 'after', so that the report waits for it."
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
                io.Model.Input("model", tooltip="The MODEL that comes out of VC-Attention Patch."),
                io.AnyType.Input(
                    "after", tooltip="What the sampler makes, a latent or pictures: the report waits for it."
                ),
                io.Model.Input(
                    "model_2", optional=True, tooltip="Wan 2.2: the second expert, MODEL 2 of the patch."
                ),
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
        reports = [
            report for each in (model, model_2) if each is not None for report in reports_of(each)[-runs:]
        ]
        return told(reports)


def reports_of(model) -> list[RunReport]:
    """Finished runs of a patched model, oldest first; none for another model."""
    override = model.model_options.get("transformer_options", {}).get(OVERRIDE)
    return [r for link in chain_of(override) if isinstance(link, AttentionOverride) for r in link.finished]


def shown_on_node(image, text: str) -> dict:
    """What the page shows; the picture is saved without the workflow in it, so that it can be shared."""
    return {**ui.PreviewImage(image, cls=None).as_dict(), "vc_attention_report": [text]}


def told(reports: list[RunReport]):
    """The node's output: picture, text, and both shown on the node."""
    text = report_text(reports) if reports else NOTHING
    image = as_image_tensor(report_picture(reports))
    return io.NodeOutput(image, text, ui=shown_on_node(image, text))
