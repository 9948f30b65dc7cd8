"""Token orders that are measured only."""

import torch
from comfyui_vc_attention.kernels.testing import energy_removed, sample_qkv
from evidence.orders import balanced_kmeans, balanced_labels, kmeans_warm, static_cube


def is_permutation(order):
    numbers = torch.arange(order.shape[-1], dtype=torch.int32)
    return torch.equal(order.sort(-1).values, numbers.expand(order.shape))


def test_cube_tiles_are_cubes():
    order = static_cube((4, 16, 16), 2)
    assert order.shape == (1, 2, 1024) and is_permutation(order)
    t, y, x = (order[0, 0, :128] // n % m for n, m in ((256, 4), (16, 16), (1, 16)))
    assert (t.max(), y.max(), x.max()) == (1, 7, 7)


def test_cube_of_odd_grids_is_a_permutation():
    assert is_permutation(static_cube((3, 9, 13), 1))


def test_balanced_tiles_remove_more_than_sequence():
    v = sample_qkv("clustered", (1, 2, 1000, 128))[2]
    order = balanced_kmeans(v)
    assert is_permutation(order)
    assert energy_removed(v, order) > 2 * energy_removed(v)


def test_balanced_clusters_hold_a_tile_each():
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    labels = balanced_labels(x, x[:4])
    assert torch.bincount(labels).tolist() == [128] * 4


def test_warm_start_is_a_permutation():
    v = sample_qkv("clustered", (1, 1, 512, 64))[2]
    assert is_permutation(kmeans_warm(v + 0.1, v, 16))
