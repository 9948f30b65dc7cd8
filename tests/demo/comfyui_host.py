"""The demo in a real ComfyUI, without its server: the pack's nodes, the patch node and KSampler.

Runs in the Python that has ComfyUI's requirements.
"""

import asyncio
import os
import sys

import torch

from .meter import Meter, Run, exact_attention

DESCRIPTION = "ComfyUI (VC-Attention nodes, KSampler euler/simple)"


class ComfyUIHost:
    """Samples through the nodes of the pack at pack_root, loaded as ComfyUI loads a custom node."""

    def __init__(self, comfyui_path, pack_root):
        sys.path.insert(0, comfyui_path)
        from comfy.cli_args import args

        args.cpu = not torch.cuda.is_available()
        import nodes as comfy_nodes  # noqa: TID251, ComfyUI's own

        if not asyncio.run(comfy_nodes.load_custom_node(str(pack_root))):
            raise RuntimeError("ComfyUI could not load the pack; its log above says why")
        self.comfy_nodes = comfy_nodes
        pack = pack_module_name(pack_root)
        self.forward_key = sys.modules[f"{pack}.nodes.sampling_hooks"].FORWARD
        self.kernels = sys.modules[f"{pack}.kernels"]

    def node(self, name, **inputs):
        """What a node returns for its inputs."""
        return self.comfy_nodes.NODE_CLASS_MAPPINGS[name].execute(**inputs).result

    def run(self, options, kernel: str | None) -> Run:
        """One clip: with the model's own attention, or through the patch node if kernel names one."""
        model, positive, negative, latent = self.node("VCAttentionSample", prompt=options.prompt)
        if kernel is not None:
            # the model is tiny: without min_tokens 1 its calls would be too short to be worth taking
            model = self.node("VCAttentionPatch", model=model, kernel=kernel, min_tokens=1)[0]
        model = model.clone()
        transformer_options = model.model_options["transformer_options"]
        measuring = MeasuringOverride(
            transformer_options.get("optimized_attention_override"), self.forward_key
        )
        transformer_options["optimized_attention_override"] = measuring
        (sampled,) = self.comfy_nodes.KSampler().sample(
            model, options.seed, options.steps, options.cfg, "euler", "simple", positive, negative, latent
        )
        (frames,) = self.node("VCAttentionSampleDecode", latent=sampled, enlarge=1)
        report = measuring.report
        counts = (report.taken, dict(report.declined)) if report else ()
        return Run(frames, measuring.meter, *counts)


class MeasuringOverride:
    """Times the self-attention of the override below it, or of ComfyUI, and compares it with exact."""

    def __init__(self, below, forward_key):
        self._vc_previous = below  # under this name the patch recognises itself in the chain
        self.forward_key, self.meter, self.report = forward_key, Meter(), None

    def __call__(self, func, q, k, v, *args, **kwargs):
        attend = func if self._vc_previous is None else self._vc_previous
        inputs = (q, k, v) if attend is func else (func, q, k, v)
        if q.shape != k.shape:  # cross-attention
            return attend(*inputs, *args, **kwargs)
        out = self.meter.timed(attend, *inputs, *args, **kwargs)
        options = kwargs["transformer_options"]
        if self.forward_key in options:
            self.report = options[self.forward_key].run.report
            heads = args[0] if args else kwargs["heads"]
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
            exact = exact_attention(q, k, v).transpose(1, 2).flatten(2)
            self.meter.compare(options["block_index"], out, exact)
        return out


def pack_module_name(pack_root) -> str:
    """The name under which ComfyUI imports a pack."""
    return os.fspath(pack_root).replace(".", "_x_")
