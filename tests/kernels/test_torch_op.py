"""Operators for torch.compile that do not drag the compiler into every process."""

import subprocess
import sys

import pytest
import torch
from comfyui_vc_attention.kernels.torch_op import NAMESPACE, define_op

WARM = """
import sys
sys.path.insert(0, {tests!r})
import conftest, torch
before = set(sys.modules)
from comfyui_vc_attention.kernels import group_tokens, vc_attention
q = torch.randn(1, 1, 130, 64)
vc_attention(q, q, q, grouping=group_tokens(q, 4), kernel="reference")
print(sorted((set(sys.modules) - before) & {{"torch._dynamo", "torch._inductor", "sympy"}}))
"""


def test_a_first_call_imports_no_compiler(pack_root):
    program = WARM.format(tests=str(pack_root / "tests"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def twice(x):
    return x * 2


def test_an_operator_is_one_node_with_a_fake():
    op = define_op("twice(Tensor x) -> Tensor", twice, torch.empty_like)
    assert torch.equal(op(torch.ones(3)), torch.full((3,), 2.0))
    torch.library.opcheck(getattr(torch.ops, NAMESPACE).twice.default, (torch.ones(3),))


def test_a_second_definition_takes_the_first():
    first = define_op("twice(Tensor x) -> Tensor", twice, torch.empty_like)
    assert define_op("twice(Tensor x) -> Tensor", lambda x: x, torch.empty_like) is first


def test_there_is_no_gradient():
    op = define_op("twice(Tensor x) -> Tensor", twice, torch.empty_like)
    out = op(torch.ones(3, requires_grad=True))
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.sum().backward()
