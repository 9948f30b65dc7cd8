import pytest
import torch
from comfyui_vc_attention.kernels import group_tokens
from comfyui_vc_attention.kernels.dispatch import key_list
from comfyui_vc_attention.kernels.group.labels import labels_from_order, order_from_labels


def values(batch=2, keys=700):
    return torch.randn(batch, 3, keys, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("clusters", [1, 7, 128, 256])
@pytest.mark.parametrize("keys", [1, 100, 700])
def test_an_order_comes_back(clusters, keys):
    order = group_tokens(values(keys=keys), clusters).order
    labels = labels_from_order(order)
    assert labels.dtype == torch.uint8 and torch.equal(order_from_labels(labels), order)


@pytest.mark.parametrize("clusters", [4, 256])
def test_existing_keys_keep_their_order_under_a_mask(clusters):
    mask = torch.rand(2, 700, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[1, 500:] = False
    order = group_tokens(values(), clusters, None, mask).order
    back = order_from_labels(labels_from_order(order))
    (listed, count), (again, _) = (key_list(each, mask, 3) for each in (order, back))
    for row in range(2):
        assert torch.equal(listed[row, :, : count[row]], again[row, :, : count[row]])


def test_more_runs_than_labels_still_give_a_permutation():
    order = torch.arange(600, dtype=torch.int32).flip(0).expand(1, 1, 600)
    back = order_from_labels(labels_from_order(order))
    assert torch.equal(back.sort().values, order.sort().values)
