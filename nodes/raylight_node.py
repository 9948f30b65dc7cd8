"""The nodes for Raylight: RAY_ACTORS in, RAY_ACTORS out. What they do happens in the workers."""

from concurrent.futures import wait
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from . import raylight_worker  # noqa: F401, so that it is loaded wherever the pack is: workers look it up
from .patch_node import advanced_inputs, main_inputs
from .run_report import say

PACK = str(Path(__file__).resolve().parents[1])


class VCAttentionPatchRaylight(io.ComfyNode):
    """VC-Attention in every Raylight worker."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionPatchRaylight",
            display_name="VC-Attention Patch (Raylight)",
            category="model/patch",
            description="VC-Attention on several GPUs with Raylight. Put it between Load Diffusion Model "
            "(Ray) and the XFuser sampler. MiniMax-H3 with Ulysses; Wan with CFG degree 2.",
            search_aliases=["sage", "attention", "fp8", "multi gpu", "ray", "xdit", "ulysses"],
            inputs=[
                ray_actors().Input("ray_actors", tooltip="From Raylight's model loader, or a node after it."),
                *main_inputs(),
                *advanced_inputs(),
            ],
            outputs=[ray_actors().Output(display_name="ray_actors")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, ray_actors, **widgets):
        workers = ray_actors["workers"]
        parallel = parallel_dict(workers)
        on_all(
            workers, "model_function_runner", patch_function(PACK, widgets, parallel.get("ring_degree", 1))
        )
        node_id = cls.hidden.unique_id if cls.hidden is not None else None
        say(told(workers, describe_function(PACK, "describe_patch", parallel)), node_id)
        return io.NodeOutput(ray_actors)


class VCAttentionReportRaylight(io.ComfyNode):
    """What VC-Attention did in every Raylight worker."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="VCAttentionReportRaylight",
            display_name="VC-Attention Report (Raylight)",
            category="VC-Attention",
            description="After sampling: how many attention calls of each worker ran on VC-Attention, and "
            "why the others did not. Connect the ray_actors that come out of the sampler.",
            search_aliases=["attention", "ray", "statistics"],
            is_output_node=True,
            inputs=[ray_actors().Input("ray_actors", tooltip="The ray_actors that come out of the sampler.")],
            outputs=[ray_actors().Output(display_name="ray_actors"), io.String.Output(display_name="report")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs):
        """Never cached: the workers may have sampled again."""
        return float("nan")

    @classmethod
    def execute(cls, ray_actors):
        workers = ray_actors["workers"]
        text = told(workers, describe_function(PACK, "describe_run", parallel_dict(workers)))
        say(text, cls.hidden.unique_id if cls.hidden is not None else None)
        return io.NodeOutput(ray_actors, text)


def ray_actors():
    return io.Custom("RAY_ACTORS")


def on_all(workers, method: str, *args) -> list[Any]:
    """Call a method of every worker at the same time and wait for all: they may meet in a collective."""
    futures = [getattr(worker, method).remote(*args).future() for worker in workers]
    wait(futures)
    return [future.result() for future in futures]


def parallel_dict(workers) -> dict[str, Any]:
    """Raylight's degrees of parallelism."""
    return on_all(workers[:1], "get_parallel_dict")[0]


def told(workers, function) -> str:
    """One line per rank."""
    lines = on_all(workers, "model_function_runner_get_values", function)
    return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))


# The functions below cross to the workers. They may hold plain values only and must import inside themselves:
# custom nodes are not loaded in a worker, and what refers to this module could not be unpickled there.


def patch_function(pack: str, widgets: dict[str, Any], ring_degree: int):
    """patch(model): load the pack in this worker, once, and patch the model."""

    def patch(model):
        import asyncio
        import sys

        import nodes as comfy_nodes  # noqa: TID251

        worker = pack.replace(".", "_x_") + ".nodes.raylight_worker"  # ComfyUI's name for the pack
        if worker not in sys.modules and not asyncio.run(comfy_nodes.load_custom_node(pack)):
            raise RuntimeError(f"the Raylight worker could not load {pack}; its own log says why")
        return sys.modules[worker].patch_worker(model, widgets, ring_degree)

    return patch


def describe_function(pack: str, name: str, parallel: dict[str, Any]):
    """describe(model): what the worker module's function of that name says."""

    def describe(model):
        import sys

        worker = sys.modules.get(pack.replace(".", "_x_") + ".nodes.raylight_worker")
        if worker is None:
            return "0 calls, because VC-Attention is not loaded in this worker; run the patch node first"
        return getattr(worker, name)(model, parallel)

    return describe
