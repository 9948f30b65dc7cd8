"""Others' functions: each runs and is close, or says why not. Fakes stand in for packages by version."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from comfyui_vc_attention.kernels.benchmark_peers import PEERS, pytorch
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

BY_NAME = {peer.name: peer for peer in PEERS}
FLASH4, SAGE1, SAGE2 = (BY_NAME[name] for name in ("FlashAttention-4", "SageAttention 1", "SageAttention 2"))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_refuses_with_a_reason_or_is_close(peer):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = sample_qkv(shape=(1, 2, 256, 128), dtype=torch.bfloat16, device=device)
    refusal = peer.why_not(q)
    if refusal is not None:
        assert refusal
        return
    before = k.clone()
    assert relative_l2(peer.attend(q, k, v), exact_attention(q, k, v)[0]) < 0.06
    assert k.equal(before)


def test_pytorch_always_runs():
    assert PEERS[0].why_not(torch.zeros(1, 1, 1, 1)) is None


def on_gpu(head_dim=128, dtype=torch.bfloat16):
    """What a why_not reads of a tensor on a GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda:0", shape=(1, 2, 256, head_dim))


@pytest.fixture
def install(monkeypatch):
    """install(name, function=...): that module can be imported and holds the functions."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def add(name, **functions):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return add


def first_version(q, k, v, tensor_layout, is_causal):
    k -= k.mean(2, keepdim=True)
    return pytorch(q, k, v)


def test_version_1_of_sage_is_kept_from_its_callers_k(install):
    install("sageattention", sageattn=first_version)
    q, k, v = sample_qkv(shape=(1, 1, 64, 128))
    before = k.clone()
    assert relative_l2(SAGE1.attend(q, k, v), pytorch(q, before, v)) < 1e-5
    assert k.equal(before)
    assert SAGE1.why_not(on_gpu()) is None
    assert SAGE1.why_not(on_gpu(80)) == "needs a head dimension of 64, 96 or 128, got 80"
    assert SAGE1.why_not(on_gpu(dtype=torch.float32)) == "needs a GPU and 16-bit tensors"
    assert SAGE2.why_not(on_gpu()) == "version 1 is installed"


def test_version_2_of_sage_has_both_kernels(install, monkeypatch):
    def says(name):
        return lambda q, k, v, tensor_layout, is_causal: name

    package = install(
        "sageattention",
        sageattn=says("its choice"),
        sageattn_qk_int8_pv_fp16_triton=says("Triton"),
        sageattn_qk_int8_pv_fp8_cuda=says("unused"),
    )
    package.core = install("sageattention.core", SM80_ENABLED=False, SM90_ENABLED=True)
    assert (SAGE1.attend(0, 0, 0), SAGE2.attend(0, 0, 0)) == ("Triton", "its choice")
    assert SAGE1.why_not(on_gpu()) is None and SAGE2.why_not(on_gpu()) is None
    assert SAGE2.why_not(on_gpu(256)) == "needs a head dimension of at most 128, got 256"
    for capability, reason in {
        (8, 0): "was built without its SM80 kernel",
        (8, 9): "was built without its SM89 kernel",
        (8, 6): "has no kernel of its own for this card",
        (10, 0): "has no kernel of its own for this card",
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert SAGE2.why_not(on_gpu()) == reason


@pytest.mark.parametrize("with_lse", [True, False])
def test_flash_attention_4_gets_tokens_before_heads(install, with_lse):
    def flash_attn_func(q, k, v):
        out = pytorch(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return (out, None) if with_lse else out

    install("flash_attn")
    install("flash_attn.cute", flash_attn_func=flash_attn_func)
    q, k, v = sample_qkv(shape=(1, 2, 64, 128))
    assert FLASH4.attend(q, k, v).equal(pytorch(q, k, v))
    assert FLASH4.why_not(on_gpu()) is None


def test_flash_attention_4_says_what_is_missing(install, monkeypatch):
    assert FLASH4.why_not(torch.zeros(1, 1, 1, 128)) == "needs a GPU and 16-bit tensors"
    assert "at most 128, got 256" in FLASH4.why_not(on_gpu(256))
    install("flash_attn")  # version 2 alone
    assert FLASH4.why_not(on_gpu()) == "not installed (the package flash-attn-4)"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert FLASH4.why_not(on_gpu()) == "has no kernel for this card"
