import pytest
import torch
from comfyui_vc_attention.kernels.benchmark_peers import PEERS
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_refuses_with_a_reason_or_is_close(peer):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = sample_qkv(shape=(1, 2, 256, 128), dtype=torch.bfloat16, device=device)
    refusal = peer.why_not(q)
    if refusal is not None:
        assert refusal
        return
    assert relative_l2(peer.attend(q, k, v), exact_attention(q, k, v)[0]) < 0.06


def test_pytorch_always_runs():
    assert PEERS[0].why_not(torch.zeros(1, 1, 1, 1)) is None
