"""Mean plus residual gives the value back; the codes are checked in test_triton_int8_fp8.py."""

import pytest
import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare.triton_layout import key_of_v_column
from comfyui_vc_attention.kernels.prepare.triton_values import quantize_v
from comfyui_vc_attention.kernels.testing import sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def restored(codes, scale, mean, keys):
    """Values that the operands stand for, in tile order."""
    values = codes.float()[..., key_of_v_column().argsort().to(DEVICE)]
    per_channel = scale if scale.dim() == 4 else scale[:, :, None]
    values = values * per_channel[..., None]
    if mean is not None:
        values = values + (mean.float() * (1 if scale.dim() == 4 else per_channel))[..., None]
    return values.transpose(-1, -2).flatten(2, 3)[:, :, :keys]


@pytest.mark.parametrize("numerics, step", [("int8_fp8", 1 / 16), ("int8_int8", 1 / 254)])
@pytest.mark.parametrize("demean", [True, False])
def test_mean_and_residual_restore_the_value(numerics, step, demean):
    v = sample_qkv("outlier_tokens", (1, 2, 1, 128), keys=200, device=DEVICE)[2]
    recipe = Recipe(numerics, demean=demean)
    codes, scale, mean, _ = quantize_v(v, recipe, None, None, v.abs().amax(2) / 224)
    error = (restored(codes, scale, mean, 200) - v).abs()
    if numerics == "int8_int8":
        # half a step, and what the tile's other keys missed (I1)
        bound = scale.repeat_interleave(128, 2)[:, :, :200] * 0.65
    else:
        # half a step of three mantissa bits of the residual, or half of the smallest step
        taken = (mean.float() * scale[:, :, None]).repeat_interleave(128, 2)[:, :, :200] if demean else 0.0
        bound = ((v - taken).abs() * step * 1.01).maximum(scale[:, :, None] * 2**-10 * 1.01)
    assert (error <= bound + 1e-6).all()


def test_last_tile_averages_its_own_keys():
    v = torch.ones(1, 1, 130, 64, device=DEVICE)
    v[:, :, 128:] = 5
    _, scale, mean, _ = quantize_v(v, Recipe("int8_fp8"), None, None, v.abs().amax(2) / 224)
    means = (mean.float() * scale[:, :, None])[0, 0, :, 0].cpu()
    torch.testing.assert_close(means, torch.tensor([1.0, 5.0]), rtol=1e-3, atol=0)
