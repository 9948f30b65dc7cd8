"""The types between the stages are frozen and hold no floating-point q, k or v."""

import dataclasses

import pytest
import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.operands import AttentionProblem, TokenGrouping, VCOperands
from comfyui_vc_attention.kernels.prepare.reference import prepare
from comfyui_vc_attention.kernels.testing import sample_qkv


@pytest.mark.parametrize("kind", [AttentionProblem, TokenGrouping, VCOperands])
def test_frozen(kind):
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen


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
