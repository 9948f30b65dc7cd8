"""Attention with every quantizer as a parameter, in plain PyTorch on whole rows of probabilities.

For what has no stage in the pack: published recipes of others and variants of ours. On our own recipes it
agrees with the stages up to float32 rounding (test_dense.py). Keys come in tiles of 128; probabilities are
made tile by tile against the running maximum, as a fused kernel makes them.
"""

from dataclasses import dataclass, replace

import torch
from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.formats import LOG2E, TILE
from comfyui_vc_attention.kernels.prepare import nvfp4_shaping
from comfyui_vc_attention.kernels.prepare.reference import (
    in_tile_order,
    in_tiles,
    in_token_order,
    microscaled,
    rotate,
    tile_means,
)

WHOLE = 0  # a group of rows that is the whole head


@dataclass(frozen=True)
class Numerics:
    """Formats and scales of one method. Groups count consecutive rows; WHOLE is one scale a head."""

    qk: str = "int8"  # int8, e4m3, nvfp4, exact
    q_group: int = 1  # rows that share a Q scale
    k_group: int = 32  # keys that share a K scale
    k_lanes: bool = False  # the keys of a group are every fourth pair of 4 * k_group keys, as one GPU lane's
    smooth_k: bool = True  # subtract the key channel mean
    smooth_q: bool = False  # quantize q minus the mean of its 128 rows; the rest of the scores is exact
    rotate_qk: bool = True
    p: str = "e4m3"  # expcast, e4m3, u8, nvfp4, fp16, exact
    p_top: float = 256.0  # e4m3: where the row maximum lands
    exact_sum: bool = False  # the normalizer sums probabilities before they are rounded
    exact_mass: bool = False  # the means are restored with that sum, too (Eq. 6 to the letter)
    v: str = "e4m3"  # e4m3, s8, nvfp4, fp16, exact
    v_group: int = WHOLE  # keys that share a V scale, by channel
    v_top: float = 448.0  # e4m3: where the largest value of a group lands
    v_channels: bool = True  # False: all channels share a V scale
    v_scale_of_residual: bool = True  # False: scale from v itself, known before the means are (F1)
    v_level: bool = False  # s8: what rounding misses sums to little over a group (I1)
    demean: bool = False
    rotate_v: bool = False
    global_scale: bool = True  # nvfp4: one float32 scale a head beside the microscales
    two_scales: bool = False  # nvfp4: of Q, K and V, the better of the largest at 6 and at 4 (N2)
    shaping: str = ""  # nvfp4, parts of N6: "balance", "unbalanced" (feedback alone) or "feedback" (both)
    means_of_codes: bool = False  # nvfp4: the stored means make up for the mean error of a tile's values


def weights_and_values(q, k, v, numerics, order=None, scale=None, seen=None):
    """Quantized probabilities [B, H, M, L] and values [B, H, L, D], both in tile order; their product is the
    output. q [B, H, M, D] holds some rows of the queries, whole blocks of 128 where rows share anything;
    seen: all queries, where it is not q."""
    q, k, v = q.float(), in_tile_order(k.float(), order, None), in_tile_order(v.float(), order, None)
    keys = k.shape[2]
    seen = q if seen is None else seen.float(), in_token_order(k, order)
    t = scores(q, k, numerics, q.shape[-1] ** -0.5 if scale is None else scale, seen)
    t = torch.nn.functional.pad(t, (0, -keys % TILE), value=-torch.inf).unflatten(-1, (-1, TILE))
    weights = probabilities(t, numerics).flatten(-2)[..., :keys]
    return weights, values(v, numerics)


def outputs(q, k, v, numerics, order=None, seen=None):
    """(output, output had the values been exact, values as quantized, values): as stages.run_stages."""
    weights, quantized = weights_and_values(q, k, v, numerics, order, seen=seen)
    ordered = in_tile_order(v.float(), order, None)
    if not numerics.exact_mass:
        return weights @ quantized, weights @ ordered, quantized, ordered
    # p is rounded for the residuals only; what rounding took from a tile's mass returns as its mean
    exact = weights_and_values(q, k, v, replace(numerics, p="exact"), order, seen=seen)[0]
    means = tile_means(ordered).bfloat16().float().repeat_interleave(TILE, 2)[:, :, : ordered.shape[2]]
    restored = exact @ means
    return (
        weights @ (quantized - means) + restored,
        weights @ (ordered - means) + restored,
        quantized,
        ordered,
    )


def scores(q, k, numerics, scale, seen=None):
    """q . k in log2 units, [B, H, M, L]; seen: all queries and the keys in token order, None for q and k."""
    all_q, in_place = seen or (q, k)
    if numerics.smooth_k:
        k, in_place = k - k.mean(2, keepdim=True), in_place - k.mean(2, keepdim=True)
    beside = 0.0
    if numerics.smooth_q:
        means = block_means(q)
        beside, q, all_q = means @ k.transpose(-1, -2), q - means, all_q - block_means(all_q)
    if numerics.shaping:
        q, k = shaped(q, k, numerics, (all_q, in_place))
        return (q @ k.transpose(-1, -2) + beside) * (scale * LOG2E)
    if numerics.rotate_qk:
        q, k = rotate(q), rotate(k)
    q = rounded_rows(q, numerics.qk, numerics.q_group, numerics.global_scale, numerics.two_scales)
    k = _lanes(k, numerics, rounded_rows)
    return (q @ k.transpose(-1, -2) + beside) * (scale * LOG2E)


def block_means(q):
    """Means of 128 rows each, once for every row."""
    return tile_means(q).repeat_interleave(TILE, 2)[:, :, : q.shape[2]]


def shaped(q, k, numerics, seen):
    """q and k as quantized by N6, or by a part of it; seen: what their second moments are taken of."""
    d = q.shape[-1]
    turn = formats.hadamard_matrix(d, q.dtype, q.device) if numerics.rotate_qk else torch.eye(d).to(q)
    balanced = numerics.shaping != "unbalanced"
    moments = [nvfp4_shaping.second_moments(nvfp4_shaping.sampled(x)) for x in seen]
    s = nvfp4_shaping.balance(*moments) if balanced else torch.ones_like(q[:, :, :1])
    to_q, to_k = s.mT * turn, turn / s.mT
    made = []
    for x, to, other in ((q, to_q, to_k.mT @ moments[1] @ to_k), (k, to_k, to_q.mT @ moments[0] @ to_q)):
        if numerics.shaping == "balance":
            made.append(nvfp4(x @ to, numerics.global_scale, numerics.two_scales))
            continue
        x, choose = x @ to, microscaled if numerics.two_scales else _scales_at_6
        g = x.abs().amax((2, 3))[..., None] / formats.NVFP4_MAX
        matrix = nvfp4_shaping.feedback(other)
        codes, scales = nvfp4_shaping.microscaled_with_feedback(x, g, matrix, choose)
        step = (scales.float() * g[..., None]).repeat_interleave(formats.MICRO, -1)
        made.append(formats.from_e2m1(codes) * step)
    return made


def _scales_at_6(x, g):
    """As microscaled(), the scale alone."""
    return None, formats.to_e4m3(x.abs().amax(-1, keepdim=True) / (formats.E2M1_MAX * g[..., None]))


def _lanes(k, numerics, rounding):
    """K rounded by groups, the keys of each block of 4 groups put lane by lane first if asked for."""
    if not numerics.k_lanes:
        return rounding(k, numerics.qk, numerics.k_group, numerics.global_scale, numerics.two_scales)
    block, length = 4 * numerics.k_group, k.shape[2]
    place = torch.arange(-(-length // block) * block, device=k.device).view(-1, block // 8, 4, 2)
    listed = place.transpose(1, 2).flatten()
    padded = torch.nn.functional.pad(k, (0, 0, 0, len(listed) - length))
    made = rounding(
        padded[:, :, listed], numerics.qk, numerics.k_group, numerics.global_scale, numerics.two_scales
    )
    return made[:, :, listed.argsort()][:, :, :length]


def rounded_rows(x, kind, group, global_scale=True, two_scales=False):
    """x [B, H, L, D] as quantized with one scale per group of rows."""
    if kind == "exact":
        return x
    if kind == "nvfp4":
        return nvfp4(x, global_scale, two_scales)
    groups = in_tiles(x, group or x.shape[2])
    made = rounded(groups, groups.abs().amax((3, 4), keepdim=True), kind)
    return made.flatten(2, 3)[:, :, : x.shape[2]]


def rounded(x, amax, kind, top=None):
    """x rounded to kind with the scale that puts amax at top, and scaled back."""
    top = top or {"int8": formats.INT8_MAX, "s8": formats.INT8_MAX, "e4m3": formats.E4M3_MAX}[kind]
    scale = torch.where(amax > 0, amax / top, 1.0)
    cast = formats.to_e4m3 if kind == "e4m3" else formats.to_int8
    return cast(x / scale).float() * scale


def nvfp4(x, global_scale=True, two_scales=False):
    """x [B, H, ..., n] with n % 16 == 0 in E2M1 with E4M3 scales of 16 elements (N1, N2)."""
    g = torch.ones((), device=x.device)
    if global_scale:
        amax = x.abs().amax(tuple(range(2, x.ndim)), keepdim=True)[..., None]
        g = torch.where(amax > 0, amax / formats.NVFP4_MAX, 1.0)
    groups = x.unflatten(-1, (-1, formats.MICRO))
    tops = (formats.E2M1_MAX, formats.E2M1_BELOW) if two_scales else (formats.E2M1_MAX,)
    made = []
    for top in tops:
        step = formats.to_e4m3(groups.abs().amax(-1, keepdim=True) / (top * g)).float() * g
        codes = formats.to_e2m1(torch.where(step > 0, groups / step, 0.0))
        made.append(formats.from_e2m1(codes) * step)
    errors = torch.stack([(x - groups).square().sum(-1) for x in made])
    return torch.where((errors[-1] < errors[0])[..., None], made[-1], made[0]).flatten(-2)


def probabilities(t, numerics):
    """Normalized quantized probabilities of log2 scores t [B, H, M, T, 128]."""
    tops = t.amax(-1)
    running = tops.cummax(-1).values
    reference = tops if numerics.p == "u8" else running
    u = t - reference[..., None]
    exact = torch.exp2(u)
    if numerics.p == "expcast":
        p = formats.expcast_codes(u).view(torch.float8_e4m3fn).float() / formats.P_FP8_SCALE
    elif numerics.p == "e4m3":
        p = formats.to_e4m3(numerics.p_top * exact).float() / numerics.p_top
    elif numerics.p == "u8":
        p = torch.round(formats.UINT8_MAX * exact) / formats.UINT8_MAX
    elif numerics.p == "fp16":
        p = exact.half().float()
    elif numerics.p == "nvfp4":
        p = _nvfp4_probabilities(exact)
    else:
        p = exact
    merge = torch.exp2(reference - running[..., -1:])[..., None]
    total = ((exact if numerics.exact_sum else p) * merge).sum((-1, -2), keepdim=True)
    return p * merge / total


def _nvfp4_probabilities(exact):
    """Two levels: the row maximum at 2688, then E2M1 with an E4M3 scale per 16 keys (N4)."""
    groups = (formats.NVFP4_MAX * exact).unflatten(-1, (-1, formats.MICRO))
    step = formats.to_e4m3(groups.amax(-1, keepdim=True) / formats.E2M1_MAX).float()
    codes = formats.to_e2m1(torch.where(step > 0, groups / step, 0.0))
    return (formats.from_e2m1(codes) * step).flatten(-2) / formats.NVFP4_MAX


def values(v, numerics):
    """Values [B, H, L, D] as quantized and, if asked for, demeaned and restored."""
    x = rotate(v) if numerics.rotate_v else v
    length, means = x.shape[2], 0.0
    if numerics.demean:
        means = tile_means(x).bfloat16().float().repeat_interleave(TILE, 2)[:, :, :length]
    residual = x - means
    if numerics.v == "fp16":
        made = residual.half().float()
    elif numerics.v == "exact":
        made = residual
    elif numerics.v == "nvfp4":
        tiles = in_tiles(residual).transpose(-1, -2)
        made = nvfp4(tiles, numerics.global_scale, numerics.two_scales).transpose(-1, -2)
        made = made.flatten(2, 3)[:, :, :length]
        if numerics.means_of_codes:
            moved = tile_means(residual - made).repeat_interleave(TILE, 2)[:, :, :length]
            means = (means + moved).bfloat16().float()
    else:
        made = _scaled_values(residual, residual if numerics.v_scale_of_residual else x, numerics)
    made = made + means
    return made @ formats.hadamard_matrix(v.shape[-1], v.dtype, v.device).T if numerics.rotate_v else made


def _scaled_values(residual, measured, numerics):
    group = numerics.v_group or residual.shape[2]
    over = (3,) if numerics.v_channels else (3, 4)
    amax = in_tiles(measured, group).abs().amax(over, keepdim=True)
    tiles = in_tiles(residual, group)
    if numerics.v_level:
        scale = torch.where(amax > 0, amax / formats.INT8_MAX, 1.0)
        missed = (tiles / scale - torch.round(tiles / scale)).sum(3, keepdim=True)
        keys = in_tiles(torch.ones_like(residual[:1, :1, :, :1]), group).sum(3, keepdim=True)
        tiles = tiles + scale * missed / (keys + formats.ROUNDING_PRIOR)
    top = numerics.v_top if numerics.v == "e4m3" else None
    made = rounded(tiles, amax, numerics.v, top)
    return made.flatten(2, 3)[:, :, : residual.shape[2]]
