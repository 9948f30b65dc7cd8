"""From floating-point q, k, v to quantized operands, one small function per step (C1 to C5, I1, F1, N2, N6).

Works in float32, or in float64 when the inputs are float64. Keys whose index is at or past key_count
do not exist: they are zero in every code, scale and mean that comes out.
"""

import torch

from .. import formats
from ..config import Recipe
from ..formats import K_GROUP, MICRO, TILE
from ..operands import VCOperands, boxed
from . import nvfp4_shaping


def prepare(q, k, v, recipe: Recipe, *, order=None, key_count=None, softmax_scale, rope=None, want_lse=False):
    """Quantize one call.

    q: [B, H, Lq, D]; k, v: [B, H, Lk, D]. order: int32 [B, H, Lk] or None (token order). key_count: int32
    [B] or None; only the first key_count entries of order exist. rope: (cos, sin, layout) as apply_rope.
    Returns VCOperands. q, k, v may come in boxes, which are emptied when the call was quantized.
    """
    boxes = boxed(q), boxed(k), boxed(v)
    q, k, v = (box.peek() for box in boxes)
    out_dtype, mean_dtype = q.dtype, torch.float16 if v.dtype == torch.float16 else torch.bfloat16
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = q.to(work), k.to(work), v.to(work)
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    k, v = in_tile_order(k, order, key_count), in_tile_order(v, order, key_count)
    k_mean = key_mean(k, key_count)
    lse_shift = None
    if want_lse:
        lse_shift = softmax_scale * (q @ k_mean.transpose(-1, -2))[..., 0] * float(recipe.smooth_k)
    if recipe.smooth_k:
        k = existing(k - k_mean, key_count)
    q_means = k_centred = None
    if recipe.smooth_q:
        q_means, k_centred = tile_means(q), k
        q = residuals(q, q_means)
    feedback = ()
    if recipe.numerics == "nvfp4":
        rotation = formats.hadamard_matrix(q.shape[-1], work, q.device) if recipe.rotate_qk else None
        seen = in_token_order(k, order, key_count)
        (for_q, for_k), feedback = nvfp4_shaping.shaping(q, seen, rotation, key_count)
        q, k = q * for_q, k * for_k
    if recipe.rotate_qk:
        q, k = rotate(q), rotate(k)
    means = tile_means(v, key_count) if recipe.demean else None
    scaled = _PREPARE[recipe.numerics](q, k, v, means, mean_dtype, key_count, *feedback)
    for box in boxes:
        box.take()
    return VCOperands(
        recipe,
        score_scale=softmax_scale * formats.LOG2E,
        key_count=key_count,
        lse_shift=lse_shift,
        out_dtype=out_dtype,
        q_means=q_means,
        k_centred=k_centred,
        **scaled,
    )


def apply_rope(x, cos, sin, layout):
    """Rotary embedding. cos, sin: [L, D/2] or [B, L, D/2], L at least x's; layout: "interleaved" or "half".

    Channel pairs are (2i, 2i+1) when interleaved, (i, i + D/2) when half.
    """
    cos, sin = (
        t[..., : x.shape[2], :].to(x.dtype).reshape(-1, 1, x.shape[2], t.shape[-1]) for t in (cos, sin)
    )
    if layout == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def exists_mask(keys, key_count, device):
    """bool [B or 1, 1, Lk, 1]: which entries of the order are keys."""
    index = torch.arange(keys, device=device)
    if key_count is None:
        return torch.ones_like(index, dtype=torch.bool)[None, None, :, None]
    return (index[None] < key_count[:, None])[:, None, :, None]


def existing(x, key_count):
    return x if key_count is None else torch.where(exists_mask(x.shape[2], key_count, x.device), x, 0.0)


def in_tile_order(x, order, key_count):
    """Rows of x [B, H, Lk, D] in the given order (Eq. 3), absent rows zero."""
    if order is not None:
        x = x.gather(2, order.long()[..., None].expand(-1, -1, -1, x.shape[3]))
    return existing(x, key_count)


def in_token_order(x, order, key_count=None):
    """What in_tile_order made, undone: existing rows in the order of their tokens, absent ones after them."""
    if order is None:
        return x
    return x.gather(2, by_token(order, key_count)[..., None].expand_as(x))


def by_token(order, key_count=None):
    """Places of an order's entries, smallest token first, those that do not exist last: int64 [B, H, Lk]."""
    if key_count is not None:
        order = torch.where(
            exists_mask(order.shape[2], key_count, order.device)[..., 0], order, order.shape[2]
        )
    return order.argsort(dim=-1, stable=True)


def key_mean(k, key_count=None):
    """Channel mean of the existing keys, [B, H, 1, D]."""
    if key_count is None:
        return k.mean(2, keepdim=True)
    return k.sum(2, keepdim=True) / key_count.clamp_min(1)[:, None, None, None]


def rotate(x):
    """Hadamard rotation (C2); dot products of two rotated vectors are those of the vectors."""
    return x @ formats.hadamard_matrix(x.shape[-1], x.dtype, x.device)


def in_tiles(x, size=TILE):
    """[B, H, L, D] -> [B, H, ceil(L / size), size, D], zero padded."""
    pad = -x.shape[2] % size
    return torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, size))


def tile_means(v, key_count=None):
    """Mean of each 128 existing rows, [B, H, T, D] (Eq. 4)."""
    return in_tiles(v).sum(3) / _tile_counts(v, key_count).clamp_min(1)


def _tile_counts(v, key_count):
    """Existing rows of each tile of v, [B or 1, 1, T, 1]."""
    return in_tiles(exists_mask(v.shape[2], key_count, v.device).to(v.dtype)).sum(3)


def residuals(v, means, key_count=None):
    """v minus its tile's mean, [B, H, Lk, D]; absent rows zero."""
    if means is None:
        return v
    return existing(v - means.repeat_interleave(TILE, 2)[:, :, : v.shape[2]], key_count)


def _scale(amax, top):
    """amax / top, 1 for zeros, NaN for what is not finite (C7)."""
    return torch.where(amax == 0, 1.0, amax / top + 0.0 * amax).to(amax.dtype)


def quantize_qk(x, group, top, cast):
    """Codes and one scale per group of rows: x [B, H, L, D] -> codes, [B, H, ceil(L / group)] (C3)."""
    grouped = in_tiles(x, group)
    scale = _scale(grouped.abs().amax((3, 4)), top)
    codes = cast(grouped / scale[..., None, None]).flatten(2, 3)[:, :, : x.shape[2]]
    return codes, scale


def _k_scales_by_tile(scale):
    """[B, H, groups] -> [B, H, T, groups of a tile]; groups that hold no key have scale 1."""
    groups = TILE // K_GROUP
    return torch.nn.functional.pad(scale, (0, -scale.shape[2] % groups), value=1.0).unflatten(2, (-1, groups))


def _qk_operands(q, k, top, cast):
    q_codes, q_scale = quantize_qk(q, 1, top, cast)
    k_codes, k_scale = quantize_qk(k, K_GROUP, top, cast)
    return {"q": q_codes, "q_scale": q_scale, "k": k_codes, "k_scale": _k_scales_by_tile(k_scale)}


def values_int8(v, means, mean_dtype, key_count):
    """I1: 16-bit means, residual in INT8 with a scale per tile and channel and errors of little sum."""
    stored = None if means is None else means.to(mean_dtype)
    residual = residuals(v, None if means is None else stored.to(v.dtype), key_count)
    tiles = in_tiles(residual)
    scale = _scale(tiles.abs().amax(3), formats.INT8_MAX)
    steps = tiles / scale[:, :, :, None]
    missed = (steps - torch.round(steps)).sum(3) / (_tile_counts(v, key_count) + formats.ROUNDING_PRIOR)
    # absent rows stay 0: less than half a step is missed
    codes = formats.to_int8(steps + missed[:, :, :, None]).flatten(2, 3)[:, :, : v.shape[2]]
    return {"v": codes, "v_scale": scale, "v_mean": stored}


def values_fp8(v, means, mean_dtype, key_count):
    """F1: one scale per channel from |v|, fp16 means in units of it, residual in E4M3."""
    scale = _scale(v.abs().amax(2), formats.V_FP8_MAX)
    stored = None if means is None else (means / scale[:, :, None]).to(torch.float16)
    restored = None if means is None else stored.to(v.dtype) * scale[:, :, None]
    residual = residuals(v, restored, key_count)
    return {"v": formats.to_e4m3(residual / scale[:, :, None]), "v_scale": scale, "v_mean": stored}


def microscaled(x, g):
    """N2: x [..., n] with n % 16 == 0 and g broadcastable to [...]: (E2M1 codes, E4M3 microscales)."""
    groups = x.unflatten(-1, (-1, MICRO))
    codes, sigma, error = _microscaled_at(groups, g[..., None], formats.E2M1_MAX)
    other_codes, other_sigma, other_error = _microscaled_at(groups, g[..., None], formats.E2M1_BELOW)
    better = other_error < error
    sigma = torch.where(better, other_sigma.view(torch.uint8), sigma.view(torch.uint8))
    codes = torch.where(better[..., None], other_codes, codes)
    return codes.flatten(-2), sigma.view(torch.float8_e4m3fn)


def _microscaled_at(groups, g, top):
    """Codes and scales that put the largest of each group [..., 16] at top, and the squares they leave."""
    sigma = formats.to_e4m3(groups.abs().amax(-1) / (top * g))
    step = (sigma.to(groups.dtype) * g)[..., None]
    codes = formats.to_e2m1(torch.where(step > 0, groups / step, 0.0))
    return codes, sigma, (groups - formats.from_e2m1(codes, groups.dtype) * step).square().sum(-1)


def _nvfp4_global(x):
    return _scale(x.abs().amax((2, 3)), formats.NVFP4_MAX)


def values_nvfp4(v, means, mean_dtype, key_count):
    """N2 for the residual, and N4: the mean that is stored makes up for the mean error of a tile's codes."""
    stored = None if means is None else means.to(mean_dtype)
    residual = residuals(v, None if means is None else stored.to(v.dtype), key_count)
    g = _nvfp4_global(residual)
    tiles = in_tiles(residual).transpose(-1, -2)
    codes, sigma = microscaled(tiles, g[..., None, None])
    if means is not None:
        made = formats.from_e2m1(codes, v.dtype).unflatten(-1, (-1, MICRO)) * sigma.to(v.dtype)[..., None]
        left = (tiles - made.flatten(-2) * g[..., None, None, None]).transpose(-1, -2).flatten(2, 3)
        stored = (stored.to(v.dtype) + tile_means(left[:, :, : v.shape[2]], key_count)).to(mean_dtype)
    return codes, sigma, g, stored


def _prepare_nvfp4(q, k, v, means, mean_dtype, key_count, q_feedback, k_feedback):
    g_q, g_k = _nvfp4_global(q), _nvfp4_global(k)
    q_codes, q_sigma = nvfp4_shaping.microscaled_with_feedback(q, g_q[..., None], q_feedback, microscaled)
    k_codes, k_sigma = nvfp4_shaping.microscaled_with_feedback(k, g_k[..., None], k_feedback, microscaled)
    v_codes, v_sigma, g_v, stored = values_nvfp4(v, means, mean_dtype, key_count)
    return {
        "q": formats.pack_nibbles(q_codes),
        "q_scale": q_sigma,
        "k": formats.pack_nibbles(k_codes),
        "k_scale": k_sigma,
        "v": formats.pack_nibbles(v_codes),
        "v_scale": v_sigma,
        "v_mean": stored,
        "global_scale": (g_q, g_k, g_v),
    }


def _prepare_int8_int8(q, k, v, means, mean_dtype, key_count):
    qk = _qk_operands(q, k, formats.INT8_MAX, formats.to_int8)
    return qk | values_int8(v, means, mean_dtype, key_count)


def _prepare_int8_fp8(q, k, v, means, mean_dtype, key_count):
    qk = _qk_operands(q, k, formats.INT8_MAX, formats.to_int8)
    return qk | values_fp8(v, means, mean_dtype, key_count)


def _prepare_fp8_fp8(q, k, v, means, mean_dtype, key_count):
    qk = _qk_operands(q, k, formats.E4M3_MAX, formats.to_e4m3)
    return qk | values_fp8(v, means, mean_dtype, key_count)


_PREPARE = {
    "int8_int8": _prepare_int8_int8,
    "int8_fp8": _prepare_int8_fp8,
    "fp8_fp8": _prepare_fp8_fp8,
    "nvfp4": _prepare_nvfp4,
}
