"""The sample nodes: their contract here, and one short run in a real ComfyUI."""

import json
import subprocess
import sys
import types

import pytest
import torch
from comfyui_vc_attention.nodes import sample_nodes
from comfyui_vc_attention.nodes.sample_clip import PROMPTS, TEXT_DIM, TEXT_TOKENS, decode_latent
from comfyui_vc_attention.nodes.sample_nodes import VCAttentionSample, VCAttentionSampleDecode, enlarge_frames

COMFYUI_SCRIPT = """
import asyncio, importlib.util, json, sys
comfyui, pack = sys.argv[1:]
sys.path.insert(0, comfyui)
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
import comfy.options
comfy.options.enable_args_parsing()
import comfy.sample, torch
spec = importlib.util.spec_from_file_location("pack_by_path", pack + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules["pack_by_path"] = module
spec.loader.exec_module(module)
from pack_by_path.nodes.sample_nodes import VCAttentionSample, VCAttentionSampleDecode
model, positive, negative, latent = VCAttentionSample.execute("a blue cross").args
samples = latent["samples"][:, :, :2, :8, :8]
with torch.inference_mode():
    noise = comfy.sample.prepare_noise(samples, 0)
    schedule = (2, 2.0, "euler", "simple")
    sampled = comfy.sample.sample(model, noise, *schedule, positive, negative, samples, seed=0)
    image = VCAttentionSampleDecode.execute({"samples": sampled}, 2).args[0]
print(json.dumps({
    "class": type(model.model).__name__, "latent": list(latent["samples"].shape), "image": list(image.shape),
    "low": image.min().item(), "high": image.max().item(), "schema": VCAttentionSample.GET_SCHEMA().node_id,
}))
"""


class StandInForWan21:
    """ComfyUI's latent format, reduced to a scale."""

    def process_in(self, latent):
        return latent / 2.0


@pytest.fixture
def comfy(monkeypatch):
    """Stand-ins for the two ComfyUI modules that the nodes use when they execute."""
    modules = {name: types.ModuleType(name) for name in ("comfy", "comfy.sd", "comfy.latent_formats")}
    modules["comfy.sd"].load_diffusion_model = lambda path: ("model", path)
    modules["comfy.latent_formats"].Wan21 = StandInForWan21
    modules["comfy"].sd = modules["comfy.sd"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_schema_ids_are_fixed():
    sample, decode = VCAttentionSample.define_schema(), VCAttentionSampleDecode.define_schema()
    assert (sample.node_id, decode.node_id) == ("VCAttentionSample", "VCAttentionSampleDecode")
    assert [i.id for i in sample.inputs] == ["prompt"]
    assert [i.id for i in decode.inputs] == ["latent", "enlarge"]
    assert all(i.tooltip for i in [*sample.inputs, *decode.inputs])


def test_sample_gives_what_a_sampler_needs(comfy, monkeypatch, tmp_path):
    monkeypatch.setattr(sample_nodes, "WEIGHTS", tmp_path / "weights")
    (tmp_path / "weights").touch()
    model, positive, negative, latent = VCAttentionSample.execute(PROMPTS[3]).args
    assert model == ("model", str(tmp_path / "weights"))
    assert positive[0][0].shape == negative[0][0].shape == (1, TEXT_TOKENS, TEXT_DIM)
    assert positive[0][0].any()
    assert not negative[0][0].any()
    assert latent["samples"].shape == (1, 16, 10, 24, 24)
    assert not latent["samples"].any()


def test_a_missing_file_is_named(comfy, monkeypatch, tmp_path):
    monkeypatch.setattr(sample_nodes, "WEIGHTS", tmp_path / "gone.safetensors")
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors is missing"):
        VCAttentionSample.execute(PROMPTS[0])


def test_decode_undoes_wans_latent_scale(comfy):
    latent = torch.randn(2, 16, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    image = VCAttentionSampleDecode.execute({"samples": 2.0 * latent}, 1).args[0]
    assert image.equal(decode_latent(latent).flatten(0, 1))


def test_enlarged_frames_stay_in_range():
    frames = torch.randint(0, 2, (3, 4, 6, 3), generator=torch.Generator().manual_seed(0)).float()
    image = enlarge_frames(frames, 3)
    assert image.shape == (3, 12, 18, 3)
    assert image.is_contiguous()
    assert 0.0 <= image.min() <= image.max() <= 1.0


@pytest.mark.comfyui
def test_runs_in_comfyui(comfyui_path, comfyui_python, pack_root):
    command = [comfyui_python, "-c", COMFYUI_SCRIPT, str(comfyui_path), str(pack_root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["class"], found["schema"]) == ("WAN21", "VCAttentionSample")
    assert found["latent"] == [1, 16, 10, 24, 24]
    assert found["image"] == [2, 64, 64, 3]
    assert 0.0 <= found["low"] < found["high"] <= 1.0
