"""The xDiT slot, with a stand-in for its table; test_sharded.py has two processes with the real one."""

import sys
import types

import pytest
from comfyui_vc_attention.kernels import VCConfig, vc_attention
from comfyui_vc_attention.kernels.parallel.sharded import ShardedAttention
from comfyui_vc_attention.kernels.parallel.xdit import register
from comfyui_vc_attention.kernels.testing import sample_qkv


@pytest.fixture
def table(monkeypatch):
    """xDiT's registry as its documentation has it: a decorator with a key, looked up by USP()."""
    functions, sizes = {}, {"ring": 1}
    package = types.ModuleType("xfuser.core.distributed")
    package.get_ring_parallel_world_size = lambda: sizes["ring"]
    module = types.ModuleType("xfuser.core.distributed.attention_backend")
    module.register_attention_function = lambda key: lambda function: functions.setdefault(key, function)
    for name in ("xfuser", "xfuser.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(functions=functions, sizes=sizes)


@pytest.fixture
def attend(table):
    return table.functions[register(ShardedAttention(VCConfig(clusters=4), kernel="reference"))]


def test_without_a_ring_there_is_no_log_sum_exp(attend):
    qkv = sample_qkv(shape=(1, 2, 40, 64))
    out, lse = attend(*qkv, dropout_p=0.0, is_causal=False)
    assert out.equal(vc_attention(*qkv, VCConfig(clusters=4), kernel="reference"))
    assert lse is None


def test_a_ring_gets_the_log_sum_exp(table, attend):
    table.sizes["ring"] = 2
    qkv = sample_qkv(shape=(1, 2, 40, 64))
    out, lse = attend(*qkv, dropout_p=0.0, is_causal=False)
    assert lse.shape == out.shape[:3]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"is_causal": True}, "causal mask"),
        ({"dropout_p": 0.5}, "dropout"),
        ({"attention_kwargs": {"attn_mask": 1}}, "attn mask"),
        ({"attention_kwargs": {"indices_k": 1}}, "indices k"),
    ],
)
def test_refuses_what_would_change_the_result(attend, asked, named):
    with pytest.raises(ValueError, match=f"in xDiT has no {named}"):
        attend(*sample_qkv(shape=(1, 2, 8, 16)), **asked)


def test_settings_of_other_backends_are_ignored(attend):
    qkv = sample_qkv(shape=(1, 2, 8, 16))
    assert attend(*qkv, attention_kwargs={"thw": (1, 2, 4), "attn_mask": None})[0].shape == qkv[0].shape
