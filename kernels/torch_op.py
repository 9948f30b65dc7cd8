"""Torch operators whose first call costs no more than the next."""

from collections.abc import Callable

import torch

NAMESPACE = "comfyui_vc_attention"


def define_op(schema: str, implementation: Callable, fake: Callable) -> Callable:
    """The operator comfyui_vc_attention::<schema>, one node to torch.compile, without a gradient.

    schema: as PyTorch writes it, "name(Tensor x, int n) -> Tensor". fake: implementation's results without
    their values. What torch.library.custom_op makes, but for its wrapper: at the first call that imports
    torch's whole compiler, which takes seconds.
    """
    operators = getattr(torch.ops, NAMESPACE)
    name, _, signature = schema.partition("(")
    if not hasattr(operators, name):  # the pack may have been loaded before, under another module name
        qualified = f"{NAMESPACE}::{name}"
        torch.library.define(qualified, f"({signature}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", implementation)
        torch.library.register_fake(qualified, fake)
        torch.library.register_autograd(qualified, _no_gradient)
    return getattr(operators, name)


def _no_gradient(context, *gradients):
    raise NotImplementedError("low-bit attention has no gradient: call it under torch.no_grad()")
