"""The Triton k-means: a stable, deterministic order that removes about as much energy as the reference's."""

import pytest
import torch
from comfyui_vc_attention.kernels.group import triton_kmeans
from comfyui_vc_attention.kernels.group.reference import assign_labels
from comfyui_vc_attention.kernels.group.reference import group_tokens as reference_group_tokens
from comfyui_vc_attention.kernels.group.triton_kmeans import group_tokens
from comfyui_vc_attention.kernels.testing import energy_removed, sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def clustered(length=512, heads=2, **options):
    return sample_qkv("clustered", (1, heads, length, 64), device=DEVICE, **options)[2]


def assert_cluster_by_cluster(v, grouping):
    """A permutation that lists whole clusters, lowest label first, tokens rising inside each."""
    tokens = torch.arange(v.shape[2], device=DEVICE).int().expand(*v.shape[:2], -1)
    assert torch.equal(grouping.order.sort(-1).values, tokens)
    labels = assign_labels(v.float(), grouping.centroids).gather(2, grouping.order.long())
    # tf32 products decide near ties their own way
    few = labels.numel() / 100
    assert (labels.diff() < 0).sum() <= few
    assert (grouping.order.diff()[labels.diff() == 0] <= 0).sum() <= few


@pytest.mark.parametrize("length", [1, 9, 127, 129, 503])
def test_order_is_a_permutation_cluster_by_cluster(length):
    v = clustered(length)
    assert_cluster_by_cluster(v, group_tokens(v, 16))


@pytest.mark.parametrize("clusters", [1, 5, 64, 100, 256])
def test_any_number_of_clusters(clusters):
    v = clustered(300, 1)
    grouping = group_tokens(v, clusters)
    assert grouping.centroids.shape == (1, 1, clusters, 64) and grouping.centroids.isfinite().all()
    assert_cluster_by_cluster(v, grouping)


def test_removes_as_much_energy_as_the_reference():
    # long enough that Lloyd steps see a sample only
    v = clustered(6144, 1)
    ours, reference = group_tokens(v, 32), reference_group_tokens(v, 32)
    assert energy_removed(v, ours.order) > energy_removed(v, reference.order) - 0.02
    assert energy_removed(v, ours.order) > 3 * energy_removed(v)


def test_same_labels_as_the_reference_on_the_same_centroids():
    v = clustered(700)
    start = reference_group_tokens(v, 64, iterations=2)
    ours = group_tokens(v, 64, start, iterations=0)
    assert torch.equal(ours.centroids, start.centroids)
    same = ours.order == reference_group_tokens(v, 64, start, iterations=0).order
    assert same.float().mean() > 0.95


def test_sixteen_bit_products(monkeypatch):
    """The GPU's path for bf16 and fp16; the interpreter can take it in fp16 only."""
    v = clustered(500, dtype=torch.float16)
    expected = group_tokens(v, 16)
    monkeypatch.setattr(triton_kmeans, "exact_products", lambda dtype: True)
    grouping = group_tokens(v, 16)
    assert_cluster_by_cluster(v, grouping)
    assert (grouping.order == expected.order).float().mean() > 0.9


def test_lloyd_step_equals_the_reference():
    v = clustered(600)
    start = reference_group_tokens(v, 16, iterations=1)
    ours = group_tokens(v, 16, start, iterations=1)
    apart = (ours.centroids - reference_group_tokens(v, 16, start, iterations=1).centroids).abs()
    # a token on a border may go to the other side and move two centroids by a part of one token
    assert apart.median() < 1e-3 and apart.max() < 0.3


def test_masked_keys_come_last_and_do_not_matter():
    v = clustered()
    mask = torch.rand(1, 512, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.7
    count = int(mask.sum())
    poisoned = torch.where(mask[:, None, :, None], v, torch.nan)
    grouping = group_tokens(poisoned, 16, key_mask=mask)
    alone = group_tokens(v[:, :, mask[0]], 16)
    kept = torch.arange(512, device=DEVICE)[mask[0]].int()
    assert torch.equal(grouping.order[..., :count], kept[alone.order.long()])
    assert torch.equal(grouping.centroids, alone.centroids)
    assert not mask[0][grouping.order[..., count:].long()].any()


def test_no_key_at_all():
    v = clustered(130)
    grouping = group_tokens(v, 16, key_mask=torch.zeros(1, 130, dtype=torch.bool, device=DEVICE))
    assert torch.equal(grouping.order.sort(-1).values[0, 0].cpu(), torch.arange(130).int())


def test_deterministic_and_independent_of_strides():
    v = clustered(260, dtype=torch.bfloat16)
    view = v.transpose(1, 2).contiguous().transpose(1, 2)
    first, second = group_tokens(v, 16), group_tokens(view, 16)
    assert torch.equal(first.order, second.order) and torch.equal(first.centroids, second.centroids)
