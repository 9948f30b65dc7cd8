"""The types between the stages are frozen and hold no floating-point q, k or v."""

import dataclasses

import pytest
import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.operands import (
    AttentionProblem,
    TokenGrouping,
    VCOperands,
    card_fields,
    heads_in_a_row,
    new_output,
    new_results,
)
from comfyui_vc_attention.kernels.prepare.reference import prepare
from comfyui_vc_attention.kernels.testing import sample_qkv


@pytest.mark.parametrize("kind", [AttentionProblem, TokenGrouping, VCOperands])
def test_frozen(kind):
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen


def test_a_problem_before_there_are_tensors_is_the_one_that_they_pose():
    q, k, v = sample_qkv(shape=(1, 2, 30, 128), dtype=torch.float16)
    expected = AttentionProblem.self_attention(30, torch.float16, heads=2, device_type="cpu")
    assert AttentionProblem.of(q, k, v) == expected


def test_an_amd_gpu_that_torch_calls_cuda_is_no_nvidia_card(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (11, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.version, "hip", None)
    assert card_fields(card) == {"device_type": "cuda", "capability": (11, 0), "device_name": "a card"}
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert card_fields(card) == {"device_type": "rocm"}


@pytest.mark.parametrize("numerics", ["int8_int8", "int8_fp8", "fp8_fp8", "nvfp4"])
def test_operands_hold_no_float_inputs(numerics):
    q, k, v = sample_qkv(shape=(1, 2, 300, 64), dtype=torch.bfloat16)
    operands = prepare(q, k, v, Recipe(numerics), softmax_scale=0.125)
    wide = [
        field.name
        for field in dataclasses.fields(operands)
        if isinstance(value := getattr(operands, field.name), torch.Tensor)
        and value.element_size() > 1
        and value.numel() >= q.numel()
    ]
    assert wide == []


@pytest.mark.parametrize("want_lse", [True, False])
def test_results_are_new_unless_given(want_lse):
    q, k, v = sample_qkv(shape=(1, 2, 5, 64), dtype=torch.bfloat16)
    operands = prepare(q, k, v, Recipe("int8_int8"), softmax_scale=0.125, want_lse=want_lse)
    out, lse = new_results(q.shape, operands)
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and out.transpose(1, 2).is_contiguous()
    assert new_results(q.shape, operands, q)[0] is q
    assert (lse.dtype, lse.shape) == (torch.float32, (1, 2, 5)) if want_lse else lse is None


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 1, 1, 16), (1, 3, 1, 16), (1, 3, 5, 16), (2, 3, 5, 16)])
def test_heads_in_a_row_of_an_output(shape):
    batch, heads, queries, width = shape
    assert heads_in_a_row(new_output(shape, torch.float32, torch.device("cpu"))) == heads
    whole = new_output((batch, heads + 4, queries, width), torch.float32, torch.device("cpu"))
    row = heads_in_a_row(whole[:, 2 : 2 + heads])
    assert row == (heads + 4 if batch * queries > 1 else heads)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(2, 3, 5, 16),
        torch.empty(2, 5, 3, 32).transpose(1, 2)[..., ::2],
        torch.empty(2, 5, 6, 16).transpose(1, 2)[:, ::2],
        torch.empty(2, 10, 3, 16).transpose(1, 2)[:, :, :5],
    ],
    ids=["heads first", "channels apart", "heads apart", "rows missing"],
)
def test_other_layouts_of_an_output_are_refused(out):
    with pytest.raises(ValueError, match="out must be some heads of memory"):
        heads_in_a_row(out)
