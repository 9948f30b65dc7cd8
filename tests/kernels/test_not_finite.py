"""What goes in as an infinity or NaN comes out as one (C7): no broken model makes a plausible picture."""

import functools
import math

import pytest
import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.registry import kernel_named
from comfyui_vc_attention.kernels.testing import exact_attention, sample_qkv

from .every_kernel import DEVICE, every_kernel, skip_unless_it_runs_here

SHAPE, KEYS, PLACE = (1, 2, 20, 128), 140, (0, 0, 17, 5)
PLAIN = {"demean": False, "rotate_qk": False, "smooth_k": False}  # nothing spreads one number over others


@pytest.fixture(autouse=True)
def it_runs_here(name):
    skip_unless_it_runs_here(name)


def attended(name, recipe, q, k, v):
    stages = kernel_named(name).load()
    return stages.attend(stages.prepare(q, k, v, recipe, softmax_scale=0.1, want_lse=True))


def inputs():
    return dict(zip("qkv", sample_qkv("clustered", SHAPE, KEYS, torch.bfloat16, DEVICE), strict=True))


@functools.cache
def before(name, recipe):
    return attended(name, recipe, **inputs())


@every_kernel
@pytest.mark.parametrize("switches", [{}, PLAIN], ids=["usual", "plain"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_stays_so(name, numerics, switches, value, which):
    recipe, broken = Recipe(numerics, **switches), inputs()
    broken[which][PLACE] = value
    out, lse = attended(name, recipe, **broken)
    exact, _ = exact_attention(*broken.values(), 0.1)
    lost = ~exact.isfinite()
    assert lost.any() and not out[lost].isfinite().any()
    if which == "k":
        assert lse[:, 0].isnan().all()
    # another head knows nothing of it
    for here, there in zip((out, lse), before(name, recipe), strict=True):
        assert torch.equal(here[:, 1], there[:, 1])
