"""The fixed latent map on the clips it was chosen for."""

import torch
from comfyui_vc_attention.nodes.sample_clip import LATENT_SHAPE, decode_latent, encode_frames
from sample_model.clips import draw_clips


def test_coarse_channels_have_unit_variance_and_fine_ones_less():
    latents = encode_frames(draw_clips(torch.arange(48) % 16, 11))
    assert latents.shape[1:] == LATENT_SHAPE
    flat = latents.movedim(1, 0).flatten(1)
    assert flat.mean(dim=1).abs().max() < 0.35
    spread = flat.std(dim=1)
    assert 0.8 < spread[0] < 1.2 and spread.min() > 0.1 and spread[9:].max() < 0.4


def test_latents_carry_the_picture():
    clips = draw_clips(torch.arange(16), 12, frames=3)
    error = (decode_latent(encode_frames(clips)) - clips).square().mean()
    assert -10.0 * error.log10() > 36.0  # dB
