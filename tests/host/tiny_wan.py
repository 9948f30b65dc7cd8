"""Tiny Wan checkpoints with random weights, in ComfyUI's key layout: for wiring and per-call error only."""

import importlib
import math
from pathlib import Path

import torch

DIM, HEADS, BLOCKS, FFN = 256, 2, 3, 256  # head_dim 128, as in the real models
LOGIT_SPREAD = 1.4  # scale of the normed q and k: logits get a standard deviation of about its square
ATTENTION_GAIN = (
    4.0  # an average over many keys is small; without it the sample would hardly depend on attention
)

# name -> (module, class) of ComfyUI, and its arguments
WAN = ("comfy.ldm.wan.model", "WanModel")
KINDS = {
    "t2v": (WAN, {"model_type": "t2v", "in_dim": 16, "out_dim": 16}),
    "i2v": (WAN, {"model_type": "i2v", "in_dim": 36, "out_dim": 16}),
    "5b": (WAN, {"model_type": "t2v", "in_dim": 48, "out_dim": 48}),
    "vace": (
        ("comfy.ldm.wan.model", "VaceWanModel"),
        {"model_type": "vace", "in_dim": 16, "out_dim": 16, "vace_layers": 3, "vace_in_dim": 96},
    ),
    "s2v": (("comfy.ldm.wan.model", "WanModel_S2V"), {"in_dim": 16, "out_dim": 16}),
    "animate": (("comfy.ldm.wan.model_animate", "AnimateWanModel"), {"in_dim": 36, "out_dim": 16}),
}
BLOCKS_OF = {"animate": 5}  # one face adapter for five blocks


def random_weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """A weight that keeps activations near unit variance."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith(("norm_q.weight", "norm_k.weight", "norm_k_img.weight")):
        return LOGIT_SPREAD * (1 + 0.1 * noise)
    if "modulation" in name:
        return 0.1 * noise
    if len(shape) < 2:
        return torch.ones(shape) if name.endswith("weight") else 0.02 * noise
    gain = ATTENTION_GAIN if name.endswith("self_attn.o.weight") else 1.0
    return gain * noise / math.sqrt(math.prod(shape[1:]))


def write(path: Path, kind: str = "t2v", seed: int = 0) -> Path:
    """Write one checkpoint; the same bytes for the same kind and seed. Needs ComfyUI on sys.path."""
    import comfy.ops
    from safetensors.torch import save_file

    (module, name), arguments = KINDS[kind]
    model = getattr(importlib.import_module(module), name)(
        dim=DIM,
        ffn_dim=FFN,
        num_heads=HEADS,
        num_layers=BLOCKS_OF.get(kind, BLOCKS),
        operations=comfy.ops.disable_weight_init,
        dtype=torch.float32,
        device="cpu",
        **arguments,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: random_weight(name, p.shape, generator) for name, p in sorted(model.state_dict().items())
    }
    save_file({name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}, path)
    return path
