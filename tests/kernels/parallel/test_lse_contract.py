"""The log-sum-exp that engines merge key shards by, for every kernel that runs on this machine; without a GPU
the Triton kernels run in Triton's interpreter.

fp32, natural log, of the true scores: key mean added back, absent keys left out, from the kernel's own
quantized probabilities. Two wrong ones, of a kind that other kernels return, are shown to be caught.
"""

import contextlib
import math
import os
from functools import cache, cached_property, reduce

import pytest
import torch
from comfyui_vc_attention.kernels import (
    KERNELS,
    AttentionProblem,
    VCConfig,
    choose_kernel,
    merge_attention,
    registry,
    vc_attention,
)
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SHAPE, KEYS = (1, 1, 40, 128), 250
CONFIGS = {
    "int8": VCConfig(value_format="int8"),
    "fp8": VCConfig(value_format="fp8", expcast="off"),
    "expcast": VCConfig(expcast="on"),
    "4-bit": VCConfig("4-bit"),
}
# natural-log units, about twice the largest error of the reference on these inputs
LARGEST_ERROR = {"int8": 0.02, "fp8": 0.02, "expcast": 0.03, "4-bit": 0.3}
E4M3_SCORES = 0.1  # of kernels that compute the scores in E4M3
MERGE_BOUND = 1.15  # chosen; of the error of the undivided call: a shard's scales fit its own keys


@contextlib.contextmanager
def triton_interpreted():
    """The registry without its rule that Triton kernels need a GPU, where they can do without one."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and registry._triton_missing() is None:
            patch.setattr(registry, "_triton_refuses", lambda problem, lowest: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def every_kernel_that_can():
    with triton_interpreted():
        yield


def choice(kernel, name):
    """What choose_kernel says to a kernel and a config, on this machine."""
    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
    problem = AttentionProblem.self_attention(
        128, DTYPE, device_type=DEVICE, capability=capability, config=CONFIGS[name]
    )
    return choose_kernel(problem, kernel)


with triton_interpreted():
    RUN_HERE = [(spec.name, name) for spec in KERNELS for name in CONFIGS if choice(spec.name, name).kernel]
every_kernel = pytest.mark.parametrize("case", RUN_HERE, indirect=True, scope="module", ids="-".join)


@pytest.mark.parametrize("kernel", [spec.name for spec in KERNELS])
def test_kernel_is_held_to_the_contract(kernel):
    if not any(kernel == name for name, _ in RUN_HERE):
        pytest.skip(choice(kernel, "int8").reason)


class Case:
    """One kernel with one config. Every result is computed once: the interpreter is slow."""

    def __init__(self, kernel, name):
        self.kernel, self.config = kernel, CONFIGS[name]
        self.bits = 4 if name == "4-bit" else 8
        scores = choice(kernel, name).recipe.numerics.partition("_")[0]
        self.largest_error = E4M3_SCORES if scores == "fp8" else LARGEST_ERROR[name]
        # keys whose two halves have channel means about one deviation apart, so that a lost mean shows
        q, k, v = sample_qkv("clustered", SHAPE, KEYS, DTYPE, DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(1)
        k[:, :, KEYS // 2 :] += torch.randn(1, SHAPE[1], 1, SHAPE[3], device=DEVICE, generator=generator)
        self.qkv = q, k, v
        self.exact, self.exact_lse = exact_attention(q, k, v)

    def attend(self, q, k, v, **options):
        return vc_attention(q, k, v, self.config, kernel=self.kernel, return_lse=True, **options)

    @cached_property
    def whole(self):
        return self.attend(*self.qkv)

    @cache  # noqa: B019, a few cases that live as long as the module
    def shards(self, count):
        """[(keys, out, lse)] over the keys in count parts."""
        q, k, v = self.qkv
        parts = zip(k.chunk(count, 2), v.chunk(count, 2), strict=True)
        return [(keys, *self.attend(q, keys, values)) for keys, values in parts]

    def merged(self, count, spoil=lambda q, k, lse: lse):
        parts = [(out, spoil(self.qkv[0], keys, lse)) for keys, out, lse in self.shards(count)]
        return reduce(lambda one, other: merge_attention(*one, *other), parts)


@pytest.fixture(scope="module")
def case(request):
    return Case(*request.param)


@every_kernel
def test_is_float32_natural_log_of_the_true_scores(case):
    _, lse = case.whole
    assert lse.dtype == torch.float32
    assert lse.shape == SHAPE[:3]
    assert (lse - case.exact_lse).abs().max() < case.largest_error


@every_kernel
def test_follows_the_softmax_scale(case):
    _, lse = case.attend(*case.qkv, scale=0.05)
    assert (lse - exact_attention(*case.qkv, scale=0.05)[1]).abs().max() < case.largest_error


@every_kernel
@pytest.mark.parametrize("count", [2, 3])
def test_merged_shards_equal_the_whole(case, count):
    out, lse = case.merged(count)
    assert relative_l2(out, case.exact) < MERGE_BOUND * relative_l2(case.whole[0], case.exact)
    assert (lse - case.exact_lse).abs().max() < case.largest_error


@every_kernel
def test_absent_keys_are_left_out(case):
    q, k, v = case.qkv
    mask = torch.arange(KEYS, device=DEVICE)[None] < 130
    out, lse = case.attend(q, k, v, key_mask=mask)
    short_out, short_lse = case.attend(q, k[:, :, :130], v[:, :, :130])
    # sums over a tile and over a part of it may be added in another order
    assert relative_l2(out, short_out) < (1e-6 if DTYPE is torch.float32 else 1e-4)
    assert (lse - short_lse).abs().max() < 1e-5


@every_kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, under Triton's interpreter
def test_a_shard_without_keys_weighs_nothing(case):
    none = torch.zeros(1, KEYS, dtype=torch.bool, device=DEVICE)
    empty, empty_lse = case.attend(*case.qkv, key_mask=none)
    assert (empty == 0).all()
    assert (empty_lse == -torch.inf).all()
    both, both_lse = merge_attention(*case.whole, empty, empty_lse)
    assert both.equal(case.whole[0])
    assert both_lse.equal(case.whole[1])


@every_kernel
def test_a_padded_head_is_zeros(case):
    """Engines fill the heads up to a multiple of the ranks with zeros."""
    out, lse = case.attend(*(torch.zeros_like(x) for x in case.qkv))
    assert (out == 0).all()
    assert (lse - math.log(KEYS)).abs().max() < case.largest_error


def base_2(q, k, lse):
    return lse / math.log(2)


def mean_missing(q, k, lse):
    scores_of_mean = q.float() @ k.float().mean(2, keepdim=True).transpose(-1, -2)
    return lse - SHAPE[3] ** -0.5 * scores_of_mean[..., 0]


@every_kernel
@pytest.mark.parametrize("spoil", [base_2, mean_missing])
def test_a_wrong_one_is_caught(case, spoil):
    q, k, _ = case.qkv
    out, lse = case.whole
    assert (spoil(q, k, lse) - case.exact_lse).abs().max() > 5 * case.largest_error
    if case.bits == 8:  # at 4 bits the rounding of the values hides it in the output
        wrong, _ = case.merged(2, spoil)
        assert relative_l2(wrong, case.exact) > 1.5 * MERGE_BOUND * relative_l2(out, case.exact)
