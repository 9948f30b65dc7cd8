"""Token orders that the evidence compares; those the pack does not ship are implemented here, for measuring.

An order is int32 [B, H, L], a permutation per head, or None for sequence order.
"""

import torch
from comfyui_vc_attention.kernels.formats import TILE
from comfyui_vc_attention.kernels.group import reference

CUBE = (2, 8, 8)  # frames, rows, columns of DeltaQuant's cube: one tile (paper, Table 1)
BALANCED_ROUNDS = 3  # Lloyd steps with balanced clusters, after plain ones (chosen)


def static_cube(grid, heads, device="cpu"):
    """Tokens cube by cube; cubes at the end of an axis that their size does not divide are smaller."""
    index = torch.arange(grid[0] * grid[1] * grid[2], device=device).view(grid)
    listed = [
        index[t : t + CUBE[0], y : y + CUBE[1], x : x + CUBE[2]].flatten()
        for t in range(0, grid[0], CUBE[0])
        for y in range(0, grid[1], CUBE[1])
        for x in range(0, grid[2], CUBE[2])
    ]
    return torch.cat(listed).int().expand(1, heads, -1).contiguous()


def kmeans(v, clusters=128, iterations=None):
    """The reference's grouping from evenly spaced seeds."""
    return reference.group_tokens(v, clusters, iterations=iterations).order


def kmeans_warm(v, earlier, clusters=128, iterations=None):
    """The reference's grouping of v, started from the centroids of earlier values."""
    before = reference.group_tokens(earlier, clusters)
    return reference.group_tokens(v, clusters, before, iterations=iterations).order


def balanced_kmeans(v):
    """Every tile one cluster of exactly 128 tokens (the last may be short), values [B, H, L, D]."""
    clusters = -(-v.shape[2] // TILE)
    start = reference.evenly_spaced(
        v.float(), torch.ones(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device), clusters
    )
    heads = [_balanced_head(x, c) for x, c in zip(v.float().flatten(0, 1), start.flatten(0, 1), strict=True)]
    return torch.stack(heads).int().view(v.shape[:3])


def _balanced_head(x, centroids):
    """Order [L] of one head's values x [L, D]."""
    everything = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
    for _ in range(reference.COLD_ITERATIONS):
        labels = reference.assign_labels(x[None, None], centroids[None, None])
        centroids = reference.update_centroids(x[None, None], labels, everything, centroids[None, None])[0, 0]
    for _ in range(BALANCED_ROUNDS):
        labels = balanced_labels(x, centroids)
        sums = torch.zeros_like(centroids).index_add_(0, labels, x)
        counts = torch.bincount(labels, minlength=len(centroids)).clamp_min(1)
        centroids = sums / counts[:, None]
    labels = balanced_labels(x, centroids)
    # a cluster that is not full must come last, or all tiles behind it would straddle two clusters
    full = torch.bincount(labels, minlength=len(centroids))[labels] == TILE
    return (labels + len(centroids) * ~full).argsort(stable=True)


def balanced_labels(x, centroids):
    """Cluster of each token, at most 128 tokens a cluster: in rounds, each token asks for its nearest cluster
    with room, and a cluster takes those first that lose most by going elsewhere."""
    affinity = x @ centroids.T - 0.5 * centroids.square().sum(1)
    labels = torch.full((len(x),), -1, device=x.device)
    room = torch.full((len(centroids),), TILE, device=x.device)
    while (waiting := (labels < 0).nonzero()[:, 0]).numel():
        asked = affinity[waiting].masked_fill(room == 0, -torch.inf)
        best = asked.topk(min(2, asked.shape[1]), dim=1)
        wanted, loss = best.indices[:, 0], best.values[:, 0] - best.values[:, -1]
        by_loss = loss.nan_to_num(posinf=0.0).argsort(descending=True)
        by_cluster = by_loss[wanted[by_loss].argsort(stable=True)]
        counts = torch.bincount(wanted, minlength=len(centroids))
        rank = torch.arange(len(waiting), device=x.device) - (counts.cumsum(0) - counts)[wanted[by_cluster]]
        taken = by_cluster[rank < room[wanted[by_cluster]]]
        labels[waiting[taken]] = wanted[taken]
        room = room - torch.bincount(wanted[taken], minlength=len(centroids))
    return labels
