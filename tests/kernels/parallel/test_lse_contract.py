"""The log-sum-exp that engines merge key shards by, for every kernel that runs on this machine.

fp32, natural log, of the true scores: key mean added back, absent keys left out, from the kernel's own
quantized probabilities. Two wrong ones, of a kind that other kernels return, are shown to be caught.
"""

import math
from functools import reduce

import pytest
import torch
from comfyui_vc_attention.kernels import (
    KERNELS,
    AttentionProblem,
    VCConfig,
    choose_kernel,
    merge_attention,
    vc_attention,
)
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SHAPE, KEYS = (1, 2, 100, 128), 400
CONFIGS = {
    "int8": VCConfig(value_format="int8"),
    "fp8": VCConfig(value_format="fp8", expcast="off"),
    "expcast": VCConfig(expcast="on"),
    "4-bit": VCConfig("4-bit"),
}
# natural-log units, about twice the largest error of the reference on these inputs
LARGEST_ERROR = {"int8": 0.02, "fp8": 0.02, "expcast": 0.03, "4-bit": 0.3}
MERGE_BOUND = 1.15  # of the error of the undivided call


def choice(kernel, name):
    """What choose_kernel says to a kernel and a config, on this machine."""
    shape = (1, 1, 128, 128)
    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
    problem = AttentionProblem(shape, shape, (DTYPE,) * 3, (1,) * 3, DEVICE, capability, CONFIGS[name])
    return choose_kernel(problem, kernel)


RUN_HERE = [(spec.name, name) for spec in KERNELS for name in CONFIGS if choice(spec.name, name).kernel]
every_kernel = pytest.mark.parametrize("attend", RUN_HERE, indirect=True, ids="-".join)


@pytest.mark.parametrize("kernel", [spec.name for spec in KERNELS])
def test_kernel_is_held_to_the_contract(kernel):
    if not any(kernel == name for name, _ in RUN_HERE):
        pytest.skip(choice(kernel, "int8").reason)


@pytest.fixture
def attend(request):
    """attend(q, k, v, **options) -> (out, lse) on one kernel with one config."""
    kernel, name = request.param

    def attend(q, k, v, **options):
        return vc_attention(q, k, v, CONFIGS[name], kernel=kernel, return_lse=True, **options)

    attend.largest_error = LARGEST_ERROR[name]
    attend.bits = 4 if name == "4-bit" else 8
    return attend


@pytest.fixture
def qkv():
    """Keys whose two halves have channel means about one deviation apart, so that a lost mean shows."""
    q, k, v = sample_qkv("clustered", SHAPE, KEYS, DTYPE, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    k[:, :, KEYS // 2 :] += torch.randn(1, SHAPE[1], 1, SHAPE[3], device=DEVICE, generator=generator)
    return q, k, v


def merged(attend, q, k, v, shards, spoil=lambda q, k, lse: lse):
    """Attention over the keys in shards parts, merged."""
    parts = []
    for k_part, v_part in zip(k.chunk(shards, 2), v.chunk(shards, 2), strict=True):
        out, lse = attend(q, k_part, v_part)
        parts.append((out, spoil(q, k_part, lse)))
    return reduce(lambda one, other: merge_attention(*one, *other), parts)


@every_kernel
def test_is_float32_natural_log_of_the_true_scores(attend, qkv):
    _, lse = attend(*qkv)
    _, exact = exact_attention(*qkv)
    assert lse.dtype == torch.float32
    assert lse.shape == SHAPE[:3]
    assert (lse - exact).abs().max() < attend.largest_error


@every_kernel
def test_follows_the_softmax_scale(attend, qkv):
    _, lse = attend(*qkv, scale=0.05)
    assert (lse - exact_attention(*qkv, scale=0.05)[1]).abs().max() < attend.largest_error


@every_kernel
@pytest.mark.parametrize("shards", [2, 3])
def test_merged_shards_equal_the_whole(attend, qkv, shards):
    exact, exact_lse = exact_attention(*qkv)
    whole = relative_l2(attend(*qkv)[0], exact)
    out, lse = merged(attend, *qkv, shards)
    assert relative_l2(out, exact) < MERGE_BOUND * whole
    assert (lse - exact_lse).abs().max() < attend.largest_error


@every_kernel
def test_absent_keys_are_left_out(attend, qkv):
    q, k, v = qkv
    mask = torch.arange(KEYS, device=DEVICE)[None] < 130
    out, lse = attend(q, k, v, key_mask=mask)
    short_out, short_lse = attend(q, k[:, :, :130], v[:, :, :130])
    # sums over a tile and over a part of it may be added in another order
    assert relative_l2(out, short_out) < (1e-6 if DTYPE is torch.float32 else 1e-4)
    assert (lse - short_lse).abs().max() < 1e-5


@every_kernel
def test_a_shard_without_keys_weighs_nothing(attend, qkv):
    q, k, v = qkv
    none = torch.zeros(1, KEYS, dtype=torch.bool, device=DEVICE)
    empty, empty_lse = attend(q, k, v, key_mask=none)
    assert (empty == 0).all()
    assert (empty_lse == -torch.inf).all()
    out, lse = attend(q, k, v)
    both, both_lse = merge_attention(out, lse, empty, empty_lse)
    assert both.equal(out)
    assert both_lse.equal(lse)


@every_kernel
def test_a_padded_head_is_zeros(attend, qkv):
    """Engines fill the heads up to a multiple of the ranks with zeros."""
    q, k, v = (x.clone() for x in qkv)
    for x in (q, k, v):
        x[:, 1] = 0
    out, lse = attend(q, k, v)
    assert (out[:, 1] == 0).all()
    assert (lse[:, 1] - math.log(KEYS)).abs().max() < attend.largest_error


def base_2(q, k, lse):
    return lse / math.log(2)


def mean_missing(q, k, lse):
    scores_of_mean = q.float() @ k.float().mean(2, keepdim=True).transpose(-1, -2)
    return lse - SHAPE[3] ** -0.5 * scores_of_mean[..., 0]


@every_kernel
@pytest.mark.parametrize("spoil", [base_2, mean_missing])
def test_a_wrong_one_is_caught(attend, qkv, spoil):
    q, k, _ = qkv
    exact, exact_lse = exact_attention(*qkv)
    out, lse = attend(*qkv)
    assert (spoil(q, k, lse) - exact_lse).abs().max() > 5 * attend.largest_error
    if attend.bits == 8:  # at 4 bits the rounding of the values hides it in the output
        wrong, _ = merged(attend, *qkv, 2, spoil)
        assert relative_l2(wrong, exact) > 1.5 * MERGE_BOUND * relative_l2(out, exact)
