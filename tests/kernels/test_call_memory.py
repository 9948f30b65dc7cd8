"""Every kernel writes where it is told, and holds no more of a call than it needs: one table of kernels."""

import pytest
import torch
from comfyui_vc_attention.kernels import KERNELS
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.operands import AttentionProblem, new_output
from comfyui_vc_attention.kernels.registry import kernel_named
from comfyui_vc_attention.kernels.testing import sample_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [(spec.name, numerics) for spec in KERNELS for numerics in spec.numerics]
every_kernel = pytest.mark.parametrize(("name", "numerics"), ROWS, ids=["-".join(row) for row in ROWS])
SHAPE, KEYS = (2, 3, 70, 128), 200


@pytest.fixture(autouse=True)
def it_runs_here(name, numerics):
    """Triton kernels run in the interpreter where there is no GPU, others need their card."""
    if name.startswith("triton"):
        pytest.importorskip("triton")
    if DEVICE == "cuda" or name.startswith("cuda"):
        device = torch.zeros(1, 1, 1, 128, device=DEVICE)
        why = kernel_named(name).why_not(AttentionProblem.of(device, device, device))
        if why:
            pytest.skip(why)


def stages_of(name):
    return kernel_named(name).load()


def prepared(name, numerics, seed=0):
    q, k, v = sample_qkv("clustered", SHAPE, KEYS, torch.bfloat16, DEVICE, seed)
    return stages_of(name).prepare(q, k, v, Recipe(numerics), softmax_scale=0.1, want_lse=True)


@every_kernel
@pytest.mark.parametrize("first", [0, 2])
def test_writes_some_heads_of_a_larger_output(name, numerics, first):
    operands, attend = prepared(name, numerics), stages_of(name).attend
    expected, expected_lse = attend(operands)
    whole = new_output((2, 7, 70, 128), torch.bfloat16, expected.device).fill_(7.0)
    out, lse = attend(operands, whole[:, first : first + 3])
    assert out.data_ptr() == whole[:, first].data_ptr()
    assert torch.equal(whole[:, first : first + 3], expected) and torch.equal(lse, expected_lse)
    rest = [head for head in range(7) if not first <= head < first + 3]
    assert (whole[:, rest] == 7.0).all()
