"""A checkpoint in ComfyUI's layout means the same model in diffusers."""

import pytest
import torch
from comfyui_vc_attention.kernels.testing import relative_l2
from sample_model.model import WanVideoModel
from vc_demo.wan_keys import diffusers_key, diffusers_transformer


@torch.inference_mode()
def test_same_velocity_as_our_own_model():
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = WanVideoModel(dim=256, ffn_dim=64, layers=2, channels=4, text_dim=16).eval()
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape) * (1 if weight.ndim == 1 else weight[0].numel() ** -0.5))
    transformer = diffusers_transformer(model.state_dict())
    x, text = torch.randn(2, 4, 3, 4, 6), torch.randn(2, 5, 16)
    timestep = torch.tensor([900.0, 17.5])
    ours, theirs = model(x, timestep, text), transformer(x, timestep, text, return_dict=False)[0]
    assert relative_l2(theirs, ours) < 1e-5


def test_unknown_key_is_named():
    with pytest.raises(ValueError, match=r"got 'blocks.0.norm9.weight'"):
        diffusers_key("blocks.0.norm9.weight")
