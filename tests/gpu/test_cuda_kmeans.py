"""The CUDA k-means on a GPU: a stable order by nearest centroid, as good as the reference, repeatable."""

import pytest
import torch
from comfyui_vc_attention.kernels.group import reference
from comfyui_vc_attention.kernels.group.cuda_kmeans import group_tokens
from comfyui_vc_attention.kernels.testing import energy_removed, sample_qkv

pytestmark = pytest.mark.gpu


def values(kind="clustered", shape=(2, 3, 5000, 128), dtype=torch.bfloat16, seed=0):
    return sample_qkv(kind, shape, None, dtype, "cuda", seed)[2]


def labels_of(v, grouping, exists=None):
    """The label of each token as the order lists it, from its distance to the centroids."""
    labels = reference.assign_labels(v.float(), grouping.centroids)
    if exists is not None:
        labels = labels.masked_fill(~exists[:, None], grouping.centroids.shape[2])
    return labels.gather(2, grouping.order.long())


@pytest.mark.parametrize("tokens", [1, 31, 256, 1023, 1025, 5000])
@pytest.mark.parametrize("clusters", [1, 5, 128, 256])
def test_order_is_a_permutation_by_cluster(tokens, clusters):
    v = values(shape=(2, 2, tokens, 128))
    grouping = group_tokens(v, clusters)
    assert grouping.order.dtype == torch.int32 and grouping.centroids.shape == (2, 2, clusters, 128)
    assert torch.equal(
        grouping.order.sort(-1).values, torch.arange(tokens, device="cuda").expand(2, 2, -1).int()
    )
    listed = labels_of(v, grouping)
    # a token between two centroids may go either way in 16 bits
    falls = (listed.diff() < 0).float().mean() if tokens > 1 else 0.0
    assert falls <= 0.02
    changes = listed.diff() != 0
    assert ((grouping.order.diff() > 0) | changes).float().mean() > 0.97 if tokens > 1 else True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["gauss", "clustered", "outlier_tokens"])
def test_removes_as_much_energy(kind, dtype):
    v = values(kind, (1, 2, 32_000, 128), dtype)
    ours, theirs = group_tokens(v, 128), reference.group_tokens(v, 128)
    assert energy_removed(v, ours.order) > energy_removed(v, theirs.order) - 0.02
    moved = v + 0.1 * torch.randn_like(v)
    warm, cold = group_tokens(moved, 128, ours), reference.group_tokens(moved, 128)
    assert energy_removed(moved, warm.order) > energy_removed(moved, cold.order) - 0.02


def test_absent_keys_come_last_and_change_nothing():
    v = values(shape=(2, 2, 3000, 128))
    exists = torch.rand(2, 3000, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.6
    grouping = group_tokens(v, 64, key_mask=exists)
    for b in range(2):
        count = int(exists[b].sum())
        there = exists[b][grouping.order[b].long()]
        assert there[:, :count].all() and not there[:, count:].any()
    poisoned = torch.where(exists[:, None, :, None], v, torch.nan)
    again = group_tokens(poisoned, 64, key_mask=exists)
    assert torch.equal(again.order, grouping.order) and torch.equal(again.centroids, grouping.centroids)


def test_all_keys_may_be_absent():
    v = values(shape=(1, 2, 300, 128))
    grouping = group_tokens(v, 16, key_mask=torch.zeros(1, 300, dtype=torch.bool, device="cuda"))
    assert torch.equal(grouping.order, torch.arange(300, device="cuda").expand(1, 2, -1).int())


def test_equal_inputs_equal_orders():
    v = values(shape=(1, 8, 20_000, 128))
    runs = [group_tokens(v, 128) for _ in range(4)]
    assert all(torch.equal(run.order, runs[0].order) for run in runs)
    assert all(torch.equal(run.centroids, runs[0].centroids) for run in runs)


def test_strides():
    big = torch.randn(
        2, 700, 3, 131, device="cuda", generator=torch.Generator("cuda").manual_seed(5)
    ).bfloat16()
    v = big[..., 3:].transpose(1, 2)
    strided, whole = group_tokens(v, 32), group_tokens(v.contiguous(), 32)
    assert torch.equal(strided.order, whole.order)


def test_warm_start_leaves_the_earlier_grouping_alone():
    v = values()
    first = group_tokens(v, 64)
    kept = first.centroids.clone()
    group_tokens(v, 64, first)
    assert torch.equal(first.centroids, kept)
