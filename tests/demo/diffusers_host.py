"""The demo without ComfyUI: diffusers' Wan transformer and its flow-matching scheduler."""

from unittest import mock

import torch
from comfyui_vc_attention import kernels
from comfyui_vc_attention.kernels.adapters import diffusers_wan
from comfyui_vc_attention.kernels.prepare.reference import apply_rope
from comfyui_vc_attention.nodes.sample_clip import LATENT_SHAPE, decode_latent, prompt_embedding

from .meter import Meter, Run, exact_attention
from .wan_keys import diffusers_transformer

DESCRIPTION = "diffusers (WanTransformer3DModel, FlowMatchEulerDiscreteScheduler)"
SHIFT = 8.0  # ComfyUI's default for Wan 2.1


class DiffusersHost:
    """Samples the checkpoint at weights_path on the GPU, or on the CPU where there is none."""

    kernels = kernels

    def __init__(self, weights_path):
        from diffusers import FlowMatchEulerDiscreteScheduler
        from safetensors.torch import load_file

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.transformer = diffusers_transformer(load_file(weights_path), dtype).to(self.device)
        self.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)

    def run(self, options, kernel: str | None) -> Run:
        """One clip: with the transformer's own attention, or with VC-Attention if kernel names one."""
        meter = Meter()
        if kernel is None:
            with timed_default_attention(meter):
                return Run(self.sample(options), meter)
        patch = diffusers_wan.patch_wan(self.transformer, self.scheduler, kernel=kernel)
        with timed_vc_attention(meter, len(self.transformer.blocks)):
            frames = self.sample(options)
        patch.remove()
        return Run(frames, meter, patch.taken, dict(patch.declined))

    @torch.inference_mode()
    def sample(self, options):
        """Frames [T, H, W, 3] in 0..1."""
        dtype = self.transformer.dtype
        text, nothing = (prompt_embedding(p).to(self.device, dtype) for p in (options.prompt, ""))
        noise = torch.randn(1, *LATENT_SHAPE, generator=torch.Generator().manual_seed(options.seed))
        x = noise.to(self.device)
        # an evenly spaced schedule from 1 to 0, shifted by the scheduler
        even = torch.linspace(1, 0, options.steps + 1)[:-1]
        self.scheduler.set_timesteps(sigmas=even.tolist(), device=self.device)
        for timestep in self.scheduler.timesteps:
            velocity = self.velocity(x.to(dtype), timestep, text)
            if options.cfg != 1.0:
                free = self.velocity(x.to(dtype), timestep, nothing)
                velocity = free + options.cfg * (velocity - free)
            x = self.scheduler.step(velocity, timestep, x, return_dict=False)[0]
        return decode_latent(x)[0].cpu()

    def velocity(self, x, timestep, text):
        return self.transformer(x, timestep[None], text, return_dict=False)[0].float()


def timed_default_attention(meter: Meter):
    """Context that times diffusers' self-attention. Cross-attention has keys of another shape."""
    from diffusers.models.transformers import transformer_wan

    dispatch = transformer_wan.dispatch_attention_fn

    def timed(query, key, value, **kwargs):
        if query.shape != key.shape:
            return dispatch(query, key, value, **kwargs)
        return meter.timed(dispatch, query, key, value, **kwargs)

    return mock.patch.object(transformer_wan, "dispatch_attention_fn", timed)


def timed_vc_attention(meter: Meter, blocks: int):
    """Context in which the adapter's calls (grouping too) are timed and compared with exact attention."""
    attend, group, calls = diffusers_wan.vc_attention, diffusers_wan.group_tokens, 0

    def timed_attend(q, k, v, config, *, rope, **kwargs):
        nonlocal calls
        out = meter.timed(attend, q, k, v, config, rope=rope, **kwargs)
        exact = exact_attention(apply_rope(q.float(), *rope), apply_rope(k.float(), *rope), v)
        meter.compare(calls % blocks, out, exact)
        calls += 1
        return out

    def timed_group(*args):
        return meter.timed(group, *args)

    return mock.patch.multiple(diffusers_wan, vc_attention=timed_attend, group_tokens=timed_group)
