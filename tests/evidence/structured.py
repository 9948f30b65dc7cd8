"""Made values with the structure that the paper measures on Wan2.2: smooth fields, recurring contents, noise.

A head's values are a sum of four parts: a constant per channel, fields that are smooth in time and space,
one of a few contents per token (anywhere in the clip), and noise. Their energy shares and the overall scale
are calibrated to four numbers of the paper and to nothing else: tile means remove 8% of the energy in
sequence order, 12% in static cubes of 2 x 8 x 8 tokens and 36% in grouped order (Figure 4), and the mean
squared E4M3 error in sequence order is 1.81e-4 (Table 1). Table 1's other rows are then a prediction.
"""

from dataclasses import dataclass, replace

import torch
from comfyui_vc_attention.kernels.group.reference import group_tokens
from comfyui_vc_attention.kernels.prepare.reference import in_tile_order, tile_means, values_fp8
from comfyui_vc_attention.kernels.testing import energy_removed

from .orders import static_cube

TARGET_SHARES = {"sequence": 0.08, "cube": 0.12, "grouped": 0.36}  # paper, Figure 4
TARGET_VALUE_MSE = 1.81e-4  # paper, Table 1, sequence order
TARGET_RATIOS = {"cube": 0.961, "grouped": 0.707}  # Table 1 over its first row; predicted, not fitted

FIELDS = 16  # smooth fields that share a head's channels (chosen)
FIELD_LENGTHS = (1.5, 3.0, 3.0)  # spread of a field in frames, rows, columns (chosen)
CONTENTS = 64  # contents that recur in the clip (chosen)
CALIBRATION_GRID, CALIBRATION_HEADS = (21, 45, 80), 2  # Wan2.2 at 720p, the paper's tensors


@dataclass(frozen=True)
class Shares:
    """Energy shares of the parts; noise has the rest. scale: standard deviation of a value."""

    constant: float
    field: float
    content: float
    scale: float

    @property
    def noise(self) -> float:
        return 1.0 - self.constant - self.field - self.content


CALIBRATED = Shares(constant=0.0645, field=0.1213, content=0.3160, scale=0.5362)


def smooth_fields(heads, grid, generator, device):
    """FIELDS smooth random fields of unit variance on the token grid: [heads, L, FIELDS]."""
    x = torch.randn(heads * FIELDS, *grid, device=device, generator=generator)
    for axis, (length, size) in enumerate(zip(FIELD_LENGTHS, grid, strict=True), start=1):
        # on the frequencies of a ring, so that the ends of an axis meet and any size works
        wave = torch.fft.fftfreq(size, device=device)
        gain = (-0.5 * (2 * torch.pi * length * wave).square()).exp()
        shape = [1] * 4
        shape[axis] = size
        x = torch.fft.ifft(torch.fft.fft(x, dim=axis) * gain.view(shape), dim=axis).real
    x = x.flatten(1)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    return x.unflatten(0, (heads, FIELDS)).transpose(1, 2)


def structured_qkv(
    heads, grid, shares=CALIBRATED, head_dim=128, device="cpu", seed=0, drift=0.0, by_content=False
):
    """q, k, v [1, heads, L, head_dim] in float32, L the tokens of grid (frames, rows, columns).

    Queries and keys see the same fields, so that a query attends to its surroundings; with by_content they
    see the contents, too, and attend to tokens of the same content wherever they are. v is the same either
    way. Keys have a constant offset per channel. drift: energy share of v's noise that is drawn anew, as if
    at a neighbouring denoising step; all else depends on the seed alone.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tokens = grid[0] * grid[1] * grid[2]

    def normal(*size):
        return torch.randn(*size, device=device, generator=generator)

    fields = smooth_fields(heads, grid, generator, device)
    to_values, to_scores = (normal(heads, FIELDS, head_dim) / FIELDS**0.5 for _ in range(2))
    labels = torch.randint(0, CONTENTS, (heads, tokens), device=device, generator=generator)
    contents = normal(heads, CONTENTS, head_dim)
    constant = normal(heads, 1, head_dim)
    seen = fields @ to_scores
    if by_content:
        apart = torch.Generator(device).manual_seed(seed + 1_000_003)
        looks = torch.randn(heads, CONTENTS, head_dim, device=device, generator=apart)
        seen = 0.5**0.5 * (seen + looks.gather(1, labels[..., None].expand(-1, -1, head_dim)))
    q = 0.5**0.5 * (seen + normal(heads, tokens, head_dim))
    k = 0.5**0.5 * (seen + normal(heads, tokens, head_dim)) + 2 * normal(heads, 1, head_dim)
    noise = normal(heads, tokens, head_dim)
    if drift:
        noise = (1 - drift) ** 0.5 * noise + drift**0.5 * normal(heads, tokens, head_dim)
    v = shares.constant**0.5 * constant + shares.field**0.5 * (fields @ to_values)
    v += shares.content**0.5 * contents.gather(1, labels[..., None].expand(-1, -1, head_dim))
    v += shares.noise**0.5 * noise
    return q[None], k[None], shares.scale * v[None]


def value_mse(v, order=None):
    """Mean squared error of demeaned values in E4M3 with one scale per channel (Table 1), a float."""
    ordered = in_tile_order(v.float(), order, None)
    means = tile_means(ordered)
    made = values_fp8(ordered, means, torch.bfloat16, None)
    return float((decoded_fp8(made, ordered.shape[2]) - ordered).double().square().mean())


def decoded_fp8(made, keys):
    """Values that the operands of values_fp8 stand for, [B, H, keys, D]."""
    values = made["v"].float()
    if made["v_mean"] is not None:
        values = values + made["v_mean"].float().repeat_interleave(128, 2)[:, :, :keys]
    return values * made["v_scale"][:, :, None]


def observed(shares, grid=CALIBRATION_GRID, heads=CALIBRATION_HEADS, seed=0, clusters=128, device="cpu"):
    """What the paper reports, on made values: shares removed and value errors by order."""
    v = structured_qkv(heads, grid, shares, device=device, seed=seed)[2]
    orders = {
        "sequence": None,
        "cube": static_cube(grid, heads, device),
        "grouped": group_tokens(v, clusters).order,
    }
    found = {name: energy_removed(v, order) for name, order in orders.items()}
    errors = {name: value_mse(v, order) for name, order in orders.items()}
    return found, errors


def calibrate(shares=CALIBRATED, rounds=12, **where):
    """Shares that meet the targets on observed(): Newton's steps with one measured slope a part."""
    for _ in range(rounds):
        found, errors = observed(shares, **where)
        gaps = torch.tensor([TARGET_SHARES[name] - found[name] for name in TARGET_SHARES])
        if gaps.abs().max() < 1e-4:
            break
        slopes = torch.stack(
            [_slope(shares, part, found, where) for part in ("constant", "field", "content")], 1
        )
        step = torch.linalg.solve(slopes, gaps)
        shares = replace(
            shares,
            constant=max(0.0, shares.constant + step[0].item()),
            field=max(0.0, shares.field + step[1].item()),
            content=max(0.0, shares.content + step[2].item()),
        )
    errors = observed(shares, **where)[1]
    return replace(shares, scale=shares.scale * (TARGET_VALUE_MSE / errors["sequence"]) ** 0.5)


def _slope(shares, part, found, where, by=0.01):
    moved = observed(replace(shares, **{part: getattr(shares, part) + by}), **where)[0]
    return torch.tensor([(moved[name] - found[name]) / by for name in TARGET_SHARES])
