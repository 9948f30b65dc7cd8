"""Name the shape and the colour of a clip, by rule: the hue of its saturated pixels, templates of the shapes.

``python tests/sample_model classify`` prints how well it names freshly drawn clips.
"""

import argparse
import math

import torch
from comfyui_vc_attention.nodes.sample_clip import COLOURS, PROMPTS, SHAPES

from .clips import RGB, draw_clips, shape_distance, turn

SATURATED = 0.22  # chosen: twice the strongest tint of background and pillar, half the palest shape
SAME_HUE = 0.8  # cosine between a pixel's and a palette colour's hue; neighbouring colours are under 0.5
SMALLEST = 60  # pixels; a smaller patch of colour is no shape
LOOKS = 4  # pictures of a clip that are compared with the templates: those that show most of the shape
MARGIN = 16  # pixels around the shape that a template may still cover
ANGLES = torch.linspace(-0.7, 0.7, 15)  # shapes are turned by at most 0.6


def name_clip(frames):
    """(shape, colour) of a clip [T, H, W, 3] in 0..1; ("none", "none") if it shows no coloured shape."""
    hue = hue_plane(frames.float())
    palette = hue_plane(torch.tensor([RGB[name] for name in COLOURS]))
    palette = palette / palette.norm(dim=-1, keepdim=True)
    strength = hue.norm(dim=-1)
    alike = hue @ palette.T / strength.clamp_min(1e-6)[..., None]
    masks = (alike > SAME_HUE) & (strength > SATURATED)[..., None]
    counts = masks.sum(dim=(0, 1, 2))
    colour = int(counts.argmax())
    mask = masks[..., colour]
    area = mask.sum(dim=(1, 2))
    if area.max() < SMALLEST:
        return "none", "none"
    best = area.topk(min(LOOKS, len(area))).indices
    score = sum(template_overlap(mask[i]) for i in best if area[i] >= SMALLEST)
    return SHAPES[int(score.argmax())], COLOURS[colour]


def hue_plane(rgb):
    """Colours [..., 3] without their grey part, on two orthonormal axes: [..., 2]."""
    axes = torch.tensor([[2.0, -1.0, -1.0], [0.0, math.sqrt(3.0), -math.sqrt(3.0)]]) / math.sqrt(6.0)
    return rgb @ axes.T


def template_overlap(mask):
    """Best intersection over union of a mask [H, W] with each shape, over small turns: [len(SHAPES)].

    A template has the mask's area and centre.
    """
    rows, columns = (mask.any(dim).nonzero().flatten() for dim in (1, 0))
    top, left = (max(0, int(line[0]) - MARGIN) for line in (rows, columns))
    mask = mask[
        top : int(rows[-1]) + MARGIN, left : int(columns[-1]) + MARGIN
    ]  # templates are cheaper on less
    y, x = mask.nonzero().float().unbind(1)
    centre_y, centre_x, area = y.mean(), x.mean(), len(x)
    grid_y, grid_x = (torch.arange(n, dtype=torch.float32) for n in mask.shape)
    u, v = turn(grid_x - centre_x, (grid_y - centre_y)[:, None], ANGLES[:, None, None])
    overlap = []
    for i in range(len(SHAPES)):
        radius = math.sqrt(area / unit_area(i))
        shape = shape_distance(u, v, radius, torch.tensor(i)) < 0.0
        overlap.append(((shape & mask).sum((1, 2)) / (shape | mask).sum((1, 2))).max())
    return torch.stack(overlap)


def unit_area(shape):
    """Area of SHAPES[shape] at radius 1."""
    return {
        "circle": math.pi * 0.92**2,
        "square": 4 * 0.82**2,
        "triangle": 3 * math.sqrt(3.0) * 0.66**2,
        "cross": 4 * 0.36 * (2 * 1.1 - 0.36),
    }[SHAPES[shape]]


def count_right(clips, prompts):
    """How many clips show what their prompt says: (shape right, colour right, both right)."""
    named = [name_clip(clip) for clip in clips]
    wanted = [tuple(reversed(prompt.split()[1:])) for prompt in prompts]
    shape = sum(n[0] == w[0] for n, w in zip(named, wanted, strict=True))
    colour = sum(n[1] == w[1] for n, w in zip(named, wanted, strict=True))
    return shape, colour, sum(n == w for n, w in zip(named, wanted, strict=True))


def main(argv):
    parser = argparse.ArgumentParser(prog="classify", description=__doc__)
    parser.add_argument("--clips", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    prompts = torch.arange(args.clips) % len(PROMPTS)
    clips = draw_clips(prompts, args.seed)
    shape, colour, both = count_right(clips, [PROMPTS[i] for i in prompts.tolist()])
    print(f"{args.clips} drawn clips: shape right {shape}, colour right {colour}, both {both}")
