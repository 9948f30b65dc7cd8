"""A token order in one byte a key, for callers that keep orders over many denoising steps.

An order lists its keys cluster by cluster, ascending inside each. So a cluster ends where a token number
falls, and where none falls two clusters are one to the order. A key's label is the number of its run.
"""

import torch

LARGEST = 255


def labels_from_order(order: torch.Tensor) -> torch.Tensor:
    """Labels uint8 [B, H, Lk] of an order int32 [B, H, Lk] of at most 256 clusters, from group_tokens.

    order_from_labels gives the order back. With 256 clusters and a key mask the masked keys, which come last,
    may share the last label: then the existing keys still come in their order. No host synchronisation.
    """
    falls = order[..., 1:] < order[..., :-1]
    runs = torch.nn.functional.pad(falls.cumsum(-1, dtype=torch.int32), (1, 0)).clamp_max_(LARGEST)
    labels = torch.empty(order.shape, dtype=torch.uint8, device=order.device)
    return labels.scatter_(-1, order.long(), runs.to(torch.uint8))


def order_from_labels(labels: torch.Tensor) -> torch.Tensor:
    """The order int32 [B, H, Lk] that lists keys by label uint8 [B, H, Lk], stable inside a label."""
    return labels.argsort(dim=-1, stable=True).int()
