"""Token order from values: online k-means, one label list per head (paper 3.2). The meaning of the stage."""

import torch

from ..operands import TokenGrouping

# What fast versions are measured against: the energy removed has settled at 4 and at 1 (tests/evidence,
# "Clusters and Lloyd steps": 0.359 of 0.360 and 0.362 of 0.363)
COLD_ITERATIONS = 10  # Lloyd steps from evenly spaced seeds
WARM_ITERATIONS = 2  # Lloyd steps from the centroids of an earlier denoising step


def group_tokens(v, clusters, previous=None, key_mask=None, *, iterations=None) -> TokenGrouping:
    """Order that lists each head's keys cluster by cluster, and the centroids found.

    v: [B, H, Lk, D], any float dtype. clusters: C. previous: TokenGrouping whose centroids warm-start this
    one. key_mask: bool [B, Lk], True = the key exists. Returns order int32 [B, H, Lk] (stable inside a
    cluster, masked keys last) and centroids fp32 [B, H, C, D]. An empty cluster keeps its centroid.
    """
    x = v.float()
    exists = (
        torch.ones(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device)
        if key_mask is None
        else key_mask
    )
    centroids = evenly_spaced(x, exists, clusters) if previous is None else previous.centroids
    if iterations is None:
        iterations = COLD_ITERATIONS if previous is None else WARM_ITERATIONS
    for _ in range(iterations):
        centroids = update_centroids(x, assign_labels(x, centroids), exists, centroids)
    labels = assign_labels(x, centroids)
    labels = labels.masked_fill(~exists[:, None], clusters)
    return TokenGrouping(labels.argsort(dim=-1, stable=True).int(), centroids)


def evenly_spaced(x, exists, clusters):
    """Seeds [B, H, C, D]: existing tokens at even distances, so deterministic and spread over the frames."""
    listed = (~exists).to(torch.uint8).argsort(dim=1, stable=True)  # existing keys first
    steps = torch.arange(clusters, device=x.device)[None] * exists.sum(1, keepdim=True) // clusters
    seeds = listed.gather(1, steps)
    return x.gather(2, seeds[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])).clone()


def assign_labels(x, centroids):
    """Index of the nearest centroid, the lowest one on a tie: int64 [B, H, Lk]."""
    # |x - c|^2 without the |x|^2 that all centroids share
    affinity = x @ centroids.transpose(-1, -2) - 0.5 * (centroids * centroids).sum(-1)[:, :, None]
    return affinity.argmax(-1)


def update_centroids(x, labels, exists, centroids):
    weight = exists[:, None].to(x.dtype).expand_as(labels)
    sums = torch.zeros_like(centroids).scatter_add_(
        2, labels[..., None].expand_as(x), torch.where(exists[:, None, :, None], x, 0.0)
    )
    counts = torch.zeros_like(centroids[..., 0]).scatter_add_(2, labels, weight)[..., None]
    return torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
