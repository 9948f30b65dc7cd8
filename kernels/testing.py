"""Inputs and error measures that tests and benchmarks share."""

import torch

KINDS = ("gauss", "clustered", "outlier_tokens", "k_outlier_channels", "peaked")

# Largest relative L2, over blocks of 128 query rows, that the first three kinds may have: half as much again
# as the reference's worst (0.018, 0.047, 0.070 and 0.215, lengths 1 to 600 over 1 to 1000 keys). Held to the
# errors of tests/evidence, "Output error", gauss, by its test_bounds.py.
ERROR_LIMITS = {"int8_int8": 0.03, "int8_fp8": 0.07, "fp8_fp8": 0.105, "nvfp4": 0.32}


def sample_qkv(kind="gauss", shape=(1, 2, 512, 128), keys=None, dtype=torch.float32, device="cpu", seed=0):
    """q [B, H, L, D] and k, v [B, H, keys, D] of one kind.

    gauss: N(0, 1). The others share values in 64 clusters per head and a channel offset on K of std 2;
    outlier_tokens: 2% of the tokens spike in 5% of their channels; k_outlier_channels: 4 K channels x10
    where Q is x0.3; peaked: q x3.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    b, h, lq, d = shape
    lk = keys or lq
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, device=device, generator=generator)

    q, k, v = normal(b, h, lq, d), normal(b, h, lk, d), normal(b, h, lk, d)
    if kind != "gauss":
        centres = 0.9 * normal(b, h, 64, d)
        labels = torch.randint(0, 64, (b, h, lk), device=device, generator=generator)
        v += centres.gather(2, labels[..., None].expand(-1, -1, -1, d))
        k += 2 * normal(b, h, 1, d)
    if kind == "outlier_tokens":
        token = torch.rand(b, h, lk, 1, device=device, generator=generator) < 0.02
        channel = torch.rand(b, h, lk, d, device=device, generator=generator) < 0.05
        v += token * channel * normal(b, h, lk, d) * 12
    if kind == "k_outlier_channels":
        k[..., :4] *= 10
        q[..., :4] *= 0.3
    if kind == "peaked":
        q *= 3
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact_attention(q, k, v, scale=None, key_mask=None):
    """Attention in float64: (out, lse), out [B, H, Lq, D] and natural-log lse [B, H, Lq]."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def relative_l2(out, expected):
    """|out - expected| / |expected| over all elements, a float; NaN in out gives NaN."""
    expected = expected.double()
    return ((out.double() - expected).norm() / expected.norm()).item()


def cosine(out, expected):
    return torch.nn.functional.cosine_similarity(
        out.double().flatten(), expected.double().flatten(), 0
    ).item()


def energy_removed(v, order=None):
    """Share of the value energy that the tile means remove (Eq. 5), averaged over tiles, a float."""
    from .prepare.reference import in_tile_order, in_tiles, tile_means

    v = in_tile_order(v.double(), order, None)
    whole = v.shape[2] // 128
    tiles = in_tiles(v)[:, :, :whole]
    means = tile_means(v)[:, :, :whole]
    return (128 * (means * means).sum(-1) / (tiles * tiles).sum((-1, -2))).mean().item()
