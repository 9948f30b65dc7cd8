"""Every kernel writes where it is told, and holds no more of a call than it needs: one table of kernels.

Bytes are counted on a CPU: the host side of each kernel runs as it is, its launches do nothing.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from comfyui_vc_attention.kernels import KERNELS, TokenGrouping, VCConfig, attend_call, dispatch, prepare_call
from comfyui_vc_attention.kernels.attend import cuda_int8_fp8_sm90, cuda_mma
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.operands import Box, new_output
from comfyui_vc_attention.kernels.prepare import cuda_sm90
from comfyui_vc_attention.kernels.registry import kernel_named
from comfyui_vc_attention.kernels.testing import sample_qkv
from comfyui_vc_attention.nodes.head_groups import attend_by_heads
from torch.utils._python_dispatch import TorchDispatchMode

from .every_kernel import DEVICE, every_kernel, skip_unless_it_runs_here

SHAPE, KEYS = (2, 3, 70, 128), 200


@pytest.fixture
def it_runs_here(name):
    skip_unless_it_runs_here(name)


def stages_of(name):
    return kernel_named(name).load()


def prepared(name, numerics, seed=0):
    q, k, v = sample_qkv("clustered", SHAPE, KEYS, torch.bfloat16, DEVICE, seed)
    return stages_of(name).prepare(q, k, v, Recipe(numerics), softmax_scale=0.1, want_lse=True)


@every_kernel
@pytest.mark.usefixtures("it_runs_here")
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


@every_kernel
@pytest.mark.usefixtures("it_runs_here")
def test_boxes_give_the_same_operands_and_are_empty(name, numerics):
    prepare, attend = stages_of(name)
    qkv = sample_qkv("clustered", SHAPE, KEYS, torch.bfloat16, DEVICE)
    boxes = [Box(tensor) for tensor in qkv]
    out, _ = attend(prepare(*boxes, Recipe(numerics), softmax_scale=0.1))
    assert torch.equal(out, attend(prepare(*qkv, Recipe(numerics), softmax_scale=0.1))[0])
    for box in boxes:
        with pytest.raises(RuntimeError, match="was taken"):
            box.peek()


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that are alive, and the most that there were; those of others do not count."""

    def __init__(self, *others):
        super().__init__()
        self.alive, self.peak = {other.untyped_storage().data_ptr(): 0 for other in others}, 0

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.alive and storage.nbytes():
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)
            self.peak = max(self.peak, sum(self.alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result


class NoLaunch:
    """A CUDA module or a Triton kernel that launches nothing."""

    def launch(self, *args, **options):
        pass

    def __getitem__(self, grid):
        return self.launch


@pytest.fixture
def only_host_code(monkeypatch):
    """GPU kernels choose themselves on a CPU, allocate as ever, and launch nothing."""
    for module in (cuda_sm90, cuda_int8_fp8_sm90, cuda_mma):
        monkeypatch.setattr(module, "load_module", lambda *args: NoLaunch())
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    if triton_is_here():
        from comfyui_vc_attention.kernels.attend import triton_int8_fp8, triton_int8_int8
        from comfyui_vc_attention.kernels.prepare import triton_qk, triton_values

        for module in (triton_qk, triton_values, triton_int8_fp8, triton_int8_int8):
            for name in vars(module):
                if name.endswith("_kernel"):
                    monkeypatch.setattr(module, name, NoLaunch())

    def chosen(problem, name):
        spec = kernel_named(name)
        recipe = Recipe(spec.numerics[0], demean=problem.config.demean)
        return SimpleNamespace(kernel=spec, recipe=recipe, reason="")

    monkeypatch.setattr(dispatch, "choose_kernel", chosen)


def triton_is_here():
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


HEADS, TOKENS = 40, 4096  # what the small tensors weigh per token does not depend on the length
UNIT = HEADS * TOKENS * 128 * 2  # bytes of q
# 4 bits keep the centred keys in 16 (N2), 1.0 of these units more: they are under no limit here
GPU_KERNELS = [spec.name for spec in KERNELS if spec.name != "reference" and "nvfp4" not in spec.numerics]
every_gpu_kernel = pytest.mark.parametrize("name", GPU_KERNELS)


def separate():
    """q, k, v as most models make them: [B, L, H, D] in memory, each its own."""
    return [torch.zeros(1, TOKENS, HEADS, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]


def fused():
    """q, k, v as views of one product, as newer MiniMax-H3 code has them."""
    return list(torch.zeros(1, TOKENS, 3, HEADS, 128, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4))


def peak(call, make, name):
    """Peak in units of q's bytes, without the kept order. PyTorch's attention needs 4: q, k, v and out."""
    if name.startswith("triton") and not triton_is_here():
        pytest.skip("needs Triton")
    order = torch.arange(TOKENS, dtype=torch.int32).repeat(1, HEADS, 1)
    with LiveBytes(order) as live:
        qkv = make()
        call(qkv, {"grouping": TokenGrouping(order, None), "kernel": name})
    return live.peak / UNIT


def boxes_of(qkv):
    boxes = [Box(tensor) for tensor in qkv]
    qkv.clear()
    return boxes


@every_gpu_kernel
def test_l08_in_boxes_a_call_needs_less_than_pytorch(only_host_code, name):
    def call(qkv, options):
        attend_call(prepare_call(*boxes_of(qkv), VCConfig(), **options))

    assert 3.5 <= peak(call, separate, name) < 3.6


@every_gpu_kernel
def test_tensors_that_the_caller_keeps_cost_six_tenths(only_host_code, name):
    def call(qkv, options):
        attend_call(prepare_call(*qkv, VCConfig(), **options))

    assert peak(call, separate, name) < 4 + 0.6 * 3


@every_gpu_kernel
@pytest.mark.parametrize("make", [separate, fused])
def test_eight_head_groups_cost_a_twentieth(only_host_code, name, make):
    def call(qkv, options):
        attend_by_heads(*qkv, VCConfig(), 8, **options)

    assert peak(call, make, name) < 4 * 1.05
