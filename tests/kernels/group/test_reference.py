"""k-means order: a permutation, better than sequence order, deterministic, masks last."""

import pytest
import torch
from comfyui_vc_attention.kernels.group.reference import assign_labels, evenly_spaced, group_tokens
from comfyui_vc_attention.kernels.testing import energy_removed, sample_qkv


def clustered(length=1024, heads=2):
    return sample_qkv("clustered", (1, heads, length, 64))[2]


def test_order_is_a_permutation_cluster_by_cluster():
    v = clustered()
    grouping = group_tokens(v, 16)
    assert grouping.order.dtype == torch.int32 and grouping.centroids.shape == (1, 2, 16, 64)
    assert torch.equal(grouping.order.sort(-1).values, torch.arange(1024).int().expand(1, 2, -1))
    labels = assign_labels(v, grouping.centroids).gather(2, grouping.order.long())
    assert (labels.diff() >= 0).all()
    same = labels.diff() == 0
    assert (grouping.order.diff()[same] > 0).all()  # stable inside a cluster


def test_grouping_makes_the_tile_means_worth_subtracting():
    v = clustered(4096)
    assert energy_removed(v, group_tokens(v, 64).order) > 4 * energy_removed(v)


def test_warm_start_needs_no_more_than_two_steps():
    v = clustered(4096)
    cold = group_tokens(v, 64)
    moved = v + 0.1 * torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    warm, again = group_tokens(moved, 64, cold), group_tokens(moved, 64)
    assert energy_removed(moved, warm.order) > energy_removed(moved, again.order) - 0.01


def test_lloyd_never_raises_the_distance():
    v = clustered(2048, 1)
    distances = []
    for iterations in (0, 1, 3, 10):
        c = group_tokens(v, 32, iterations=iterations).centroids
        nearest = c.gather(2, assign_labels(v, c)[..., None].expand(-1, -1, -1, 64))
        distances.append(((v - nearest) ** 2).sum().item())
    assert distances == sorted(distances, reverse=True)


def test_masked_keys_come_last_and_do_not_matter():
    v = clustered()
    mask = torch.rand(1, 1024, generator=torch.Generator().manual_seed(2)) < 0.7
    count = int(mask.sum())
    poisoned = torch.where(mask[:, None, :, None], v, torch.nan)
    grouping = group_tokens(poisoned, 16, key_mask=mask)
    alone = group_tokens(v[:, :, mask[0]], 16)
    kept = torch.arange(1024)[mask[0]].int()
    assert torch.equal(grouping.order[..., :count], kept[alone.order.long()])
    assert torch.equal(grouping.centroids, alone.centroids)
    assert not mask[0][grouping.order[..., count:].long()].any()


def test_deterministic():
    v = clustered()
    a, b = group_tokens(v, 16), group_tokens(v.clone(), 16)
    assert torch.equal(a.order, b.order) and torch.equal(a.centroids, b.centroids)


@pytest.mark.parametrize(("length", "clusters"), [(1, 1), (1, 8), (5, 8), (129, 128), (300, 256)])
def test_few_tokens_and_empty_clusters(length, clusters):
    v = torch.randn(2, 1, length, 64, generator=torch.Generator().manual_seed(3))
    grouping = group_tokens(v, clusters)
    assert torch.equal(grouping.order.sort(-1).values, torch.arange(length).int().expand(2, 1, -1))
    assert grouping.centroids.isfinite().all()


def test_identical_tokens_share_the_lowest_label():
    v = torch.ones(1, 1, 200, 64)
    assert torch.equal(group_tokens(v, 8).order[0, 0], torch.arange(200).int())


def test_seeds_are_spread_over_the_sequence():
    x = torch.arange(100.0)[None, None, :, None].expand(1, 1, 100, 2)
    seeds = evenly_spaced(x, torch.ones(1, 100, dtype=torch.bool), 4)
    assert seeds[0, 0, :, 0].tolist() == [0, 25, 50, 75]
