import sys
import types

import pytest
import torch
from comfyui_vc_attention.kernels.benchmark import Shape, count_of_functions
from comfyui_vc_attention.nodes import benchmark_node
from comfyui_vc_attention.nodes.benchmark_node import VCAttentionBenchmark
from comfyui_vc_attention.nodes.captures import write


class Interrupted(Exception):
    """What ComfyUI raises when the user cancels."""


@pytest.fixture
def comfy(monkeypatch):
    """The names of ComfyUI that the node asks for, on a CPU; .interrupt cancels at the next question."""
    state = types.SimpleNamespace(steps=0, interrupt=False, unloaded=0)

    class ProgressBar:
        def __init__(self, total):
            state.total = total

        def update(self, value):
            state.steps += value

    def throw():
        if state.interrupt:
            raise Interrupted

    management = types.ModuleType("comfy.model_management")
    management.get_torch_device = lambda: torch.device("cpu")
    management.unload_all_models = lambda: setattr(state, "unloaded", state.unloaded + 1)
    management.soft_empty_cache = lambda: None
    management.throw_exception_if_processing_interrupted = throw
    utils = types.ModuleType("comfy.utils")
    utils.ProgressBar = ProgressBar
    package = sys.modules.get("comfy") or types.ModuleType("comfy")
    monkeypatch.setattr(package, "model_management", management, raising=False)
    for name, module in (("comfy", package), ("comfy.model_management", management), ("comfy.utils", utils)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(benchmark_node, "fitting", lambda shape, device: Shape("small", 1, 256))
    return state


def test_measures_everything_with_progress(comfy):
    image, text = VCAttentionBenchmark.execute("small test", seconds=0.0).args
    assert comfy.steps == comfy.total == count_of_functions() and comfy.unloaded == 1
    assert image.ndim == 4 and "reference (int8_int8)" in text and "PyTorch" in text


def test_cancels_between_two_functions(comfy):
    comfy.interrupt = True
    with pytest.raises(Interrupted):
        VCAttentionBenchmark.execute("small test", seconds=0.0)
    assert comfy.steps == 1


def test_measures_a_capture(comfy, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_node, "output_folder", lambda: tmp_path)
    tensors = {f"step1.block2.call0.{part}": torch.randn(1, 2, 200, 64) for part in "qkv"}
    name = write(tmp_path, "x", tensors, {}).name
    text = VCAttentionBenchmark.execute("small test", seconds=0.0, capture=name).args[1]
    assert "captured step1.block2.call0: 2 heads of 64, 200 tokens" in text


def test_a_missing_capture_is_said_before_anything_is_unloaded(comfy, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_node, "output_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match="no capture of this name"):
        VCAttentionBenchmark.execute("small test", capture="x.safetensors")
    assert comfy.unloaded == 0
