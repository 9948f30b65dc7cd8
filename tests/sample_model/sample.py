"""Sample clips from the sample model without ComfyUI: Euler steps over Wan's shifted schedule.

``python tests/sample_model sample --prompt "a red circle" --out clip.webp``
"""

import argparse
import itertools
from pathlib import Path

import torch
from comfyui_vc_attention.nodes.sample_clip import (
    CLIP_FRAMES,
    LATENT_SHAPE,
    PROMPTS,
    decode_latent,
    prompt_embedding,
)

from .model import load_model

WEIGHTS = Path(__file__).resolve().parents[2] / "nodes" / "sample_model" / "wan_sample.safetensors"
SHIFT = 8.0  # ComfyUI's default for Wan 2.1
SCHEDULE_LENGTH = 1000


def shifted_sigmas(steps, shift=SHIFT):
    """The sigmas of ComfyUI's "simple" scheduler: float32 [steps + 1], from 1 down to 0."""
    index = torch.tensor([SCHEDULE_LENGTH - int(i * SCHEDULE_LENGTH / steps) for i in range(steps)])
    part = index.double() / SCHEDULE_LENGTH
    return torch.cat([shift * part / (1 + (shift - 1) * part), torch.zeros(1, dtype=torch.float64)]).float()


def first_noise(count, seed):
    """What a sampling of so many clips starts from: float32 [count, 16, T, h, w]."""
    return torch.randn(count, *LATENT_SHAPE, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def sample_latents(model, prompts, *, seed=0, noise=None, steps=10, cfg=1.0, **forward_options):
    """Latents of one clip per prompt: float32 [B, 16, T, h, w] on the model's device.

    noise: to start from in the place of seed's. cfg 1 skips the unconditional pass. forward_options go to
    the model's forward (attention=...).
    """
    weight = model.head.head.weight
    context = torch.cat([prompt_embedding(p) for p in prompts]).to(weight)
    nothing = torch.zeros_like(context)
    x = (first_noise(len(prompts), seed) if noise is None else noise).to(weight.device)
    sigmas = shifted_sigmas(steps).tolist()
    for sigma, following in itertools.pairwise(sigmas):
        timestep = torch.full((len(prompts),), 1000.0 * sigma, device=x.device)
        velocity = model(x.to(weight.dtype), timestep, context, **forward_options).float()
        if cfg != 1.0:
            free = model(x.to(weight.dtype), timestep, nothing, **forward_options).float()
            velocity = free + cfg * (velocity - free)
        x = x + (following - sigma) * velocity
    return x


def sample_clips(model, prompts, *, batch=8, seed=0, **options):
    """Frames [B, T, H, W, 3] in 0..1 on the CPU, sampled a few clips at a time; batch i uses seed + i."""
    parts = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    latents = [sample_latents(model, part, seed=seed + i, **options) for i, part in enumerate(parts)]
    return torch.cat([decode_latent(latent).cpu() for latent in latents])


def contact_sheet(clips, every=1):
    """One row of pictures per clip, as a PIL image."""
    from PIL import Image

    rows = clips[:, ::every].permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2)
    return Image.fromarray((rows * 255).round().byte().numpy())


def save_animation(clips, path, columns=4, enlarge=2):
    """Write clips [B, T, H, W, 3] side by side as one animated WebP."""
    from PIL import Image

    pictures = []
    for t in range(clips.shape[1]):
        rows = [torch.cat(list(row), dim=1) for row in clips[:, t].split(columns)]
        picture = Image.fromarray((torch.cat(rows) * 255).round().byte().numpy())
        pictures.append(picture.resize([n * enlarge for n in picture.size], Image.Resampling.BICUBIC))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=120, loop=0, quality=80)


def main(argv):
    parser = argparse.ArgumentParser(prog="sample", description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--prompt", choices=PROMPTS, help="default: every prompt once")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cfg", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("clip.webp"), help=".webp moves, .png is a sheet")
    args = parser.parse_args(argv)
    prompts = [args.prompt] if args.prompt else list(PROMPTS)
    clips = sample_clips(load_model(args.weights), prompts, steps=args.steps, cfg=args.cfg, seed=args.seed)
    if args.out.suffix == ".png":
        contact_sheet(clips).save(args.out)
    else:
        save_animation(clips, args.out, columns=min(4, len(prompts)))
    print(f"wrote {args.out}: {len(prompts)} clips of {CLIP_FRAMES} pictures")
