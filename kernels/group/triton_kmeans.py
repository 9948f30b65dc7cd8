"""Token order by online k-means on a GPU: Lloyd steps on a sample, one full assignment, a counting sort.

No host synchronisation and no atomics, so a call always gives the same order. Products are 16-bit (a centroid
goes in as the sum of two) or tf32: labels may differ from the reference's where two centroids are nearly
equally far.
"""

import torch
import triton
import triton.language as tl

from ..operands import TokenGrouping
from ..prepare.triton_rows import exact_products

# On a sample these remove 0.422 and 0.420 of the energy, as ten steps on all keys do (tests/bench/NOTES.md,
# "Triton kernels"); on all keys 4 and 1 would be enough (tests/evidence, "Clusters and Lloyd steps")
COLD_ITERATIONS = 5  # Lloyd steps from evenly spaced seeds
WARM_ITERATIONS = 2  # from the centroids of an earlier denoising step
SAMPLES_PER_CLUSTER = 32  # sampled keys per cluster, at least (chosen)
LONGEST_STRIDE = 9
BLOCK = 128  # keys that one program assigns and one histogram counts
CENTROIDS = 64  # centroids held at a time
MOST_CHUNKS = 16  # partial sums per head in a centroid update (chosen)


# One program: BLOCK keys of one head, every stride-th existing key. labels: int16 [B, H, n], C where absent.
# Prefixes: o_ offsets, m_ masks, b_ blocks in registers, i_ indices.
@triton.jit(do_not_specialize=("lk", "n", "stride", "n_clusters", "n_heads"))
def assign_kernel(
    v, listed, key_count, centroids, half_norms, labels, histogram,
    v_b, v_h, v_l, lk, n_heads, n, stride, n_clusters,
    D: tl.constexpr, R: tl.constexpr, CB: tl.constexpr, W: tl.constexpr,
    EXACT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_HISTOGRAM: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n, R)
    i_block = tl.program_id(0) % n_blocks
    i_bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_n = i_block * R + tl.arange(0, R)
    m_n = o_n < n
    o_d = tl.arange(0, D)
    m_key, b_token = sampled_token(listed, key_count, i_b, o_n, m_n, lk, stride, HAS_MASK)
    p_v = v + i_b * v_b + i_h * v_h + b_token[:, None] * v_l + o_d[None, :]
    b_x = tl.load(p_v, mask=m_key[:, None], other=0.0)
    if not EXACT:
        b_x = b_x.to(tl.float32)
    b_best = tl.full([R], float("-inf"), tl.float32)
    b_label = tl.zeros([R], tl.int32)
    for i_c in range(0, n_clusters, CB):
        o_c = i_c + tl.arange(0, CB)
        m_c = o_c < n_clusters
        o_row = i_bh * n_clusters + o_c
        b_c = tl.load(centroids + o_row[:, None] * D + o_d[None, :], mask=m_c[:, None], other=0.0)
        b_norm = tl.load(half_norms + o_row, mask=m_c, other=float("inf"))
        # |x - c|^2 without the |x|^2 that all centroids share
        if EXACT:
            b_high = b_c.to(b_x.dtype)
            b_near = tl.dot(b_x, tl.trans(b_high))
            b_near = tl.dot(b_x, tl.trans((b_c - b_high.to(tl.float32)).to(b_x.dtype)), acc=b_near)
        else:
            b_near = tl.dot(b_x, tl.trans(b_c), input_precision="tf32")
        b_near -= b_norm[None, :]
        b_max = tl.max(b_near, 1)
        b_first = tl.min(tl.where(b_near == b_max[:, None], o_c[None, :], 32767), 1)
        b_label = tl.where(b_max > b_best, b_first, b_label)
        b_best = tl.maximum(b_max, b_best)
    b_label = tl.where(m_key, b_label, n_clusters)
    tl.store(labels + i_bh * n + o_n, b_label.to(tl.int16), mask=m_n)
    if HAS_HISTOGRAM:
        b_label = tl.where(m_n, b_label, -1)
        for i_w in range(0, W, CB):
            o_w = i_w + tl.arange(0, CB)
            b_counts = tl.sum((b_label[:, None] == o_w[None, :]).to(tl.int32), 0)
            tl.store(histogram + (i_bh * n_blocks + i_block) * W + o_w, b_counts)


@triton.jit
def sampled_token(listed, key_count, i_b, o_n, m_n, lk, stride, HAS_MASK: tl.constexpr):
    """(whether the o_n-th sample exists, its token index as int64)."""
    o_key = o_n * stride
    m_key = m_n & (o_key < lk)
    if HAS_MASK:
        m_key = m_key & (o_key < tl.load(key_count + i_b))
        o_key = tl.load(listed + i_b * lk + o_key, mask=m_key, other=0)
    return m_key, tl.where(m_key, o_key, 0).to(tl.int64)


# One program: sums and counts of CB clusters over one of n_chunks parts of a head's sample.
@triton.jit(do_not_specialize=("lk", "n", "stride", "n_clusters", "n_groups", "n_chunks", "n_heads"))
def sum_clusters_kernel(
    v, listed, key_count, labels, sums, counts,
    v_b, v_h, v_l, lk, n_heads, n, stride, n_clusters, n_groups, n_chunks,
    D: tl.constexpr, R: tl.constexpr, CB: tl.constexpr, EXACT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    i_group = tl.program_id(0) % n_groups
    i_chunk = tl.program_id(0) // n_groups % n_chunks
    i_bh = (tl.program_id(0) // (n_groups * n_chunks)).to(tl.int64)
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_d = tl.arange(0, D)
    o_c = i_group * CB + tl.arange(0, CB)
    b_sum = tl.zeros([CB, D], tl.float32)
    b_count = tl.zeros([CB], tl.float32)
    size = tl.cdiv(tl.cdiv(n, R), n_chunks) * R
    for start in range(0, size, R):
        o_n = i_chunk * size + start + tl.arange(0, R)
        m_n = (o_n < n) & (start + tl.arange(0, R) < size)
        m_key, b_token = sampled_token(listed, key_count, i_b, o_n, m_n, lk, stride, HAS_MASK)
        p_v = v + i_b * v_b + i_h * v_h + b_token[:, None] * v_l + o_d[None, :]
        b_x = tl.load(p_v, mask=m_key[:, None], other=0.0)
        if not EXACT:
            b_x = b_x.to(tl.float32)
        b_label = tl.load(labels + i_bh * n + o_n, mask=m_key, other=-1).to(tl.int32)
        b_is = (b_label[None, :] == o_c[:, None]).to(tl.float32)
        b_sum = tl.dot(b_is.to(b_x.dtype), b_x, acc=b_sum, input_precision="tf32")
        b_count += tl.sum(b_is, 1)
    o_row = (i_bh * n_chunks + i_chunk) * n_clusters + o_c
    m_c = o_c < n_clusters
    tl.store(sums + o_row[:, None] * D + o_d[None, :], b_sum, mask=m_c[:, None])
    tl.store(counts + o_row, b_count, mask=m_c)


# One program: CB centroids of one head from the partial sums; an empty cluster keeps its centroid.
@triton.jit(do_not_specialize=("n_clusters", "n_groups", "n_chunks"))
def move_centroids_kernel(
    sums, counts, centroids, moved, half_norms, n_clusters, n_groups, n_chunks,
    D: tl.constexpr, CB: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    i_group = tl.program_id(0) % n_groups
    i_bh = (tl.program_id(0) // n_groups).to(tl.int64)
    o_d = tl.arange(0, D)
    o_c = i_group * CB + tl.arange(0, CB)
    m_c = o_c < n_clusters
    o_to = (i_bh * n_clusters + o_c)[:, None] * D + o_d[None, :]
    b_new = tl.load(centroids + o_to, mask=m_c[:, None], other=0.0)
    if HAS_SUMS:
        b_sum = tl.zeros([CB, D], tl.float32)
        b_count = tl.zeros([CB], tl.float32)
        for i_chunk in range(n_chunks):
            o_row = (i_bh * n_chunks + i_chunk) * n_clusters + o_c
            b_sum += tl.load(sums + o_row[:, None] * D + o_d[None, :], mask=m_c[:, None], other=0.0)
            b_count += tl.load(counts + o_row, mask=m_c, other=0.0)
        b_new = tl.where((b_count > 0)[:, None], b_sum / tl.maximum(b_count, 1.0)[:, None], b_new)
    tl.store(moved + o_to, b_new, mask=m_c[:, None])
    tl.store(half_norms + i_bh * n_clusters + o_c, 0.5 * tl.sum(b_new * b_new, 1), mask=m_c)


# One program: the histograms of one head become, in place, where each block's keys of a label start.
@triton.jit(do_not_specialize=("n_blocks",))
def scan_kernel(histogram, n_blocks, W: tl.constexpr, R: tl.constexpr):
    i_bh = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, W)
    b_total = tl.zeros([W], tl.int32)
    for start in range(0, n_blocks, R):
        o_r = start + tl.arange(0, R)
        p_h = histogram + (i_bh * n_blocks + o_r[:, None]) * W + o_w[None, :]
        b_total += tl.sum(tl.load(p_h, mask=(o_r < n_blocks)[:, None], other=0), 0)
    b_start = tl.cumsum(b_total, 0) - b_total
    for start in range(0, n_blocks, R):
        o_r = start + tl.arange(0, R)
        p_h = histogram + (i_bh * n_blocks + o_r[:, None]) * W + o_w[None, :]
        b_h = tl.load(p_h, mask=(o_r < n_blocks)[:, None], other=0)
        tl.store(p_h, b_start[None, :] + tl.cumsum(b_h, 0) - b_h, mask=(o_r < n_blocks)[:, None])
        b_start += tl.sum(b_h, 0)


# One program: BLOCK entries of one head to their places; stable, because earlier equal labels are counted.
@triton.jit(do_not_specialize=("lk", "n_heads"))
def scatter_kernel(
    labels, listed, starts, order, lk, n_heads, W: tl.constexpr, R: tl.constexpr, HAS_MASK: tl.constexpr
):
    n_blocks = tl.cdiv(lk, R)
    i_block = tl.program_id(0) % n_blocks
    i_bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    o_r = tl.arange(0, R)
    o_n = i_block * R + o_r
    m_n = o_n < lk
    p_label = labels + i_bh * lk + i_block * R
    b_label = tl.load(p_label + o_r, mask=m_n, other=-1).to(tl.int32)
    b_same = (b_label[:, None] == b_label[None, :]) & (o_r[None, :] < o_r[:, None])
    b_rank = tl.sum(b_same.to(tl.int32), 1)
    b_start = tl.load(starts + (i_bh * n_blocks + i_block) * W + b_label, mask=m_n, other=0)
    b_token = o_n
    if HAS_MASK:
        b_token = tl.load(listed + i_bh // n_heads * lk + o_n, mask=m_n, other=0)
    tl.store(order + i_bh * lk + b_start + b_rank, b_token, mask=m_n)


def group_tokens(v, clusters, previous=None, key_mask=None, *, iterations=None) -> TokenGrouping:
    """Order that lists each head's keys cluster by cluster, and the centroids found.

    Arguments and result as in the reference; iterations defaults to fewer, on a sample of the keys.
    """
    b, h, lk, _ = v.shape
    listed = key_count = None
    if key_mask is not None:
        listed = (~key_mask).to(torch.uint8).argsort(dim=1, stable=True).int()  # existing keys first
        key_count = key_mask.sum(1, dtype=torch.int32)
    if previous is None:
        centroids = _evenly_spaced(v, clusters, listed, key_count)
    else:
        centroids = previous.centroids.contiguous()
    if iterations is None:
        iterations = COLD_ITERATIONS if previous is None else WARM_ITERATIONS
    # odd, so that sampled tokens run through the columns of a frame
    stride = max(1, min(LONGEST_STRIDE, lk // (SAMPLES_PER_CLUSTER * clusters)) - 1 | 1)
    half_norms = torch.empty_like(centroids[..., 0])
    keys = (v, listed, key_count)
    centroids = _moved(None, None, centroids, half_norms)
    for _ in range(iterations):
        labels, _ = _assigned(*keys, centroids, half_norms, stride, False)
        centroids = _moved(*_summed(*keys, labels, clusters, stride), centroids, half_norms)
    labels, histogram = _assigned(*keys, centroids, half_norms, 1, True)
    width = histogram.shape[-1]
    scan_kernel[(b * h,)](histogram, histogram.shape[2], W=width, R=max(16, 4096 // width), num_warps=8)
    order = torch.empty(b, h, lk, dtype=torch.int32, device=v.device)
    scatter_kernel[(b * h * triton.cdiv(lk, BLOCK),)](
        labels, listed, histogram, order, lk, h, W=width, R=BLOCK, HAS_MASK=listed is not None
    )
    return TokenGrouping(order, centroids)


def _evenly_spaced(v, clusters, listed, key_count):
    """Seeds fp32 [B, H, C, D]: existing keys at even distances, as in the reference."""
    steps = torch.arange(clusters, device=v.device)
    if listed is None:
        return v[:, :, steps * v.shape[2] // clusters].float()
    seeds = listed.gather(1, steps[None] * key_count[:, None] // clusters).long()
    seeds = v.gather(2, seeds[:, None, :, None].expand(-1, v.shape[1], -1, v.shape[3]))
    return torch.where((key_count > 0)[:, None, None, None], seeds, 0.0).float()


def _assigned(v, listed, key_count, centroids, half_norms, stride, want_histogram):
    """Labels int16 [B, H, n] of every stride-th existing key, and int32 [B, H, blocks, W] or None."""
    b, h, lk, d = v.shape
    clusters = centroids.shape[2]
    n = triton.cdiv(lk, stride)
    n_blocks = triton.cdiv(n, BLOCK)
    # one more label for absent keys
    width = max(CENTROIDS, triton.next_power_of_2(clusters + (listed is not None)))
    labels = torch.empty(b, h, n, dtype=torch.int16, device=v.device)
    histogram = None
    if want_histogram:
        histogram = torch.empty(b, h, n_blocks, width, dtype=torch.int32, device=v.device)
    assign_kernel[(b * h * n_blocks,)](
        v, listed, key_count, centroids, half_norms, labels, histogram,
        *v.stride()[:3], lk, h, n, stride, clusters,
        D=d, R=BLOCK, CB=CENTROIDS, W=width, EXACT=exact_products(v.dtype),
        HAS_MASK=listed is not None, HAS_HISTOGRAM=want_histogram, num_warps=8, num_stages=1,
    )  # fmt: skip
    return labels, histogram


def _summed(v, listed, key_count, labels, clusters, stride):
    """Partial sums fp32 [B, H, chunks, C, D] and counts fp32 [B, H, chunks, C] of the sampled keys."""
    b, h, lk, d = v.shape
    chunks = min(MOST_CHUNKS, triton.cdiv(labels.shape[2], BLOCK))
    groups = triton.cdiv(clusters, CENTROIDS)
    sums = torch.empty(b, h, chunks, clusters, d, dtype=torch.float32, device=v.device)
    counts = torch.empty(b, h, chunks, clusters, dtype=torch.float32, device=v.device)
    sum_clusters_kernel[(b * h * chunks * groups,)](
        v, listed, key_count, labels, sums, counts,
        *v.stride()[:3], lk, h, labels.shape[2], stride, clusters, groups, chunks,
        D=d, R=64, CB=CENTROIDS, EXACT=exact_products(v.dtype), HAS_MASK=listed is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums, counts


def _moved(sums, counts, centroids, half_norms):
    """New centroids from partial sums (the same ones without sums); half_norms is filled with |c|^2 / 2."""
    b, h, clusters, d = centroids.shape
    groups = triton.cdiv(clusters, CENTROIDS)
    moved = torch.empty_like(centroids)
    chunks = 0 if sums is None else sums.shape[2]
    move_centroids_kernel[(b * h * groups,)](
        sums, counts, centroids, moved, half_norms, clusters, groups, chunks,
        D=d, CB=CENTROIDS, HAS_SUMS=sums is not None, num_warps=4,
    )  # fmt: skip
    return moved
