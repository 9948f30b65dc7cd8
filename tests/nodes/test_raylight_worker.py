"""The patch inside a Raylight worker, against Raylight's slot: its own where installed, else a stand-in."""

import importlib
import importlib.util
import sys
import types
from functools import partial

import pytest
import torch
from comfyui_vc_attention.kernels.dispatch import plain
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv
from comfyui_vc_attention.nodes import raylight_worker
from comfyui_vc_attention.nodes.raylight_worker import (
    INNER,
    InnerAttention,
    describe_patch,
    describe_run,
    patch_worker,
)
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE

from tests.evidence.bounds import bound

SLOT = "raylight.distributed_modules.inner_attention"
HAS_RAYLIGHT = importlib.util.find_spec("raylight") is not None
WIDGETS = {"kernel": "reference", "min_tokens": 1, "clusters": 4}
ULYSSES, CFG = {"ulysses_degree": 2, "ring_degree": 1}, {"ulysses_degree": 1, "cfg_degree": 2}
TOKENS, HEADS, D = 200, 2, 64
LIMIT = bound("int8_int8, means, sequence")


@pytest.fixture(
    params=[False, True] if HAS_RAYLIGHT else [False], ids=["stand-in", "raylight"][: 1 + HAS_RAYLIGHT]
)
def slot(request, monkeypatch, raylight_stand_in):
    """Raylight's module of inner attentions."""
    if request.param:
        return importlib.import_module(SLOT)
    return raylight_stand_in.add_slot(partial(monkeypatch.setitem, sys.modules))


def exact(q, k, v, scale=None):
    return exact_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale)[0].transpose(1, 2).to(q.dtype)


class XFuserAttention:
    """xFuser's attention after the exchange: [B, L, H, D], and its ring over two shards if asked."""

    def __init__(self, slot, group=None):
        self.dense_calls, self.group = 0, group
        self.ring_attn_fn = self.dense
        self.dispatcher = slot.InnerAttentionDispatcher(self)

    def dense(self, q, k, v, softmax_scale=None, attn_type="dense", attn_processor=None, **rest):
        if attn_type is not None:
            self.dense_calls += 1
            return exact(q, k, v, softmax_scale)
        out, lse = None, None
        for k_part, v_part in zip(k.chunk(2, 1), v.chunk(2, 1), strict=True):
            part, part_lse = attn_processor(q, k_part, v_part, softmax_scale=softmax_scale, causal=False)
            part_lse = part_lse.transpose(1, 2)[..., None]
            if out is None:
                out, lse = part, part_lse
                continue
            whole = torch.logaddexp(lse, part_lse)
            out, lse = out * (lse - whole).exp() + part * (part_lse - whole).exp(), whole
        return out

    def __call__(self, q, k, v, options, passes_options=True, **kwargs):
        options = options if passes_options else {}
        with self.dispatcher.scope(options.get(INNER), options):
            return self.ring_attn_fn(q, k, v, group=self.group, **kwargs)


@pytest.fixture
def attention(slot):
    return XFuserAttention(slot)


@pytest.fixture
def qkv():
    return [x.transpose(1, 2) for x in sample_qkv("clustered", (1, HEADS, TOKENS, D))]


@pytest.fixture
def sample(attention, qkv):
    """sample(model): two steps of a model with two blocks, each one self-attention; the outputs."""

    def sample(model, steps=2, **kwargs):
        def forward(options):
            return [attention(*qkv, {**options, "block_index": i}, **kwargs) for i in range(2)]

        sigmas = [1 - i / steps for i in range(steps + 1)]
        return [out for step in model.sample(sigmas, forward, conditions=(((0,), 40),)) for out in step]

    return sample


def report_of(model):
    return model.model_options["transformer_options"][OVERRIDE].finished[-1]


def test_calls_of_the_slot_run_on_our_kernel(make_model, sample, attention, qkv):
    model = patch_worker(make_model(), {**WIDGETS, "grouping_window": 0.5})
    outs = sample(model)
    assert all(0 < relative_l2(out, exact(*qkv)) < LIMIT for out in outs)
    assert attention.dense_calls == 0
    report = report_of(model)
    assert (report.received, report.taken, report.groupings_made) == (4, 4, 2)


def test_without_a_patch_raylight_runs_as_before(make_model, sample, attention, qkv):
    assert all(out.equal(exact(*qkv)) for out in sample(make_model()))
    assert attention.dense_calls == 4


def test_running_the_node_again_replaces_the_patch(slot, make_model):
    once = patch_worker(make_model(), WIDGETS)
    thrice = patch_worker(patch_worker(once, WIDGETS), WIDGETS)
    inner = thrice.model_options["transformer_options"][INNER]
    assert inner.previous is None
    assert inner.override is thrice.model_options["transformer_options"][OVERRIDE]
    assert inner.override._vc_previous is None


def test_off_removes_it_and_brings_back_what_was_there(slot, make_model):
    def other(dense, q, k, v, *, transformer_options, **kwargs):
        return dense(q, k, v, **kwargs)

    model = slot.set_inner_attention(make_model(), other)
    patched = patch_worker(model, WIDGETS)
    assert patched.model_options["transformer_options"][INNER].previous is other
    clean = patch_worker(patched, {"precision": "off"})
    assert clean.model_options["transformer_options"] == {INNER: other}
    clean = patch_worker(patch_worker(make_model(), WIDGETS), {"precision": "off"})
    assert clean.model_options["transformer_options"] == {}


def test_declined_calls_go_to_the_inner_attention_before_ours(slot, make_model, sample, attention, qkv):
    seen = []

    def other(dense, q, k, v, *, transformer_options, **kwargs):
        seen.append(transformer_options["block_index"])
        return dense(q, k, v, **kwargs)

    model = slot.set_inner_attention(make_model(), other)
    outs = sample(patch_worker(model, {**WIDGETS, "exact_blocks": "1"}))
    assert seen == [1, 1]
    assert attention.dense_calls == 2
    assert outs[1].equal(exact(*qkv))


def test_cross_attention_is_left_alone(make_model, attention, qkv):
    q, k, v = qkv
    model = patch_worker(make_model(), WIDGETS)

    def forward(options):
        return attention(q, k[:, :40], v[:, :40], {**options, "block_index": 0})

    (out,) = model.sample([1.0, 0.0], forward)
    assert out.equal(exact(q, k[:, :40], v[:, :40]))
    assert report_of(model).declined == {"cross-attention": 1}


@pytest.mark.parametrize("asked", [{"causal": True}, {"joint_tensor_key": 1}])
def test_what_we_do_not_compute_goes_to_dense(make_model, sample, attention, asked):
    model = patch_worker(make_model(), WIDGETS)
    sample(model, **asked)
    assert attention.dense_calls == 4
    assert report_of(model).declined == {"causal or joint attention of Raylight": 4}


def test_softmax_scale_is_followed(make_model, sample, qkv):
    out = sample(patch_worker(make_model(), WIDGETS), softmax_scale=0.02)[0]
    assert 0 < relative_l2(out, exact(*qkv, 0.02)) < LIMIT


def test_a_failing_kernel_is_replaced_by_dense(make_model, sample, attention, monkeypatch, qkv):
    model = patch_worker(make_model(), WIDGETS)

    def fail(prepared):
        raise RuntimeError("no image for this card")

    monkeypatch.setattr("comfyui_vc_attention.nodes.model_patch.attend_call", fail)
    assert all(out.equal(exact(*qkv)) for out in sample(model))
    assert attention.dense_calls == 4
    assert "reference" in report_of(model).failures


@pytest.fixture
def in_a_ring(attention, monkeypatch):
    """Raylight's ring of two."""
    attention.group = "ring"
    monkeypatch.setattr(raylight_worker, "ring_size", {None: 1, "ring": 2}.get)


def test_ring_merges_our_shards(in_a_ring, make_model, sample, attention, qkv):
    model = patch_worker(make_model(), {**WIDGETS, "grouping_window": 1.0}, ring_degree=2)
    outs = sample(model)
    assert all(0 < relative_l2(out, exact(*qkv)) < LIMIT for out in outs)
    assert attention.dense_calls == 0
    report = report_of(model)
    assert (report.taken, report.groupings_made) == (4, 0)
    assert all("in a ring" in name for name in report.kernels)


def test_ring_leaves_declined_calls_to_dense(in_a_ring, make_model, sample, attention, qkv):
    model = patch_worker(make_model(), {**WIDGETS, "exact_blocks": "0"}, ring_degree=2)
    assert sample(model)[0].equal(exact(*qkv))
    assert attention.dense_calls == 2


def test_failing_shard_is_replaced_by_the_engines_own(in_a_ring, make_model, sample, monkeypatch, qkv):
    def exact_shard(q, k, v, softmax_scale=None, **rest):
        out, lse = exact_attention(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale)
        return out.transpose(1, 2).float(), lse.float()

    kernels = types.ModuleType("yunchang.kernels")
    kernels.select_flash_attn_impl = lambda attn_type, stage, attn_processor: exact_shard
    monkeypatch.setitem(sys.modules, "yunchang", types.ModuleType("yunchang"))
    monkeypatch.setitem(sys.modules, "yunchang.kernels", kernels)
    model = patch_worker(make_model(), WIDGETS, ring_degree=2)

    def fail(prepared):
        raise RuntimeError("no image for this card")

    monkeypatch.setattr(raylight_worker, "attend_call", fail)
    assert relative_l2(sample(model)[0], exact(*qkv)) < 1e-5
    assert "reference" in report_of(model).failures


@pytest.mark.parametrize("ring", [False, True])
def test_kernels_are_built_inside_the_patch(make_model, slot, monkeypatch, ring):
    built = []
    monkeypatch.setattr(raylight_worker, "vc_attention", lambda *a, **options: built.append((a[3], options)))
    patch_worker(make_model(), WIDGETS, ring_degree=1 + ring)
    (window, grouped), (after, ungrouped) = built
    assert window.demean and after == plain(window)
    assert (grouped["grouping"] is None) == ring  # in a ring nothing is grouped
    assert ungrouped["grouping"] is None
    assert {options["kernel"] for _, options in built} == {"reference"}
    assert all(options["return_lse"] is ring for _, options in built)


def test_every_number_of_clusters_is_built_inside_the_patch(make_model, slot, monkeypatch):
    """Short clips get fewer clusters, for which Triton builds other kernels."""
    made, group_tokens = [], raylight_worker.group_tokens

    def recorded(v, clusters, previous=None):
        made.append((clusters, previous is not None))
        return group_tokens(v, clusters, previous)

    monkeypatch.setattr(raylight_worker, "group_tokens", recorded)
    patch_worker(make_model(), {**WIDGETS, "clusters": 64, "min_tokens": 4096})
    assert made == [(count, warm) for count in (64, 32, 16) for warm in (False, True)]


def test_a_kernel_that_does_not_start(make_model, slot, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no image for this card")

    monkeypatch.setattr(raylight_worker, "vc_attention", fail)
    with pytest.raises(RuntimeError, match="no image for this card"):
        patch_worker(make_model(), WIDGETS)  # a kernel asked for by name


def test_a_kernel_that_cannot_run_raises_before_sampling(make_model, slot):
    with pytest.raises(ValueError, match="VC-Attention cannot run here"):
        patch_worker(make_model(), {"kernel": "triton_int8_fp8"})
    with pytest.raises(ValueError, match="holds no model"):
        patch_worker(None, WIDGETS)


def test_without_raylights_slot_the_ordinary_patch_stays(make_model, monkeypatch):
    for name in ("raylight.distributed_modules", SLOT):
        monkeypatch.setitem(sys.modules, name, None)
    model = patch_worker(make_model(), WIDGETS)
    assert list(model.model_options["transformer_options"]) == [OVERRIDE]
    assert "has no slot for attention" in describe_patch(model, ULYSSES)
    assert describe_patch(model, CFG) == "Wan: reference"


def test_says_what_a_worker_will_do(make_model, slot):
    wan = patch_worker(make_model(), WIDGETS)
    assert describe_patch(wan, CFG) == "Wan: reference"
    assert "does not pass attention options for Wan" in describe_patch(wan, ULYSSES)
    assert "CFG degree 2" in describe_patch(wan, ULYSSES)
    h3 = patch_worker(make_model("comfy.ldm.minimax.model", "MiniMaxH3Model"), WIDGETS)
    assert describe_patch(h3, ULYSSES) == "MiniMax-H3: reference after Raylight's exchange"
    other = patch_worker(make_model("comfy.ldm.flux.model", "Flux"), WIDGETS)
    assert describe_patch(other, ULYSSES) == "not active: Flux is not a model this node knows"
    assert describe_run(other, ULYSSES) == "0 calls, because Flux is not a model this node knows"
    assert describe_patch(make_model(), ULYSSES) == "not patched"


def test_says_why_there_were_no_calls(make_model, slot, sample, attention):
    model = patch_worker(make_model(), WIDGETS)
    assert describe_run(model, ULYSSES) == "0 calls, because it has not sampled since the patch"
    sample(model, passes_options=False)  # as Raylight's Wan forward does
    assert "0 calls, because Raylight does not pass attention options for Wan" in describe_run(model, ULYSSES)
    assert attention.dense_calls == 4
    assert "carries no patch" in describe_run(make_model(), ULYSSES)


def test_says_what_ran(make_model, sample):
    model = patch_worker(make_model(), WIDGETS)
    sample(model)
    assert describe_run(model, ULYSSES) == report_of(model).summary()
    assert isinstance(model.model_options["transformer_options"][INNER], InnerAttention)
