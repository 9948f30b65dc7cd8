"""diffusers' attention dispatch in one process; the two-process tests are in test_sharded.py."""

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.kernels.parallel.diffusers import attention_backend
from comfyui_vc_attention.kernels.parallel.sharded import ShardedAttention
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import bound

dispatch = pytest.importorskip("diffusers.models.attention_dispatch")


@pytest.fixture
def sharded():
    return ShardedAttention(VCConfig(clusters=4), kernel="reference")


def heads_last(tensors):
    return [x.transpose(1, 2).contiguous() for x in tensors]


def test_one_process_runs_it_too(sharded):
    qkv = sample_qkv(shape=(1, 2, 160, 64))
    with attention_backend(sharded) as declined:
        out = dispatch.dispatch_attention_fn(*heads_last(qkv))
    error = relative_l2(out.transpose(1, 2), exact_attention(*qkv)[0])
    assert 0 < error < bound("int8_int8, means, sequence")
    assert (sharded.calls, dict(declined)) == (1, {})


def test_other_calls_go_to_the_backend_that_was_active(sharded):
    q, k, v = heads_last(sample_qkv(shape=(1, 2, 32, 64), keys=12))
    square = heads_last(sample_qkv(shape=(1, 2, 32, 64)))
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
    exact = dispatch.dispatch_attention_fn(q, k, v), dispatch.dispatch_attention_fn(*square, attn_mask=mask)
    with attention_backend(sharded) as declined:
        assert dispatch.dispatch_attention_fn(q, k, v).equal(exact[0])
        assert dispatch.dispatch_attention_fn(*square, attn_mask=mask).equal(exact[1])
        dispatch.dispatch_attention_fn(*square, is_causal=True)
    assert dict(declined) == {"cross-attention": 1, "masked": 1, "causal": 1}
    assert sharded.calls == 0


def test_what_was_active_comes_back(sharded):
    before = dispatch._AttentionBackendRegistry.get_active_backend()
    with pytest.raises(RuntimeError), attention_backend(sharded):
        raise RuntimeError
    assert dispatch._AttentionBackendRegistry.get_active_backend() == before


def test_not_twice_at_once(sharded):
    with attention_backend(sharded), pytest.raises(ValueError, match="active attention backend already"):
        attention_backend(sharded).__enter__()


def test_no_name_is_added_to_diffusers_own_enum(sharded):
    names = set(dispatch.AttentionBackendName)
    with attention_backend(sharded):
        assert set(dispatch.AttentionBackendName) == names
