"""Our Wan transformer: its parts, and that ComfyUI's gives the same output on the same weights."""

import json
import subprocess

import pytest
import torch
from safetensors.torch import save_file
from sample_model.model import WanVideoModel, initialise, load_model, rope_angles, turn_pairs
from torch.nn.functional import scaled_dot_product_attention

COMFYUI_SCRIPT = """
import json, logging, sys
comfyui, weights, inputs, output = sys.argv[1:]
sys.path.insert(0, comfyui)
sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
import comfy.options
comfy.options.enable_args_parsing()
import comfy.samplers, comfy.sd, torch
from safetensors.torch import load_file, save_file
patcher = comfy.sd.load_diffusion_model(weights)
given = load_file(inputs)
with torch.inference_mode():
    velocity = patcher.model.diffusion_model.float()(given["x"], given["timestep"], given["context"])
sigmas = comfy.samplers.calculate_sigmas(patcher.model.model_sampling, "simple", 10)
save_file({"velocity": velocity.contiguous(), "sigmas": sigmas}, output)
config = patcher.model.model_config.unet_config
print(json.dumps({"class": type(patcher.model).__name__, "config": config["model_type"]}))
"""


@pytest.fixture
def checkpoint(tmp_path):
    """A file whose every weight is random, so that each one matters to the output."""
    generator = torch.Generator().manual_seed(0)
    weights = initialise(WanVideoModel(layers=2)).state_dict()
    weights = {k: w + 0.05 * torch.randn(w.shape, generator=generator) for k, w in weights.items()}
    save_file({k: w.bfloat16() for k, w in weights.items()}, str(tmp_path / "model.safetensors"))
    return tmp_path / "model.safetensors"


def sample_inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 3, 12, 16, generator=generator)
    return {
        "x": x,
        "timestep": torch.tensor([700.0, 31.5]),
        "context": torch.randn(2, 8, 4096, generator=generator),
    }


@pytest.mark.comfyui
def test_same_output_as_comfyui(checkpoint, tmp_path, comfyui_path, comfyui_python):
    from safetensors.torch import load_file
    from sample_model.sample import shifted_sigmas

    given, output = sample_inputs(), tmp_path / "output.safetensors"
    save_file(given, str(tmp_path / "inputs.safetensors"))
    command = [
        comfyui_python,
        "-c",
        COMFYUI_SCRIPT,
        comfyui_path,
        checkpoint,
        tmp_path / "inputs.safetensors",
        output,
    ]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"class": "WAN21", "config": "t2v"}
    theirs, ours = load_file(str(output)), load_model(checkpoint)(**given)
    assert (ours - theirs["velocity"]).norm() / ours.norm() < 1e-5
    torch.testing.assert_close(shifted_sigmas(10), theirs["sigmas"], atol=1e-6, rtol=0.0)


def test_self_attention_can_be_replaced(checkpoint):
    model, given, seen = load_model(checkpoint), sample_inputs(), []

    def watched(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return scaled_dot_product_attention(q, k, v)

    with torch.inference_mode():
        replaced, plain = model(**given, attention=watched), model(**given)
    assert seen == [((2, 2, 3 * 6 * 8, 128),) * 3] * 2
    assert replaced.equal(plain)


def test_rope_turns_by_distance_alone():
    cos, sin = rope_angles((4, 3, 5), "cpu")
    assert cos.shape == sin.shape == (60, 64)
    x = torch.randn(1, 1, 1, 128, generator=torch.Generator().manual_seed(2)).expand(1, 1, 60, 128)
    turned = turn_pairs(x, cos, sin).view(4, 3, 5, 128)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1).view(4, 3, 5))
    near, far = (turned[0, 0, 0] @ turned[1, 1, 2], turned[2, 1, 2] @ turned[3, 2, 4])
    torch.testing.assert_close(near, far, atol=1e-3, rtol=1e-4)


def test_initial_weights_follow_from_the_seed():
    first, again = (initialise(WanVideoModel(layers=1), 5).state_dict() for _ in range(2))
    assert all(first[name].equal(again[name]) for name in first)
