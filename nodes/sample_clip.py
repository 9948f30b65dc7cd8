"""What the sample model's clips are made of: prompts, their embeddings, the map between frames and latents.

Nothing here is learned and nothing needs ComfyUI, so training, tests and nodes share it.
"""

import hashlib
import math

import torch

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow")
PROMPTS = tuple(f"a {colour} {shape}" for shape in SHAPES for colour in COLOURS)

TEXT_TOKENS = 8  # chosen: room for longer prompts; the rest of a prompt is zero padding, as in Wan
TEXT_DIM = 4096  # the width that ComfyUI expects of a Wan text embedding

CLIP_FRAMES, CLIP_SIZE = 10, 96  # pictures per clip, their height and width in pixels
PATCH = 4  # one latent cell holds PATCH x PATCH pixels of one picture
LATENT_CHANNELS = 16
LATENT_SHAPE = (LATENT_CHANNELS, CLIP_FRAMES, CLIP_SIZE // PATCH, CLIP_SIZE // PATCH)

# (colour axis, vertical frequency, horizontal frequency) of each latent channel: of the 48 coefficients of a
# patch those that carry most of the clips' energy (measured on 256 clips), coarse ones first.
COEFFICIENTS = (
    *((axis, 0, 0) for axis in range(3)),
    *((axis, *wave) for axis in range(3) for wave in ((0, 1), (1, 0))),
    *((0, *wave) for wave in ((0, 2), (0, 3), (1, 1), (2, 0))),
    *((1, 0, 2), (1, 2, 0), (2, 0, 2)),
)
# mean and standard deviation of each coefficient, measured on 256 clips of tests/sample_model/clips.py
CHANNEL_MEAN = (3.522, 0.043, 0.039) + (0.0,) * 13
CHANNEL_STD = (
    *(0.968, 0.376, 0.328, 0.208, 0.108, 0.0777, 0.0705, 0.0674, 0.0610),
    *(0.0843, 0.0516, 0.0289, 0.0289, 0.0339, 0.0294, 0.0290),
)


def prompt_embedding(prompt: str) -> torch.Tensor:
    """Fixed text embedding of a prompt: float32 [1, TEXT_TOKENS, TEXT_DIM], one token per word, then zeros.

    A word's token is the 4096 bits of its SHAKE-256 digest as -1 and +1: the same on every machine, of unit
    variance, and nearly orthogonal to another word's. The empty prompt, all zeros, is the unconditional one.
    Raises ValueError for a prompt of more than TEXT_TOKENS words.
    """
    words = prompt.lower().split()
    if len(words) > TEXT_TOKENS:
        raise ValueError(f"a prompt has at most {TEXT_TOKENS} words, got {len(words)} in {prompt!r}")
    embedding = torch.zeros(1, TEXT_TOKENS, TEXT_DIM)
    for i, word in enumerate(words):
        octets = torch.tensor(list(hashlib.shake_256(word.encode()).digest(TEXT_DIM // 8)))
        bits = octets[:, None].bitwise_right_shift(torch.arange(8)).bitwise_and(1)
        embedding[0, i] = bits.flatten() * 2.0 - 1.0
    return embedding


def patch_basis() -> torch.Tensor:
    """Rows of the latent map: float32 [LATENT_CHANNELS, PATCH * PATCH * 3], orthonormal.

    Row = (colour axis) x (two-dimensional DCT-II wave of the patch). The colour axes are grey, red against
    cyan, and green against blue.
    """
    axes = torch.tensor([[1.0, 1.0, 1.0], [2.0, -1.0, -1.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    axes = axes / axes.norm(dim=1, keepdim=True)
    n = torch.arange(PATCH, dtype=torch.float64)
    waves = torch.cos(math.pi / PATCH * (n + 0.5) * n[:, None])
    waves = waves / waves.norm(dim=1, keepdim=True)
    rows = [
        torch.einsum("y,x,c->yxc", waves[fy], waves[fx], axes[axis]).flatten()
        for axis, fy, fx in COEFFICIENTS
    ]
    return torch.stack(rows).float()


def encode_frames(frames: torch.Tensor) -> torch.Tensor:
    """Frames [B, T, H, W, 3] in 0..1 -> latents [B, 16, T, H / PATCH, W / PATCH], float32.

    The coarsest channel has unit variance, finer ones less. They are what the diffusion model sees;
    ComfyUI's LATENT differs by Wan's per-channel scale and mean. Raises ValueError if H or W is no
    multiple of PATCH.
    """
    b, t, height, width, _ = frames.shape
    if height % PATCH or width % PATCH:
        raise ValueError(f"height and width must be multiples of {PATCH}, got {height} x {width}")
    patches = (
        frames.float()
        .reshape(b, t, height // PATCH, PATCH, width // PATCH, PATCH, 3)
        .transpose(3, 4)
        .flatten(4)
    )
    mean, scale, basis = constants(frames.device)
    return ((patches @ basis.T - mean) / scale).movedim(-1, 1)


def decode_latent(latent: torch.Tensor) -> torch.Tensor:
    """Latents [B, 16, T, h, w] -> frames [B, T, h * PATCH, w * PATCH, 3], float32 in 0..1.

    The adjoint of encode_frames: a round trip loses what the 16 channels do not carry (39 dB on the clips).
    Raises ValueError for any other rank or channel count.
    """
    if latent.ndim != 5 or latent.shape[1] != LATENT_CHANNELS:
        raise ValueError(f"a clip's latent is [B, {LATENT_CHANNELS}, T, h, w], got {list(latent.shape)}")
    mean, scale, basis = constants(latent.device)
    patches = (latent.float().movedim(1, -1) * scale + mean) @ basis
    b, t, h, w, _ = patches.shape
    frames = patches.reshape(b, t, h, w, PATCH, PATCH, 3).transpose(3, 4)
    return frames.reshape(b, t, h * PATCH, w * PATCH, 3).clamp(0.0, 1.0)


def constants(device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Channel means [16], channel scales [16] and the basis [16, 48], on a device."""
    mean, std = torch.tensor(CHANNEL_MEAN), torch.tensor(CHANNEL_STD)
    # half whitened: at unit variance everywhere, fine detail would count as much as the shapes do
    scale = (std * std[0]).sqrt()
    return mean.to(device), scale.to(device), patch_basis().to(device)
