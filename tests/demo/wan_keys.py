"""A Wan 2.1 text-to-video checkpoint in ComfyUI's key layout, as diffusers names it."""

import torch

# (ComfyUI, diffusers), in a block; the first match of a key's beginning is replaced
BLOCK = (
    ("self_attn.o.", "attn1.to_out.0."),
    ("self_attn.norm_", "attn1.norm_"),
    ("self_attn.", "attn1.to_"),
    ("cross_attn.o.", "attn2.to_out.0."),
    ("cross_attn.norm_", "attn2.norm_"),
    ("cross_attn.", "attn2.to_"),
    ("norm3.", "norm2."),  # the affine norm before cross-attention
    ("ffn.0.", "ffn.net.0.proj."),
    ("ffn.2.", "ffn.net.2."),
    ("modulation", "scale_shift_table"),
)
OUTSIDE = (
    ("patch_embedding.", "patch_embedding."),
    ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
    ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
    ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
    ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
    ("time_projection.1.", "condition_embedder.time_proj."),
    ("head.head.", "proj_out."),
    ("head.modulation", "scale_shift_table"),
)


def diffusers_key(key: str) -> str:
    """diffusers' name of one of ComfyUI's Wan keys. Raises ValueError for one that it does not know."""
    before, table = "", OUTSIDE
    if key.startswith("blocks."):
        _, block, key = key.split(".", 2)
        before, table = f"blocks.{block}.", BLOCK
    for comfyui, diffusers in table:
        if key.startswith(comfyui):
            return before + diffusers + key.removeprefix(comfyui)
    raise ValueError(f"needs a key of a Wan text-to-video checkpoint, got {before + key!r}")


def diffusers_transformer(weights: dict[str, torch.Tensor], dtype=torch.float32):
    """diffusers' WanTransformer3DModel with a checkpoint's weights (ComfyUI keys), ready to sample.

    Its weights are of dtype, except those that diffusers wants in float32.
    """
    from diffusers import WanTransformer3DModel

    dim, channels = weights["patch_embedding.weight"].shape[:2]
    transformer = WanTransformer3DModel(
        num_attention_heads=dim // 128,
        attention_head_dim=128,
        in_channels=channels,
        out_channels=channels,
        text_dim=weights["text_embedding.0.weight"].shape[1],
        ffn_dim=weights["blocks.0.ffn.0.weight"].shape[0],
        num_layers=1 + max(int(key.split(".")[1]) for key in weights if key.startswith("blocks.")),
        rope_max_seq_len=64,
    )
    transformer.load_state_dict({diffusers_key(key): weight for key, weight in weights.items()})
    for name, parameter in transformer.named_parameters():
        if not any(kept in name for kept in transformer._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return transformer.eval().requires_grad_(False)
