"""The node "VC-Attention Benchmark": speed and error of every kernel on this machine."""

import torch
from comfy_api.latest import io

from ..kernels.benchmark import SHAPES, Shape, count_of_functions, fitting, run_benchmark, shape_named, table
from ..kernels.testing import KINDS
from .benchmark_picture import benchmark_picture
from .captures import output_folder, read_call
from .report_node import shown_on_node
from .report_picture import as_image_tensor
from .report_text import machine_line, without_paths

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class VCAttentionBenchmark(io.ComfyNode):
    """Runs when queued, needs no model."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionBenchmark",
            display_name="VC-Attention Benchmark",
            category="VC-Attention",
            description="Measures every attention kernel of this pack on this machine, beside PyTorch and, "
            "if installed, FlashAttention-4, comfy-kitchen and SageAttention: time, error and memory for a "
            "model's shapes.",
            search_aliases=["speed", "attention", "sage", "comparison"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "shape",
                    options=[shape.name for shape in SHAPES],
                    default=SHAPES[0].name,
                    tooltip="Model and clip size. Without a GPU every shape is cut to a small one.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="bf16",
                    tooltip="Wan and HunyuanVideo 1.5 run in fp16, HunyuanVideo and MiniMax-H3 in bf16.",
                ),
                io.Combo.Input(
                    "values",
                    options=list(KINDS),
                    default="clustered",
                    tooltip="What the made-up tensors are like. clustered: like those of video models. Only "
                    "the errors depend on it.",
                ),
                io.Float.Input(
                    "seconds",
                    default=1.0,
                    min=0.1,
                    max=30.0,
                    step=0.1,
                    tooltip="Time spent on each number. More: steadier numbers.",
                ),
                io.String.Input(
                    "capture",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip="File name of a VC-Attention Capture in the output folder, measured instead of "
                    "made-up tensors. Empty: none.",
                ),
            ],
            outputs=[io.Image.Output(display_name="picture"), io.String.Output(display_name="report")],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs):
        """Never cached: a second run is a second measurement."""
        return float("nan")

    @classmethod
    def execute(cls, shape, dtype="bf16", values="clustered", seconds=1.0, capture=""):
        """Raises ValueError for a capture that is not there."""
        import comfy.model_management as management
        from comfy.utils import ProgressBar

        device = management.get_torch_device()
        wanted, inputs = fitting(shape_named(shape), device), None
        if capture.strip():
            wanted, inputs = captured(capture.strip(), device)
        management.unload_all_models()  # models would compete for the memory, and for nothing else
        management.soft_empty_cache()
        bar, results = ProgressBar(count_of_functions()), []
        for result in run_benchmark(wanted, device, DTYPES[dtype], values, seconds, inputs):
            results.append(result)
            bar.update(1)
            management.throw_exception_if_processing_interrupted()
        text = without_paths("\n".join([machine_line(), *table(wanted, results)]))
        image = as_image_tensor(benchmark_picture(wanted, results))
        return io.NodeOutput(image, text, ui=shown_on_node(image, text))


def captured(name: str, device) -> tuple[Shape, tuple[torch.Tensor, ...]]:
    """The first call of a capture, as a shape and on the device."""
    call, tensors = read_call(output_folder(), name)
    _, heads, tokens, head_dim = tensors[0].shape
    return Shape(f"captured {call}", heads, tokens, head_dim), tuple(t.to(device) for t in tensors)
