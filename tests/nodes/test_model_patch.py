"""The override against recorded calls and fakes; the real ComfyUI is in tests/host."""

import contextlib
import copy
import logging
import sys
import threading
import types

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, attend_call
from comfyui_vc_attention.kernels.testing import relative_l2
from comfyui_vc_attention.nodes import head_groups, model_patch
from comfyui_vc_attention.nodes.families import family_of
from comfyui_vc_attention.nodes.kernel_errors import CudaContextLost
from comfyui_vc_attention.nodes.model_patch import overrides_of, patch_attention, remove_patch
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.run_state import Forward
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE

from tests.evidence.bounds import HARD, bound

LIMIT = bound("int8_int8, means, sequence", margin=HARD)  # N(0, 1), few keys, one call of few channels
RECORDED_MODELS = (
    *("tiny_wan", "tiny_wan_i2v", "tiny_wan22_5b", "tiny_wan22_high+low"),
    *("tiny_hunyuan_video", "tiny_hunyuan_video15", "tiny_minimax_h3"),
)


def host_func(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kw
):
    """What ComfyUI's backend computes, on the same arguments."""
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    if mask is not None and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=kw.get("scale"), enable_gqa=bool(kw.get("enable_gqa"))
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Host:
    """A func that counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        assert kwargs["_inside_attn_wrapper"] is True  # or a wrapped backend would call the override for ever
        self.calls += 1
        return host_func(*args, **kwargs)


class Box:
    """ComfyUI's single-owner container."""

    def __init__(self, tensor):
        self.tensor = tensor

    def peek(self):
        assert self.tensor is not None, "taken before"
        return self.tensor

    def take(self):
        tensor, self.tensor = self.peek(), None
        return tensor


@pytest.fixture
def patched(make_model):
    """patched(**settings): a model under the reference kernel, whose short calls are taken too."""

    def patch(model=None, clusters=4, kernel="reference", **settings):
        model = model or make_model()
        settings = PatchSettings(VCConfig(clusters=clusters), kernel, **{"min_tokens": 1, **settings})
        return patch_attention(model, settings, family_of(model.model.diffusion_model))

    return patch


def wan_call(tokens=96, keys=None, seed=0, batch=2):
    generator = torch.Generator().manual_seed(seed)
    lengths = (tokens, keys or tokens, keys or tokens)
    return tuple(torch.randn(batch, length, 2 * 128, generator=generator) for length in lengths)


def call(options, q, k, v, *args, **kwargs):
    """Attention as a ComfyUI backend's wrapper calls it."""
    host = Host()
    kwargs = {"_inside_attn_wrapper": True, "transformer_options": options, **kwargs}
    if not args:
        kwargs.setdefault("heads", 2)
    return options[OVERRIDE](host, q, k, v, *args, **kwargs), host.calls


def in_block(options, index=0, kind="double"):
    return {**options, "block_index": index, "block_type": kind}


def one_call(model, *args, qkv=None, sigmas=(1.0, 0.5, 0.0), conditions=(((1, 0), 40),), **kwargs):
    """(output, calls that reached the host) of one self-attention per forward, for each forward."""
    q, k, v = qkv or wan_call()
    forward = lambda options: call(in_block(options), q, k, v, *args, **kwargs)  # noqa: E731
    return model.sample(list(sigmas), forward, conditions)


def summary(caplog):
    return caplog.messages[-1]


def test_a_self_attention_call_is_taken_and_close(patched):
    q, k, v = wan_call()
    expected = host_func(q, k, v, 2)
    for out, reached_host in one_call(patched(), qkv=(q, k, v)):
        assert reached_host == 0 and out.shape == expected.shape and out.dtype == expected.dtype
        assert 0 < relative_l2(out, expected) < LIMIT


def test_the_log_counts_what_happened(patched, caplog):
    q, k, v = wan_call()
    short = wan_call(96, keys=40)

    def forward(options):
        for index in range(3):
            call(in_block(options, index), q, k, v)
            call(in_block(options, index), *short)

    with caplog.at_level(logging.INFO, "vc_attention"):
        patched().sample([1.0, 0.9, 0.8, 0.5, 0.0], forward)
    assert "12 of 24 calls low-bit (12 reference" in summary(caplog)
    assert "12 left alone (12 cross-attention)" in summary(caplog)
    assert "grouped in 1 of 4 steps" in summary(caplog) and len(caplog.messages) == 1


@pytest.mark.parametrize(
    "how, reason",
    [
        ({"low_precision_attention": False}, "opted out by the model"),
        ({"attn_precision": torch.float32}, "asked for in float32"),
        ({"window_of_2027": 5}, "unknown argument window_of_2027"),
        ({"sinks": torch.zeros(2)}, "unknown argument sinks"),
        ({"mask": torch.zeros(2, 1, 96, 96)}, "a mask that differs by query"),
        ({"mask": torch.full((1, 1, 96), -2.0)}, "a mask that weighs keys"),
    ],
)
def test_calls_we_do_not_take_go_to_the_host_untouched(patched, caplog, how, reason):
    """N11 and the rows of the override contract: bit-equal to the host, counted by reason."""
    q, k, v = wan_call()
    with caplog.at_level(logging.INFO, "vc_attention"):
        results = one_call(patched(), qkv=(q, k, v), **how)
    for out, reached_host in results:
        assert reached_host == 1 and torch.equal(out, host_func(q, k, v, 2, **how))
    assert reason in summary(caplog)


def test_where_a_gradient_is_wanted_the_host_makes_it(patched, caplog):
    """Training nodes sample with gradients; low-bit attention has none, and a LoRA would learn nothing."""
    q, k, v = wan_call()
    q.requires_grad_()
    with caplog.at_level(logging.INFO, "vc_attention"):
        results = one_call(patched(), qkv=(q, k, v))
    assert all(reached_host == 1 and out.requires_grad for out, reached_host in results)
    assert "a gradient is wanted" in summary(caplog)
    with torch.no_grad():
        assert all(reached_host == 0 for _, reached_host in one_call(patched(), qkv=(q, k, v)))


def test_d05_fewer_key_heads_go_to_the_host(patched):
    q = torch.randn(1, 4, 96, 128)
    k = v = torch.randn(1, 2, 96, 128)
    how = {"skip_reshape": True, "enable_gqa": True}
    for out, reached_host in one_call(patched(), 4, qkv=(q, k, v), **how):
        assert reached_host == 1 and torch.equal(out, host_func(q, k, v, 4, **how))


def test_n11_an_opted_out_call_is_the_hosts_bit_for_bit(patched, caplog):
    """Wan i2v: the image's cross-attention, which low precision turned into black video."""
    q, (_, k, v) = wan_call(4096, batch=1)[0], wan_call(257, batch=1)
    how = {"low_precision_attention": False}
    with caplog.at_level(logging.INFO, "vc_attention"):
        results = one_call(patched(), qkv=(q, k, v), sigmas=(1.0, 0.0), **how)
    assert all(reached == 1 and torch.equal(out, host_func(q, k, v, 2)) for out, reached in results)
    assert "1 opted out by the model" in summary(caplog)


def test_d07_odd_offsets_are_taken_and_odd_strides_left(patched):
    storage = torch.randn(1 + 96 * 256 * 2, generator=torch.Generator().manual_seed(2))
    shifted = storage.as_strided((1, 96, 256), (96 * 256, 256, 1), 1)
    results = one_call(patched(), qkv=(shifted,) * 3, conditions=(((0,), 40),))
    expected = host_func(shifted, shifted, shifted, 2)
    assert all(not reached and relative_l2(out, expected) < LIMIT for out, reached in results)
    spread = storage.as_strided((1, 96, 256), (96 * 512, 512, 2), 0)
    results = one_call(patched(), qkv=(spread,) * 3, conditions=(((0,), 40),))
    assert all(reached and torch.equal(out, host_func(spread, spread, spread, 2)) for out, reached in results)


def test_d13_float32_is_not_cast_to_16_bits(patched):
    q, k, v = wan_call()
    for out, reached in one_call(patched(), qkv=(q, k, 1e5 * v)):
        assert not reached and out.dtype == torch.float32 and out.isfinite().all()
        assert relative_l2(out, host_func(q, k, 1e5 * v, 2)) < LIMIT


@pytest.mark.parametrize("head_dim", [40, 160, 512])
def test_d03_other_head_dims_go_to_the_host(patched, head_dim):
    q = torch.randn(1, 2, 96, head_dim)
    for out, reached_host in one_call(patched(), 2, qkv=(q, q, q), skip_reshape=True):
        assert reached_host == 1 and torch.equal(out, host_func(q, q, q, 2, skip_reshape=True))


@pytest.mark.parametrize(
    "dtypes, taken", [((torch.float64,) * 3, 0), ((torch.bfloat16, torch.float32, torch.bfloat16), 1)]
)
def test_d01_output_keeps_the_dtype(patched, caplog, dtypes, taken):
    q, k, v = (t.to(dtype) for t, dtype in zip(wan_call(), dtypes, strict=True))

    def forward(options):
        func = lambda *args, **kwargs: args[0]  # noqa: E731
        kwargs = {"heads": 2, "_inside_attn_wrapper": True, "transformer_options": in_block(options)}
        return options[OVERRIDE](func, q, k, v, **kwargs)

    with caplog.at_level(logging.INFO, "vc_attention"):
        outputs = patched().sample([1.0, 0.0], forward)
    assert all(out.dtype == q.dtype for out in outputs)
    assert f"{taken} of 1 calls low-bit" in summary(caplog) and "failed" not in caplog.text


def test_scale_is_honoured(patched):
    q, k, v = wan_call()
    (out, _), *_ = one_call(patched(), qkv=(q, k, v), scale=0.3)
    assert relative_l2(out, host_func(q, k, v, 2, scale=0.3)) < LIMIT
    assert relative_l2(out, host_func(q, k, v, 2)) > 0.3


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_every_layout_comes_back_as_asked(patched, skip_reshape, skip_output_reshape):
    q, k, v = wan_call()
    if skip_reshape:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
    how = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    expected = host_func(q, k, v, 2, **how)
    for out, reached_host in one_call(patched(), 2, qkv=(q, k, v), **how):
        assert reached_host == 0 and out.shape == expected.shape and relative_l2(out, expected) < LIMIT


def test_arguments_may_come_by_place(patched):
    q, k, v = wan_call()
    mask = torch.zeros(1, 1, 96)
    mask[..., 90:] = -torch.inf
    for out, reached_host in one_call(patched(), 2, mask, None, False, True, qkv=(q, k, v)):
        expected = host_func(q, k, v, 2, mask, None, False, True)
        assert reached_host == 0 and out.shape == expected.shape and relative_l2(out, expected) < LIMIT


def test_a_key_mask_equals_removing_those_keys(patched):
    q, k, v = wan_call()
    mask = torch.zeros(1, 1, 96)
    mask[..., 80:] = -3.4e38
    hidden = [t.clone() for t in (k, v)]
    for t in hidden:
        t[:, 80:] = 1e4  # a masked key may hold anything
    clean = one_call(patched(), qkv=(q, k, v), mask=mask)
    dirty = one_call(patched(), qkv=(q, *hidden), mask=mask)
    for (out, reached_host), (other, _) in zip(clean, dirty, strict=True):
        assert reached_host == 0 and torch.equal(out, other)


def test_unknown_arguments_are_passed_on(patched):
    seen = {}

    def func(q, k, v, heads, **kwargs):
        seen.update(kwargs)
        return q

    def forward(options):
        kwargs = {"heads": 2, "_inside_attn_wrapper": True, "transformer_options": options, "new_in_2027": 1}
        return options[OVERRIDE](func, *wan_call(96, 40), **kwargs)

    patched().sample([1.0, 0.0], forward)
    assert seen["new_in_2027"] == 1 and seen["_inside_attn_wrapper"] is True


def test_an_unknown_argument_that_asks_for_nothing_is_no_reason(patched):
    for _, reached_host in one_call(patched(), new_in_2027=None, newer=False, _private=3):
        assert reached_host == 0


def test_inputs_are_not_written(patched):
    q, k, v = wan_call()
    before = [t.clone() for t in (q, k, v)]
    one_call(patched(), qkv=(q, k, v))
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


def test_outside_a_run_nothing_is_taken(patched):
    q, k, v = wan_call()
    options = in_block(patched().model_options["transformer_options"])
    out, reached_host = call(options, q, k, v)
    assert reached_host == 1 and torch.equal(out, host_func(q, k, v, 2))


def test_exact_blocks_short_calls_and_the_range_stay_exact(patched):
    q, k, v = wan_call()

    def count(model, index=0):
        results = model.sample([1.0, 0.9, 0.0], lambda options: call(in_block(options, index), q, k, v))
        return [reached_host for _, reached_host in results]

    assert count(patched(exact_blocks=frozenset({3})), index=3) == [1, 1]
    assert count(patched(exact_blocks=frozenset({3})), index=2) == [0, 0]
    assert count(patched(min_tokens=97)) == [1, 1]
    assert count(patched(start_percent=0.2)) == [1, 0]


def test_x06_one_override_object_for_every_call_and_clone(patched):
    model = patched()
    seen = []
    forward = lambda options: seen.append(id(options[OVERRIDE]))  # noqa: E731
    model.sample([1.0, 0.5, 0.0], forward)
    model.clone().sample([1.0, 0.5, 0.0], forward)
    assert len(set(seen)) == 1 and len(seen) == 4


def test_a_pack_that_copies_everything_deeply_changes_nothing(patched):
    model = patched()
    model.model_options = copy.deepcopy(model.model_options)
    model.wrappers = copy.deepcopy(model.wrappers)
    q, k, v = wan_call()

    def forward(options):
        return call(copy.deepcopy(in_block(options)), q, k, v)

    assert [reached for _, reached in model.sample([1.0, 0.5, 0.0], forward)] == [0, 0]


class Predecessor:
    """Another pack's override, with or without a container function."""

    def __init__(self, boxes=False):
        self.calls = []
        if boxes:
            self.container_function = self.take_boxes

    def __call__(self, func, q, k, v, *args, **kwargs):
        self.calls.append("tensors")
        return func(q, k, v, *args, **kwargs)

    def take_boxes(self, q, k, v, *args, **kwargs):
        self.calls.append("boxes")
        return host_func(q.take(), k.take(), v.take(), *args, **kwargs)


def with_override(model, override):
    model.model_options["transformer_options"][OVERRIDE] = override
    return model


def test_l07_what_we_decline_goes_to_the_predecessor(patched, make_model):
    before = Predecessor()
    model = patched(with_override(make_model(), before))
    assert model.model_options["transformer_options"][OVERRIDE]._vc_previous is before
    one_call(model)
    assert before.calls == []
    one_call(model, low_precision_attention=False)
    assert before.calls == ["tensors"] * 2


def test_l04_auto_off_auto_restores_what_was_there(patched, make_model):
    before = Predecessor()
    base = with_override(make_model(), before)
    first = patched(base)
    off = remove_patch(first)
    again = patched(off)
    assert [len(overrides_of(m)) for m in (first, off, again)] == [1, 0, 1]
    assert off.model_options["transformer_options"][OVERRIDE] is before
    assert again.model_options["transformer_options"][OVERRIDE]._vc_previous is before


def test_removing_leaves_no_key_behind(patched):
    """A key that holds None would be called."""
    off = remove_patch(patched())
    assert OVERRIDE not in off.model_options["transformer_options"]
    assert not any(off.all(off.wrappers, event) for event in off.wrappers)
    assert not any(off.all(off.callbacks, event) for event in off.callbacks)
    assert remove_patch(off) is None


def test_patching_twice_is_patching_once(patched):
    model = patched(patched())
    assert len(overrides_of(model)) == 1 and len(model.all(model.wrappers, "outer_sample")) == 1
    assert [reached for _, reached in one_call(model)] == [0, 0]


def test_l01_the_model_that_came_in_stays_unpatched(patched, make_model):
    base = make_model()
    patched(base)
    assert base.model_options == {"transformer_options": {}} and not base.wrappers and not base.callbacks


def test_under_a_foreign_override_that_chains_us_off_makes_us_silent(patched):
    model = patched()
    ours = model.model_options["transformer_options"][OVERRIDE]
    with_override(model, lambda func, *args, **kwargs: ours(func, *args, **kwargs))
    assert [reached for _, reached in one_call(model)] == [0, 0]
    assert [reached for _, reached in one_call(remove_patch(model))] == [1, 1]


def boxed(options, qkv, heads=2, **kwargs):
    boxes = [Box(t) for t in qkv]
    override = options[OVERRIDE]
    out = override.container_function(
        *boxes, heads, _inside_attn_wrapper=True, transformer_options=options, **kwargs
    )
    return out, [box.tensor is None for box in boxes]


def test_containers_are_emptied_and_the_result_is_the_same(patched):
    qkv = wan_call()
    tensors = one_call(patched(), qkv=qkv)
    boxes = patched().sample([1.0, 0.5, 0.0], lambda options: boxed(in_block(options), qkv))
    for (out, _), (other, emptied) in zip(tensors, boxes, strict=True):
        assert torch.equal(out, other) and emptied == [True] * 3


def boxed_calls(patched, make, monkeypatch):
    """Which boxes are full at each attend_call of two calls of a fresh process; make gives q, k, v."""
    full, boxes = [], []

    def watching(prepared, out=None):
        full.append([box.tensor is not None for box in boxes])
        return attend_call(prepared, out)

    for module in (model_patch, head_groups):
        monkeypatch.setattr(module, "attend_call", watching)
    monkeypatch.setattr(model_patch, "_proven", set())

    def forward(options):
        boxes[:] = [Box(t) for t in make()]
        options = in_block(options)
        options[OVERRIDE].container_function(
            *boxes, 2, _inside_attn_wrapper=True, transformer_options=options
        )
        assert not any(box.tensor is not None for box in boxes)

    model = patched()
    model.sample([1.0, 0.5, 0.0], forward)
    override = model.model_options["transformer_options"][OVERRIDE]
    assert override.finished[-1].head_groups == 1  # nobody was short of memory
    return full


def test_l08_boxed_tensors_are_gone_before_the_output_is_made(patched, monkeypatch):
    """A kernel that never ran yet works by head groups, which keep q, k and v and need little beside them."""
    assert boxed_calls(patched, wan_call, monkeypatch) == [[True] * 3, [True] * 3, [False] * 3]


def test_l08_boxes_of_one_tensor_are_kept_and_the_call_is_split(patched, monkeypatch):
    def fused():
        return torch.randn(1, 96, 3, 256).unbind(2)

    assert boxed_calls(patched, fused, monkeypatch) == [[True] * 3] * 4


def test_a_kernel_that_fails_without_its_tensors_says_so(patched, monkeypatch):
    """Once it worked, q, k and v go as they are read: nobody can make such a call good."""

    def attend(prepared):
        raise RuntimeError("launch failed")

    qkv = wan_call()
    model = patched()
    model.sample([1.0, 0.0], lambda options: boxed(in_block(options), qkv))
    monkeypatch.setattr(model_patch, "attend_call", attend)
    with pytest.raises(RuntimeError, match=r"reference failed after q, k, v were freed"):
        model.sample([1.0, 0.0], lambda options: boxed(in_block(options), qkv))


def test_declined_boxes_reach_the_host_whole(patched, monkeypatch):
    qkv = wan_call(96, 40)

    def optimized_attention(q, k, v, *args, **kwargs):
        assert kwargs["_inside_attn_wrapper"] is True
        return host_func(q.take(), k.take(), v.take(), *args, **kwargs)

    monkeypatch.setattr(model_patch, "host_attention", lambda: optimized_attention)
    for out, emptied in patched().sample([1.0, 0.0], lambda options: boxed(options, qkv)):
        assert torch.equal(out, host_func(*qkv, 2)) and emptied == [True] * 3


@pytest.mark.parametrize("takes_boxes", [True, False])
def test_declined_boxes_reach_the_predecessor(patched, make_model, monkeypatch, takes_boxes):
    def backend(q, k, v, heads, **kwargs):
        return host_func(q, k, v, heads, **kwargs)

    def wrapped(*args, **kwargs):
        raise AssertionError("a wrapped backend would find the override again")

    wrapped.__wrapped__ = backend
    monkeypatch.setattr(model_patch, "host_attention", lambda: wrapped)
    before = Predecessor(boxes=takes_boxes)
    qkv = wan_call(96, 40)
    model = patched(with_override(make_model(), before))
    for out, _ in model.sample([1.0, 0.0], lambda options: boxed(options, qkv)):
        assert torch.equal(out, host_func(*qkv, 2))
    assert before.calls == ["boxes" if takes_boxes else "tensors"]


def failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("stage", ["prepare_call", "attend_call", "group_tokens"])
def test_a_kernel_error_is_said_once_and_the_host_takes_over(patched, monkeypatch, caplog, stage):
    monkeypatch.setattr(model_patch, stage, failing(RuntimeError("no kernel image")))
    qkv = wan_call()
    with caplog.at_level(logging.INFO, "vc_attention"):
        results = one_call(patched(), qkv=qkv, sigmas=(1.0, 0.9, 0.5, 0.0))
    for out, reached_host in results:
        assert reached_host == 1 and torch.equal(out, host_func(*qkv, 2))
    assert sum("is off for this run" in message for message in caplog.messages) == 1
    assert "0 of 3 calls low-bit" in summary(caplog)


def test_a_kernel_error_leaves_boxes_whole(patched, monkeypatch):
    for module in (model_patch, head_groups):  # a call in boxes works by head groups until one was good
        monkeypatch.setattr(module, "attend_call", failing(RuntimeError("no kernel image")))
    monkeypatch.setattr(model_patch, "_proven", set())
    monkeypatch.setattr(model_patch, "host_attention", lambda: lambda q, k, v, *a, **kw: host_func(
        q.take(), k.take(), v.take(), *a, **kw))  # fmt: skip
    qkv = wan_call()
    for out, _ in patched().sample([1.0, 0.5, 0.0], lambda options: boxed(in_block(options), qkv)):
        assert torch.equal(out, host_func(*qkv, 2))


def test_the_next_run_tries_the_kernel_again(patched, monkeypatch):
    model = patched()
    with monkeypatch.context() as broken:
        broken.setattr(model_patch, "attend_call", failing(RuntimeError("no kernel image")))
        assert [reached for _, reached in one_call(model)] == [1, 1]
    assert [reached for _, reached in one_call(model)] == [0, 0]


class Interrupt(BaseException):
    """As ComfyUI's InterruptProcessingException."""


@pytest.mark.parametrize(
    "raised, expected",
    [
        (Interrupt(), Interrupt),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), CudaContextLost),
    ],
)
def test_what_must_not_be_swallowed_goes_through_and_frees_the_run(patched, monkeypatch, raised, expected):
    kept = []
    original = model_patch.AttentionOverride._grouping

    def watching(self, forward, *args):
        kept.append(forward.run.store)
        return original(self, forward, *args)

    monkeypatch.setattr(model_patch.AttentionOverride, "_grouping", watching)
    monkeypatch.setattr(model_patch, "attend_call", failing(raised))
    with pytest.raises(expected):
        one_call(patched())
    assert kept and kept[0].held_bytes == 0


SELF_ATTENTION = ("self", "joint_self")


@pytest.mark.parametrize("name", RECORDED_MODELS)
def test_replay_of_every_recorded_call(patched, recorded, make_model, name):
    """Each call that ComfyUI made, with its strides, dtype, arguments, options and mask."""
    entry = recorded["models"][name]
    for record in entry["calls"]:
        if record["q"][0][1] == record["k"][0][1] == 512 or not record["reaches_override"]:
            continue  # told by order: tests/nodes/test_families.py; or never seen
        model = make_model(*entry["dit_class"].rsplit(".", 1))
        replay(patched(model, grouping_window=0.0), record, record["kind"] in SELF_ATTENTION)


def replay(model, record, taken):
    generator = torch.Generator().manual_seed(1)
    qkv = [strided(*record[part], generator) for part in ("q", "k", "v")]
    arguments = {**record["kwargs"], "mask": recorded_mask(record["mask"])}
    places = [arguments.pop("heads", record["heads"])] if record["positional"] == 4 else []

    def forward(options):
        options.update({key: 0 if value == "int" else value for key, value in record["options"].items()})
        options.pop("context_window", None)
        if options.get("block_index") == "absent":
            del options["block_index"]
        return call(options, *qkv, *places, **arguments)

    (out, reached_host), *_ = model.sample([1.0, 0.0], forward, conditions=(((1, 0), 512),))
    assert reached_host == int(not taken), record
    assert list(out.shape) == record["out"] and out.dtype == qkv[0].dtype
    if taken:
        expected = host_func(*qkv, *places, **arguments)
        assert relative_l2(out.float(), expected.float()) < LIMIT


def recorded_mask(record):
    """A mask of the recorded shape that hides the last eighth of the text, which comes first."""
    if record is None:
        return None
    mask = torch.zeros(record[0], dtype=getattr(torch, record[2]))
    mask[..., 42:48] = -3.39e38
    return mask


def strided(shape, strides, dtype, generator):
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return torch.randn(size, generator=generator).to(getattr(torch, dtype)).as_strided(shape, strides)


def test_the_override_is_never_traced(patched):
    """A traced override would repeat its first step for ever; ComfyUI's compile nodes drop the guards."""
    taken = []
    model = patched(start_percent=0.2)
    qkv = wan_call()

    def keep(guards):
        return ["transformer_options" not in guard.name for guard in guards]

    @torch.compile(backend="eager", options={"guard_filter_fn": keep})
    def block(q, k, v, transformer_options):
        override = transformer_options[OVERRIDE]
        return override(host_func, q + 0, k, v, heads=2, transformer_options=transformer_options) + 1

    def forward(options):
        out = block(*qkv, in_block(options))
        taken.append(options["vc_attention_forward"].run.report.taken)
        return out

    model.sample([1.0, 0.9, 0.5, 0.0], forward)
    assert taken == [0, 1, 2]


def test_contract_the_malloc_graph_is_paused_around_all_we_do(patched, monkeypatch):
    """Newer ComfyUI replays the allocations of a forward; ours differ from step to step."""
    events = []

    @contextlib.contextmanager
    def pause_malloc_graph():
        events.append("pause")
        yield
        events.append("resume")

    prefetch = types.ModuleType("comfy.model_prefetch")
    prefetch.pause_malloc_graph = pause_malloc_graph
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)
    for stage in ("group_tokens", "prepare_call", "attend_call"):
        original = getattr(model_patch, stage)
        monkeypatch.setattr(
            model_patch, stage, lambda *a, _f=original, _s=stage, **kw: events.append(_s) or _f(*a, **kw)
        )
    one_call(patched(), sigmas=(1.0, 0.0), conditions=(((0,), 40),))
    assert events == ["pause", "group_tokens", "prepare_call", "attend_call", "resume"]


def test_contract_two_gpus_on_two_threads(patched):
    """ComfyUI gives each device a thread, its own options and some of the conditions."""
    model, qkv = patched(grouping_window=1.0), [wan_call(batch=1, seed=seed) for seed in (0, 1)]
    apart = [host_func(*one, 2) for one in qkv]
    results, barrier = {0: [], 1: []}, threading.Barrier(2, timeout=60)

    def evaluate(options):
        run = options["vc_attention_run"]

        def work(which):
            mine = {**options, "cond_or_uncond": [which], "uuids": [options["uuids"][which]]}
            mine["vc_attention_forward"] = Forward(run)
            barrier.wait()
            for index in range(4):
                results[which].append(call(in_block(mine, index), *qkv[which]))

        threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return run

    runs = model.sample([1.0, 0.9, 0.8, 0.0], evaluate, conditions=(((0, 1), 40),))
    assert runs[0].report.taken == 3 * 4 * 2 and runs[0].report.groupings_made == 4 * 2
    for which, outputs in results.items():
        assert all(relative_l2(out, apart[which]) < LIMIT and not reached for out, reached in outputs)
        assert all(torch.equal(outputs[0][0], out) for out, _ in outputs[4::4])  # the order is reused


def test_contract_fused_rows_of_newer_h3_equal_contiguous_ones(patched, make_model):
    """q, k and v as views of one buffer, row stride 3 * H * D, batch stride of no meaning."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(96, 3 * 2 * 128, generator=generator)
    views = [part.unflatten(-1, (2, 128)).transpose(0, 1).unsqueeze(0) for part in fused.chunk(3, dim=-1)]
    assert {view.stride(2) for view in views} == {768}

    def outputs(qkv):
        model = patched(make_model("comfy.ldm.minimax.model", "MiniMaxH3Model"))

        def forward(options):
            options.update(block_index=0, minimax_h3_layout=object())
            return boxed(options, qkv, skip_reshape=True)[0]

        return model.sample([1.0, 0.5, 0.0], forward, conditions=(((0,), 40),))

    for strided_out, out in zip(outputs(views), outputs([v.contiguous() for v in views]), strict=True):
        assert torch.equal(strided_out, out)


def test_l06_no_module_of_comfyui_is_written(pack_root):
    """One hook, through the model's own options and wrappers; never a forward, never a module's attribute."""
    for source in sorted((pack_root / "nodes").glob("*.py")):
        text = source.read_text()
        assert "add_object_patch" not in text and "setattr(" not in text, source.name
        assert "wrap_attn" not in text and "functools.wraps" not in text
        # WanVideoWrapper is not ComfyUI, and its attention asks nobody
        assert "register_forward" not in text or source.name == "wan_video_patch.py"


@pytest.mark.parametrize("kind", ["tensors", "boxes"])
def test_short_memory_splits_a_call_into_head_groups(patched, monkeypatch, caplog, kind):
    """The result is the same, boxes are emptied, the orders are those of all heads, and the log says so."""
    caplog.set_level(logging.INFO, "vc_attention")
    # of one tensor: boxes could not be given up one by one
    qkv = [t.unflatten(-1, (2, 128)).transpose(1, 2) for t in torch.stack(wan_call())]
    whole = [out for out, _ in one_call(patched(), qkv=qkv, skip_reshape=True)]
    monkeypatch.setattr(model_patch, "groups_needed", lambda q, k, free: 2)
    if kind == "tensors":
        split = [out for out, _ in one_call(patched(), qkv=qkv, skip_reshape=True)]
    else:
        taken = []

        def forward(options):
            out, emptied = boxed(in_block(options), qkv, skip_reshape=True)
            taken.append(emptied)
            return out

        split = patched().sample([1.0, 0.5, 0.0], forward, (((1, 0), 40),))
        assert taken == [[True] * 3] * 2
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert "memory was short: calls in up to 2 groups of heads" in summary(caplog)
