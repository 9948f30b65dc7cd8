"""Procedural clips: a striped, coloured shape travels past a pillar, in front of a drifting texture.

Every clip follows from its prompt and a row of uniform numbers, so a seed gives the same clips on any device.
"""

import math

import torch
from comfyui_vc_attention.nodes.sample_clip import CLIP_FRAMES, CLIP_SIZE, COLOURS, SHAPES

RGB = {
    "red": (0.86, 0.13, 0.12),
    "green": (0.12, 0.66, 0.20),
    "blue": (0.13, 0.28, 0.88),
    "yellow": (0.94, 0.80, 0.10),
}
GRATINGS = 3
RANDOM_NUMBERS = 40  # per clip; a few are spare


def draw_clips(prompts, seed=0, *, frames=CLIP_FRAMES, size=CLIP_SIZE, device="cpu"):
    """Clips of the given prompts: float32 [B, frames, size, size, 3] in 0..1.

    prompts: int64 [B], indices into PROMPTS (shape-major). size scales the whole scene.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(len(prompts), RANDOM_NUMBERS, generator=generator).to(device)
    prompts = torch.as_tensor(prompts, device=device)
    shape, colour = prompts // len(COLOURS), prompts % len(COLOURS)
    uniform = UniformNumbers(numbers, size / CLIP_SIZE)

    axis = torch.arange(size, device=device) + 0.5
    y, x = axis[:, None].expand(size, size), axis.expand(size, size)
    time = torch.linspace(0.0, 1.0, frames, device=device).view(1, frames, 1, 1)

    background = paint_background(uniform, x, y, time * (frames - 1))
    pillar, pillar_alpha = paint_pillar(uniform, x, y, size)
    paint, alpha, shadow = paint_shape(uniform, x, y, time, size, shape, colour)
    behind = uniform(0.0, 1.0) < 0.5

    picture = background * (1.0 - 0.4 * shadow[..., None])
    front = torch.where(behind, pillar_alpha, alpha)[..., None]
    first = torch.where(behind[..., None], paint, pillar)
    second = torch.where(behind[..., None], pillar, paint)
    back = torch.where(behind, alpha, pillar_alpha)[..., None]
    picture = picture + back * (first - picture)
    return (picture + front * (second - picture)).clamp(0.0, 1.0)


class UniformNumbers:
    """Hands out one uniform number per clip and call: [B, 1, 1, 1]; pixels=True scales with the picture."""

    def __init__(self, numbers, scale):
        self.columns, self.scale = iter(numbers.unbind(1)), scale

    def __call__(self, low, high, pixels=False):
        value = low + (high - low) * next(self.columns)
        return value.view(-1, 1, 1, 1) * (self.scale if pixels else 1.0)


def paint_background(uniform, x, y, frame):
    """A nearly grey sum of gratings that drifts slowly: [B, T, S, S, 3]."""
    level = uniform(0.40, 0.66)
    tint = torch.stack([uniform(-0.04, 0.04) for _ in range(3)], dim=-1)
    drift_x, drift_y = uniform(-1.2, 1.2, pixels=True), uniform(-0.6, 0.6, pixels=True)
    x, y = x - drift_x * frame, y - drift_y * frame
    light = level
    for _ in range(GRATINGS):
        angle, length = uniform(0.0, math.pi), uniform(16.0, 48.0, pixels=True)
        wave = (x * angle.cos() + y * angle.sin()) * (2.0 * math.pi / length)
        light = light + uniform(0.03, 0.08) * (wave + uniform(0.0, 2.0 * math.pi)).cos()
    return light[..., None] + tint


def paint_pillar(uniform, x, y, size):
    """A round, banded, nearly grey column: colour [B, 1, S, S, 3] and coverage [B, 1, S, S]."""
    half = uniform(5.0, 8.0, pixels=True)
    across = (x - uniform(0.38, 0.62) * size) / half
    bands = (y * (2.0 * math.pi / uniform(9.0, 16.0, pixels=True)) + uniform(0.0, 2.0 * math.pi)).cos()
    level = torch.where(uniform(0.0, 1.0) < 0.5, uniform(0.18, 0.28), uniform(0.78, 0.90))
    light = level * (1.0 - 0.35 * across.clamp(-1.0, 1.0) ** 2) + 0.05 * bands
    warmth = torch.tensor([0.03, 0.0, -0.03], device=x.device)
    return light[..., None] + warmth, (0.5 + half * (1.0 - across.abs())).clamp(0.0, 1.0)


def paint_shape(uniform, x, y, time, size, shape, colour):
    """The travelling shape: colour [B, T, S, S, 3], coverage and soft shadow [B, T, S, S]."""
    radius = uniform(19.0, 23.0, pixels=True)
    start, end = uniform(0.24, 0.32), uniform(0.68, 0.76)
    along = torch.where(uniform(0.0, 1.0) < 0.5, time, 1.0 - time)
    centre_x = (start + (end - start) * along) * size
    y0, y1 = uniform(0.36, 0.64), uniform(0.36, 0.64)
    centre_y = (y0 + (y1 - y0) * time + uniform(-0.08, 0.08) * (math.pi * time).sin()) * size
    angle = uniform(-0.15, 0.15) + uniform(-0.25, 0.25) * time

    u, v = turn(x - centre_x, y - centre_y, angle)
    distance = shape_distance(u, v, radius, shape.view(-1, 1, 1, 1))
    stripes = (v * (2.0 * math.pi / uniform(7.0, 11.0, pixels=True)) + uniform(0.0, 2.0 * math.pi)).cos()
    light = 1.0 - 0.12 * (x - centre_x + y - centre_y) / radius + 0.10 * stripes
    palette = torch.tensor([RGB[name] for name in COLOURS], device=x.device)
    paint = palette[colour].view(-1, 1, 1, 1, 3) * light[..., None]

    offset = 0.3 * radius
    u, v = turn(x - centre_x - offset, y - centre_y - offset, angle)
    shadow = (0.5 - shape_distance(u, v, radius, shape.view(-1, 1, 1, 1)) / (0.5 * radius)).clamp(0.0, 1.0)
    return paint, (0.5 - distance).clamp(0.0, 1.0), shadow


def turn(x, y, angle):
    """Coordinates in a frame turned by angle (radians)."""
    cos, sin = angle.cos(), angle.sin()
    return x * cos + y * sin, y * cos - x * sin


def shape_distance(u, v, radius, shape):
    """Signed distance in pixels to the outline of SHAPES[shape], negative inside; areas near 2.6 radius^2."""
    au, av = u.abs(), v.abs()
    candidates = {
        "circle": (u * u + v * v).sqrt() - 0.92 * radius,
        "square": torch.maximum(au, av) - 0.82 * radius,
        "triangle": torch.maximum(v, math.sqrt(0.75) * au - 0.5 * v) - 0.66 * radius,
        "cross": torch.minimum(
            torch.maximum(au - 1.1 * radius, av - 0.36 * radius),
            torch.maximum(au - 0.36 * radius, av - 1.1 * radius),
        ),
    }
    distance = candidates[SHAPES[0]]
    for i, name in enumerate(SHAPES[1:], start=1):
        distance = torch.where(shape == i, candidates[name], distance)
    return distance
