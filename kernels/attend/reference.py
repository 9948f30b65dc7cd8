"""Attention over quantized operands, tile by tile with an online softmax: what every kernel must compute."""

import torch

from .. import formats
from ..formats import TILE, tile_count
from ..operands import VCOperands, new_output
from ..prepare.reference import in_tiles


class OnlineSoftmax:
    """Running maximum, normalizer and numerator of a block of query rows (Eq. 1), in log2 units."""

    def __init__(self, rows_shape, head_dim, dtype, device):
        self.maximum = torch.full(rows_shape, -torch.inf, dtype=dtype, device=device)
        self.normalizer = torch.zeros(rows_shape, dtype=dtype, device=device)
        self.numerator = torch.zeros(*rows_shape, head_dim, dtype=dtype, device=device)

    def raise_maximum(self, tile_maximum):
        """m' = max(m, tile), and everything older rescaled by alpha = exp2(m - m')."""
        raised = torch.maximum(self.maximum, tile_maximum)
        alpha = torch.where(raised == -torch.inf, 0.0, torch.exp2(self.maximum - raised))
        self.maximum = raised
        self.normalizer *= alpha
        self.numerator *= alpha[..., None]

    def add(self, numerator, mass):
        self.numerator += numerator
        self.normalizer += mass

    def result(self):
        """A / l, and 0 for a row that saw no key; NaN where a score was (C7)."""
        total = self.normalizer[..., None]
        return torch.where(total == 0, 0.0, self.numerator / total)


def attend(operands: VCOperands, out=None):
    """Attention output and log-sum-exp of one prepared call.

    Returns out [B, H, Lq, D] in operands.out_dtype, memory laid out as [B, Lq, H, D], and lse fp32
    [B, H, Lq] (natural log, of the true scores) or None when prepare was not asked for it. out: where to
    write, some heads of memory [B, Lq, R, D]; new memory if None.
    """
    values = _Values(operands)
    dtype = values.dtype
    softmax = OnlineSoftmax(operands.q.shape[:3], values.head_dim, dtype, operands.q.device)
    add_tile = _ADD_TILE[operands.recipe.value_format]
    for j in range(tile_count(operands.k.shape[2])):
        t = scores(operands, j, dtype)
        tile_maximum = t.amax(-1)
        softmax.raise_maximum(tile_maximum)
        add_tile(softmax, t, tile_maximum, values, j, operands.recipe)
    result = softmax.result()
    if operands.recipe.value_format == "fp8":
        result = result * operands.v_scale[:, :, None].to(dtype)
    if out is None:
        out = new_output(result.shape, operands.out_dtype, result.device)
    out.copy_(result)
    return out, log_sum_exp(operands, softmax)


def scores(operands: VCOperands, j: int, dtype=torch.float32):
    """t = (q . k) s_q s_k score_scale of tile j, [B, H, Lq, keys of the tile]; -inf where no key is (C4)."""
    rows = slice(TILE * j, TILE * (j + 1))
    q, k = operands.q, operands.k[:, :, rows]
    if operands.recipe.numerics == "nvfp4":
        g_q, g_k, _ = operands.global_scale
        q = _from_nvfp4(q, operands.q_scale, dtype) * g_q[..., None, None].to(dtype)
        k = _from_nvfp4(k, operands.k_scale[:, :, rows], dtype) * g_k[..., None, None].to(dtype)
        t = _products(q, k)
        if operands.q_means is not None:
            t = t + _shift(operands, rows, dtype)
    else:
        # integer products of 128 channels stay under 2^21, so fp32 holds them exactly
        t = q.to(dtype) @ k.to(dtype).transpose(-1, -2)
        k_scale = operands.k_scale[:, :, j]  # one per 32 keys, or finer
        k_scale = k_scale.repeat_interleave(TILE // k_scale.shape[-1], -1)[..., : k.shape[2]]
        t = t * operands.q_scale[..., None].to(dtype) * k_scale[:, :, None].to(dtype)
    t = t * operands.score_scale
    if operands.key_count is not None:
        index = torch.arange(TILE * j, TILE * j + t.shape[-1], device=t.device)
        t = t.masked_fill(index >= operands.key_count[:, None, None, None], -torch.inf)
    return t


def _products(q, k):
    """q k' of a tile. One that lacks keys is filled, since the last bit depends on a product's size."""
    whole = torch.nn.functional.pad(k, (0, 0, 0, TILE - k.shape[2]))
    return (q @ whole.transpose(-1, -2))[..., : k.shape[2]]


def _shift(operands, rows, dtype):
    """N3: what the queries' block means have to do with some keys, [B, H, Lq, keys]."""
    shift = _products(operands.q_means.to(dtype), operands.k_centred[:, :, rows].to(dtype))
    return shift.repeat_interleave(TILE, 2)[:, :, : operands.q.shape[2]]


def log_sum_exp(operands, softmax):
    """Natural-log row log-sum-exp of the true scores, fp32 [B, H, Lq]; -inf without keys (C6, F5)."""
    if operands.lse_shift is None:
        return None
    unit = {"int8": 1.0, "fp8": formats.P_FP8_SCALE, "nvfp4": formats.NVFP4_MAX}[operands.recipe.value_format]
    if operands.recipe.expcast:
        unit *= formats.EXPCAST_MEAN_RATIO
    lse = formats.LN2 * (softmax.maximum + torch.log2(softmax.normalizer / unit))
    lse = torch.where(softmax.normalizer == 0, -torch.inf, lse + operands.lse_shift)
    return lse.float()


class _Values:
    """Value codes by tile, as numbers: codes [B, H, T, 128, D] and the means to add back, or None."""

    def __init__(self, operands):
        self.dtype = torch.float64 if operands.out_dtype == torch.float64 else torch.float32
        if operands.recipe.value_format == "nvfp4":
            codes = _from_nvfp4(operands.v, operands.v_scale, self.dtype).transpose(-1, -2)
            self.codes = codes * operands.global_scale[2][..., None, None, None].to(self.dtype)
        else:
            self.codes = in_tiles(operands.v.to(self.dtype))
        self.scale = operands.v_scale
        self.means = None if operands.v_mean is None else operands.v_mean.to(self.dtype)
        self.head_dim = self.codes.shape[-1]

    def weighted(self, p, j):
        """p [B, H, Lq, keys] times the codes of tile j."""
        return p @ self.codes[:, :, j, : p.shape[-1]]

    def restore(self, mass, j):
        """The rank-one term of Eq. 6: mass [B, H, Lq] times the mean of tile j."""
        return 0.0 if self.means is None else mass[..., None] * self.means[:, :, j, None]


def _relative(t, maximum):
    """t - maximum, with -inf for absent keys and for rows that have seen no key."""
    return torch.where(maximum[..., None] == -torch.inf, -torch.inf, t - maximum[..., None])


def _add_tile_int8(softmax, t, tile_maximum, values, j, recipe):
    """I2 to I4: P in unsigned INT8 scaled to the tile's own maximum, merged in fp32."""
    e = formats.UINT8_MAX * torch.exp2(_relative(t, tile_maximum))
    p = torch.round(e)
    # what rounding takes from a tile comes back as its mean; without means the sum must lose it, too.
    # Over a whole tile, because a float sum's order depends on the length: absent keys must change nothing.
    mass = e if values.means is not None else p
    mass = torch.nn.functional.pad(mass, (0, TILE - mass.shape[-1])).sum(-1)
    w = torch.exp2(_relative(tile_maximum[..., None], softmax.maximum)[..., 0]) / formats.UINT8_MAX
    scale = values.scale[:, :, j, None].to(values.dtype)
    softmax.add(w[..., None] * (scale * values.weighted(p, j) + values.restore(mass, j)), w * mass)


def _add_tile_fp8(softmax, t, tile_maximum, values, j, recipe):
    """F2, F3: E4M3 probabilities, by ExpCast or by exp2 and a cast; the sum is of the decoded codes."""
    u = _relative(t, softmax.maximum)
    if recipe.expcast:
        p = formats.expcast_codes(u).view(torch.float8_e4m3fn)
    else:
        p = formats.to_e4m3(formats.P_FP8_SCALE * torch.exp2(u))
    p = p.to(values.dtype)
    mass = p.sum(-1)
    softmax.add(values.weighted(p, j) + values.restore(mass, j), mass)


def _add_tile_nvfp4(softmax, t, tile_maximum, values, j, recipe):
    """N4: two-level E2M1 probabilities, one microscale per 16 keys of the tile."""
    y = formats.NVFP4_MAX * torch.exp2(_relative(t, softmax.maximum))
    keys = y.shape[-1]
    groups = torch.nn.functional.pad(y, (0, -keys % formats.MICRO)).unflatten(-1, (-1, formats.MICRO))
    sigma = formats.to_e4m3(groups.amax(-1) / formats.E2M1_MAX).to(y.dtype)[..., None]
    codes = formats.to_e2m1(torch.where(sigma > 0, groups / sigma, 0.0))
    p = (formats.from_e2m1(codes, y.dtype) * sigma).flatten(-2)[..., :keys]
    # as I3: what rounding takes from a tile comes back as its mean
    mass = y if values.means is not None else p
    mass = torch.nn.functional.pad(mass, (0, TILE - keys)).sum(-1)
    softmax.add(values.weighted(p, j) + values.restore(mass, j), mass)


_ADD_TILE = {"int8": _add_tile_int8, "fp8": _add_tile_fp8, "nvfp4": _add_tile_nvfp4}


def _from_nvfp4(packed, sigma, dtype):
    """Values over the global scale: E2M1 codes times their microscale, along the last dimension."""
    values = formats.from_e2m1(formats.unpack_nibbles(packed), dtype).unflatten(-1, (-1, formats.MICRO))
    return (values * sigma.to(dtype)[..., None]).flatten(-2)
