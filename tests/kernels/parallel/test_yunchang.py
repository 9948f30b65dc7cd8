"""The yunchang slot, with stand-in process groups; test_sharded.py has two processes with the real one."""

import sys
import types

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, vc_attention
from comfyui_vc_attention.kernels.parallel.sharded import ShardedAttention
from comfyui_vc_attention.kernels.parallel.yunchang import attention_processor
from comfyui_vc_attention.kernels.testing import sample_qkv


@pytest.fixture
def processor(monkeypatch):
    """The function that LongContextAttention would call, in a process group of one."""
    groups = types.ModuleType("yunchang.globals")
    groups.PROCESS_GROUP = types.SimpleNamespace(RING_PG="ring")
    monkeypatch.setitem(sys.modules, "yunchang", types.ModuleType("yunchang"))
    monkeypatch.setitem(sys.modules, "yunchang.globals", groups)
    monkeypatch.setattr(torch.distributed, "get_world_size", {"ring": 1}.get)
    return attention_processor(ShardedAttention(VCConfig(clusters=4), kernel="reference"))


def test_takes_and_gives_heads_last(processor):
    qkv = sample_qkv(shape=(1, 2, 40, 64))
    out, lse = processor(*(x.transpose(1, 2) for x in qkv), softmax_scale=0.1)
    expected = vc_attention(*qkv, VCConfig(clusters=4), scale=0.1, kernel="reference", return_lse=True)
    assert out.transpose(1, 2).equal(expected[0])
    assert out.is_contiguous()
    assert lse.equal(expected[1])


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"causal": True}, "causal mask"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"window_size": (64, 64)}, "window"),
        ({"softcap": 30.0}, "softcap"),
        ({"alibi_slopes": 1}, "alibi"),
    ],
)
def test_refuses_what_it_cannot_do(processor, asked, named):
    qkv = (x.transpose(1, 2) for x in sample_qkv(shape=(1, 2, 8, 16)))
    with pytest.raises(ValueError, match=f"in yunchang has no {named}"):
        processor(*qkv, **asked)
