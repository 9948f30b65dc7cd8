"""Errors of attention outputs, of probabilities and of clips."""

import torch
from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.testing import cosine, relative_l2

ROW_BOUND = 0.0364  # total variation of a row without underflow (paper, Eq. 8)
UNDERFLOW = -14.0  # log2 of the smallest probability over the row's largest that stays a normal code


def exact_rows(q, k, v, scale=None):
    """Exact attention of some rows in float32, head by head: [B, H, M, D]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.device.type == "cpu" else torch.float32
    out = torch.empty(q.shape, device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[b, h].to(wide) @ k[b, h].to(wide).T * scale
            out[b, h] = (scores.softmax(-1) @ v[b, h].to(wide)).float()
    return out


def of_output(parts, expected):
    """Numbers of one method on some rows: a dict of floats.

    error: relative L2. cosine_distance: 1 - cosine. coherence: as coherence(). probability_term, value_term:
    the two terms of Eq. 2 over the norm of the output. value_share: the second's share of the sum of squares.
    value_mse, value_error: absolute mean square and relative L2 of the quantized values.
    """
    found = {"error": relative_l2(parts.out, expected), "cosine_distance": 1.0 - cosine(parts.out, expected)}
    found["coherence"] = coherence(parts.out, expected)
    if parts.exact_value_out is None:
        return found
    size = expected.double().norm()
    first = (expected.double() - parts.exact_value_out.double()).norm() / size
    second = (parts.exact_value_out.double() - parts.out.double()).norm() / size
    found |= {"probability_term": first.item(), "value_term": second.item()}
    found["value_share"] = (second.square() / (first.square() + second.square())).item()
    difference = parts.quantized.double() - parts.ordered.double()
    found["value_mse"] = difference.square().mean().item()
    found["value_error"] = (difference.norm() / parts.ordered.double().norm()).item()
    return found


def coherence(out, expected):
    """Share of the error's energy along one channel direction per head, averaged over heads, a float.

    1 / D would be noise; near 1 every row errs alike, which a model's next layers do not average away.
    """
    energies = torch.linalg.svdvals(out.float() - expected.float()).square()
    return (energies[..., 0] / energies.sum(-1).clamp_min(1e-30)).mean().item()


def probability_rows(q, k, scale=None):
    """Log2 of each probability over its row's largest, u <= 0: float32 [B, H, M, L]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    t = q.float() @ k.float().transpose(-1, -2) * (scale * formats.LOG2E)
    return t - t.amax(-1, keepdim=True)


def total_variation(u, cast):
    """Half the L1 distance of the exact and the cast probabilities of rows u [..., L], and the tail (Eq. 14).

    cast: "expcast" or "exp". Returns (variation, tail), each [...]; tail is the larger of the two masses of
    entries below 2^-14 of the row's maximum.
    """
    weights = torch.exp2(u)
    if cast == "expcast":
        made = formats.expcast_codes(u).view(torch.float8_e4m3fn).float()
    elif cast == "exp":
        made = formats.to_e4m3(formats.P_FP8_SCALE * weights).float()
    else:
        raise ValueError(f"cast must be expcast or exp, got {cast!r}")
    p = weights / weights.sum(-1, keepdim=True)
    made = made / made.sum(-1, keepdim=True)
    under = u < UNDERFLOW
    tail = torch.maximum((p * under).sum(-1), (made * under).sum(-1))
    return 0.5 * (p - made).abs().sum(-1), tail


def probability_error(q, k):
    """Mean and largest total variation of the rows, by both casts, and whether Eq. 8 held: a dict."""
    u = probability_rows(q, k)
    found = {"rows": u[..., 0].numel()}
    for cast in ("expcast", "exp"):
        variation, tail = total_variation(u, cast)
        whole = (u >= UNDERFLOW).all(-1)
        found[cast] = {
            "mean": variation.mean().item(),
            "largest": variation.max().item(),
            "largest_without_underflow": variation[whole].max().item() if whole.any() else None,
            "rows_without_underflow": int(whole.sum()),
            "largest_over_bound": (variation - (ROW_BOUND + tail)).max().item(),
        }
    return found


def diameter_bound(q, k, v, rows=64):
    """Largest |o' - o| over its bound (0.0364 + tail) diam(V) for ExpCast on a few rows (Eq. 15), a float."""
    u = probability_rows(q[:, :, :rows], k)
    _, tail = total_variation(u, "expcast")
    p = torch.softmax(u * formats.LN2, -1)
    made = formats.expcast_codes(u).view(torch.float8_e4m3fn).float()
    made = made / made.sum(-1, keepdim=True)
    moved = ((made - p) @ v.float()).norm(dim=-1)
    # the diameter lies between the largest distance from the mean and twice it; the lower one is stricter
    width = (v.float() - v.float().mean(2, keepdim=True)).norm(dim=-1).amax(-1, keepdim=True)
    return (moved / ((ROW_BOUND + tail) * width)).max().item()


GMSD_CONSTANT = 170.0 / 255.0**2  # of Xue et al. 2014, for pictures in 0..1


def gmsd(a, b):
    """Gradient magnitude similarity deviation: a, b [N, C, H, W] in 0..1 -> float64 [N]; 0 if equal.

    On the mean of the channels, averaged over 2 x 2 pixels first; Prewitt gradients.
    """
    column = torch.tensor([1.0, 0.0, -1.0], device=a.device) / 3.0
    across = column.expand(3, 3)
    kernels = torch.stack([across, across.T])[:, None]

    def magnitude(x):
        x = torch.nn.functional.avg_pool2d(x.float().mean(1, keepdim=True), 2)
        return torch.nn.functional.conv2d(x, kernels, padding=1).square().sum(1).sqrt()

    x, y = magnitude(a), magnitude(b)
    likeness = (2 * x * y + GMSD_CONSTANT) / (x * x + y * y + GMSD_CONSTANT)
    return likeness.double().flatten(1).std(1, correction=0)
