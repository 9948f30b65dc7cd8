"""What keeps the errors of 4-bit queries and keys out of the scores (N6): balanced channels, fed-back errors.

Rounding errors d of a query move its scores by d . k: squared and summed over keys, d H d' with H the keys'
second moments. H is far from a multiple of the identity, so later channels can be rounded such that they undo
most of what earlier ones did; so can a key's, with the second moments of the queries.
"""

import torch

from .. import formats
from ..formats import MICRO

# Rows that second moments are taken of; 4096 of 32,768 left 3% to 5% more error. A prime, so that the steps
# from row to row divide no image's width.
SAMPLE = 16_381
CHUNK = 4096  # rows of one product
DAMPING = 0.01  # of the mean diagonal, on each diagonal element (chosen)
SPREAD = 1e-4  # of the mean square over channels, added to each: a dead channel stays finite (chosen)


def sampled(x, count=None):
    """Some rows of x [B, H, L, D], evenly over the first count (int32 [B]; None: L): [B, H, N, D].

    Row i is row floor(i count / n), n = min(count, SAMPLE). N: n for a count of L, in whole CHUNKs; the rest
    is zero.
    """
    length = x.shape[2]
    count = torch.full((1,), length, device=x.device) if count is None else count.long()
    taken = count.clamp(max=SAMPLE)[:, None]
    place = torch.arange(-(-min(length, SAMPLE) // CHUNK) * CHUNK, device=x.device)
    index = (place * count[:, None]).div(taken.clamp(min=1), rounding_mode="floor").clamp(max=length - 1)
    rows = x.gather(2, index[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))
    return torch.where((place < taken)[:, None, :, None], rows, 0.0)


def second_moments(x):
    """Sum of x' x over the rows of x [B, H, N, D]: [B, H, D, D].

    Head by head and CHUNK by CHUNK, so that neither other heads nor zeros at the end move a bit of it.
    """
    heads = [sum(rows.T @ rows for rows in head.split(CHUNK)) for head in x.flatten(0, 1)]
    return torch.stack(heads).unflatten(0, x.shape[:2])


def balance(of_q, of_k):
    """Factors s of q's channels (k's get 1 / s) that make both equally large: [B, H, 1, D].

    of_q, of_k: their second moments. Products of q s and k / s are those of q and k.
    """
    squares = [m.diagonal(dim1=-2, dim2=-1) for m in (of_q, of_k)]
    means = [x.mean(-1, keepdim=True) for x in squares]
    q, k = (torch.where(mean > 0, x / mean + SPREAD, 1.0) for x, mean in zip(squares, means, strict=True))
    return (k / q).sqrt().sqrt()[..., None, :]


def feedback(moments):
    """M [B, H, D, D], above the diagonal: moments + damping = (1 + M) diag (1 + M)'.

    Channels are rounded in ascending order, and x_j + sum over i < j of M_ij (x_i - rounded_i) is what makes
    up for the errors so far.
    """
    damping = DAMPING * moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damping = torch.where(damping > 0, damping, 1.0)
    damped = moments + damping * torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    lower = torch.linalg.cholesky_ex(damped.flip(-1, -2)).L
    unit = lower / lower.diagonal(dim1=-2, dim2=-1)[..., None, :]
    return unit.flip(-1, -2).triu(1)


def shaping(q, k, rotation=None, key_count=None):
    """((factors of q's channels, of k's), (feedback for q, for k)).

    q [B, H, Lq, D], k [B, H, Lk, D]: without their means, absent keys zero. rotation: the matrix that both
    are multiplied with after balancing, or None.
    """
    of_q, of_k = second_moments(sampled(q)), second_moments(sampled(k, key_count))
    s = balance(of_q, of_k)
    pair = s.transpose(-1, -2) * s
    of_q, of_k = of_q * pair, of_k / pair
    if rotation is not None:
        of_q, of_k = (rotation.T @ m @ rotation for m in (of_q, of_k))
    return (s, 1 / s), (feedback(of_k), feedback(of_q))


def microscaled_with_feedback(x, g, matrix, microscaled):
    """N6: x [B, H, L, D] -> (E2M1 codes, E4M3 microscales), channels in ascending order.

    g: [B, H, 1]; matrix: what feedback() made of the other operand's second moments. A group's scale is what
    microscaled(group, g) takes for it with all that earlier groups fed back, its own errors not yet.
    """
    fed, codes, scales = torch.zeros_like(x), [], []
    for first in range(0, x.shape[-1], MICRO):
        own = slice(first, first + MICRO)
        sums, errors = fed[..., own].clone(), torch.empty_like(x[..., own])
        sigma = microscaled(x[..., own] + sums, g)[1]
        step = sigma.to(x.dtype) * g[..., None]
        for i in range(MICRO):
            exact = x[..., first + i, None]
            wanted = exact + sums[..., i, None]
            code = formats.to_e2m1(torch.where(step > 0, wanted / step, 0.0))
            codes.append(code)
            errors[..., i, None] = exact - formats.from_e2m1(code, x.dtype) * step
            sums += errors[..., i, None] * matrix[:, :, first + i, None, own]
        fed[..., first + MICRO :] += errors @ matrix[:, :, own, first + MICRO :]
        scales.append(sigma)
    return torch.cat(codes, -1), torch.cat([s.view(torch.uint8) for s in scales], -1).view(scales[0].dtype)
