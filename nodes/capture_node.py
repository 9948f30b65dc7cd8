"""The node "VC-Attention Capture": keeps the q, k, v of a few attention calls in a file."""

from comfy_api.latest import io

from .attention_capture import CaptureSettings, capture_attention
from .captures import DEFAULT_PREFIX
from .families import family_of
from .patch_settings import parse_blocks
from .run_report import say


class VCAttentionCapture(io.ComfyNode):
    """MODEL in, MODEL out; the file is written when sampling ends."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionCapture",
            display_name="VC-Attention Capture",
            category="VC-Attention",
            description="Saves q, k and v of chosen attention calls while a model samples, as safetensors in "
            "the output folder: for bug reports, and for VC-Attention Benchmark. Put it behind the patch.",
            search_aliases=["debug", "save attention", "qkv"],
            inputs=[
                io.Model.Input("model", tooltip="The model whose attention is saved, patched or not."),
                io.String.Input(
                    "blocks", default="0", tooltip="Blocks to save, like 0,1,38-39. Counted from 0."
                ),
                io.String.Input(
                    "steps", default="0", tooltip="Denoising steps to save, like 0,10. Counted from 0."
                ),
                io.Int.Input(
                    "heads",
                    default=2,
                    min=1,
                    max=128,
                    tooltip="Heads kept of each call, evenly spaced. More: larger files.",
                ),
                io.Int.Input(
                    "max_megabytes",
                    default=512,
                    min=1,
                    max=16384,
                    tooltip="Largest file. Calls that would not fit are left out, and that is said.",
                ),
                io.String.Input(
                    "prefix",
                    default=DEFAULT_PREFIX,
                    tooltip="Start of the file name. Folders in it are not followed.",
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL")],
            hidden=[io.Hidden.unique_id],
            # equal nodes would share one cached model, which knows one node's id to report to
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model, blocks="0", steps="0", heads=2, max_megabytes=512, prefix=DEFAULT_PREFIX):
        """An unknown model passes through with one line. Raises ValueError for a list that is none."""
        node_id = cls.hidden.unique_id if cls.hidden is not None else None
        family = family_of(model.model.diffusion_model)
        settings = CaptureSettings(
            parse_blocks(blocks), parse_blocks(steps), heads, max_megabytes * 2**20, prefix, node_id
        )
        if family is None:
            name = type(model.model.diffusion_model).__name__
            say(f"{name} is not a model this node knows; nothing will be saved", node_id)
            return io.NodeOutput(model)
        return io.NodeOutput(capture_attention(model, settings, family))
