"""Tiny HunyuanVideo, HunyuanVideo-1.5 and MiniMax-H3 checkpoints with random weights."""

import math
import re
from pathlib import Path

import torch

LOGIT_SPREAD = 1.4  # scale of the normed q and k: logits get a standard deviation of about its square
ATTENTION_GAIN = (
    4.0  # an average over many keys is small; without it the sample would hardly depend on attention
)
QK_NORMS = re.compile(r"(norm_q|norm_k|query_norm|key_norm|attn\.q_norm|attn\.k_norm)\.weight$")
ATTENTION_OUT = re.compile(r"(self_attn\.o|(img|txt)_attn\.proj|self_attn\.proj|attn\.out_proj)\.weight$")

HUNYUAN = {
    "axes_dim": [16, 56, 56],
    "theta": 256,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "meanflow": False,
    "meanflow_sum": False,
    "context_in_dim": 64,
}

KINDS = {
    "hunyuan": {
        **HUNYUAN,
        **{"in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768},
        **{"hidden_size": 256, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "guidance_embed": True},
        **{"byt5": False, "use_cond_type_embedding": False, "vision_in_dim": None},
    },
    "hunyuan15": {
        **HUNYUAN,
        **{"in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None},
        **{"hidden_size": 256, "num_heads": 2, "depth": 3, "depth_single_blocks": 0, "guidance_embed": False},
        **{"byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152},
    },
    "h3": {
        **{"hidden_size": 192, "num_layers": 3, "token_refiner_num_layers": 2, "num_attention_heads": 2},
        **{"attention_head_dim": 128, "ffn_hidden_size": 256, "text_dim": 64},
        **{"time_embed_hidden_size": 128, "time_embed_dim": 96},
    },
}


def random_weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """A weight that keeps activations near unit variance."""
    noise = torch.randn(shape, generator=generator)
    if name == "rope.inv_freq":
        return 10000.0 ** (-torch.arange(shape[0]) / shape[0])
    if QK_NORMS.search(name):
        return LOGIT_SPREAD * (1 + 0.1 * noise)
    if len(shape) < 2:
        return torch.ones(shape) if name.endswith("weight") else 0.02 * noise
    gain = ATTENTION_GAIN if ATTENTION_OUT.search(name) else 1.0
    return gain * noise / math.sqrt(math.prod(shape[1:]))


def build(kind: str):
    """A module of ComfyUI's own class, its weights not yet set."""
    import comfy.ops

    common = {"operations": comfy.ops.disable_weight_init, "dtype": torch.bfloat16, "device": "cpu"}
    if kind == "h3":
        from comfy.ldm.minimax.model import MiniMaxH3Model

        return MiniMaxH3Model(**KINDS[kind], **common)
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    return HunyuanVideo(**KINDS[kind], **common)


def write(path: Path, kind: str, seed: int = 0) -> Path:
    """Write one checkpoint; the same bytes for the same kind and seed. Needs ComfyUI on sys.path."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: random_weight(name, empty.shape, generator).to(empty.dtype).contiguous()
        for name, empty in sorted(build(kind).state_dict().items())
    }
    save_file(weights, path)
    return path
