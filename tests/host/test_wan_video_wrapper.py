"""The patch on the real network of WanVideoWrapper: its own model files, random weights, this file's loop.

Needs WANVIDEOWRAPPER_PATH, a checkout of ComfyUI-WanVideoWrapper. Packages that its model files merely import
are stood in for: accelerate, diffusers, peft, gguf, cv2 and what else is missing. Its sampler node is not
run: the loop here makes the calls that it makes.
"""

import copy
import importlib
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

WRAPPER = os.environ.get("WANVIDEOWRAPPER_PATH")
pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.skipif(
        not WRAPPER, reason="set WANVIDEOWRAPPER_PATH to a checkout of ComfyUI-WanVideoWrapper"
    ),
]
PACKAGE = "wan_video_wrapper_under_test"


class Anything(type):
    """A class that has whatever attribute is asked for."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class MissingPackage(types.ModuleType):
    __path__ = ()
    __getattr__ = Anything.__getattr__


@pytest.fixture(scope="module")
def network_class():
    """The wrapper's WanModel, imported from its folder without running its __init__.py."""
    before = dict(sys.modules)
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(Path(WRAPPER).expanduser())]
    sys.modules[PACKAGE] = package
    while True:
        try:
            yield importlib.import_module(f"{PACKAGE}.wanvideo.modules.model").WanModel
            break
        except ModuleNotFoundError as missing:
            if missing.name.startswith(PACKAGE):
                raise
            for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
                del sys.modules[name]
            sys.modules[missing.name] = MissingPackage(missing.name)
    for name in set(sys.modules) - set(before):
        if name.startswith(PACKAGE) or isinstance(sys.modules[name], MissingPackage):
            del sys.modules[name]


def build(network_class, width, heads, longcat=False, blocks=1):
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    with torch.device("meta"):
        network = network_class(
            dim=width, in_features=width, out_features=width, ffn_dim=64, ffn2_dim=64, text_dim=16,
            text_len=8, num_heads=heads, num_layers=blocks, main_device=cpu, offload_device=cpu,
            dtype=torch.float32, is_longcat=longcat,
        )  # fmt: skip
    for block in network.blocks:  # made one wide, and right once the loader puts a checkpoint's weights in
        for name in ("k", "v"):
            setattr(block.cross_attn, name, torch.nn.Linear(width, width, device="meta"))
    network = network.to_empty(device="cpu").eval().requires_grad_(False)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        tensor.fill_(1.0) if "norm" in name and tensor.ndim == 1 else tensor.normal_(std=0.02)
    settle(network, network_class, width // heads)
    return network


def settle(network, network_class, head_dim):
    """What the loader sets, and what lies on the meta device because it is neither parameter nor buffer."""
    module = sys.modules[network_class.__module__]
    split = [head_dim - 4 * (head_dim // 6), 2 * (head_dim // 6), 2 * (head_dim // 6)]
    network.rope_embedder = module.EmbedND_RifleX(head_dim, 10000.0, split, 3, 0)
    network.blocks_to_swap, network.prefetch_blocks, network.lora_scheduling_enabled = 0, 0, False


class Patcher:
    """As much of the ModelPatcher as a WANVIDEOMODEL needs."""

    def __init__(self, network):
        self.model = SimpleNamespace(diffusion_model=network)
        self.model_options = {"transformer_options": {"merge_loras": False}}

    def clone(self):
        other = Patcher(self.model.diffusion_model)
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        return other


def sample(patcher, steps, cfg=True, frames=4, side=8, **arguments):
    """The calls that the wrapper's sampler makes of the network."""
    network = patcher.model.diffusion_model
    options = copy.deepcopy(patcher.model_options["transformer_options"])
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(16, frames, side, side, generator=generator)
    text = torch.randn(8, 16, generator=generator)
    outputs = []
    for step in range(steps):
        timestep = torch.tensor([1000.0 * (1 - step / steps)])
        if network.is_longcat:
            timestep = timestep[:, None].repeat(1, frames)
            timestep[:, : arguments.get("longcat_num_cond_latents", 0)] = 0
        for uncond in (False, True)[: 1 + cfg]:
            prediction, _, _ = network(
                context=[text * (1 - 2 * uncond)], pred_id=None, vace_data=None, attn_cond=None, x=[latent],
                y=None, clip_fea=None, seq_len=frames * (side // 2) ** 2, device=torch.device("cpu"),
                freqs=None, t=timestep, is_uncond=uncond, current_step=step,
                current_step_percentage=step / steps, last_step=step == steps - 1,
                transformer_options=options, **arguments,
            )  # fmt: skip
            outputs.append(prediction[0])
        latent = latent - 0.1 * outputs[-1]
    return outputs


def patched(network, **settings):
    from comfyui_vc_attention.kernels import VCConfig
    from comfyui_vc_attention.nodes.patch_settings import PatchSettings
    from comfyui_vc_attention.nodes.wan_video_patch import HANDLE, is_wan_video, patch_wan_video

    assert is_wan_video(network)
    config = VCConfig("8-bit", clusters=4)
    model = patch_wan_video(Patcher(network), PatchSettings(config, "reference", min_tokens=1, **settings))
    return model, model.model_options["transformer_options"][HANDLE].override.finished


def apart(exact, ours):
    return [float((one - other).norm() / one.norm()) for one, other in zip(exact, ours, strict=True)]


def test_wan_in_the_wrapper_takes_its_self_attention(network_class):
    network = build(network_class, width=256, heads=2, blocks=2)
    exact = sample(Patcher(network), steps=4)
    model, finished = patched(network)
    ours = sample(model, steps=4)
    (report,) = finished
    assert (report.received, report.taken, report.grouped_steps, report.steps) == (16, 16, {0}, 4)
    assert all(0 < error < 0.02 for error in apart(exact, ours))
    assert all(torch.equal(a, b) for a, b in zip(exact, sample(Patcher(network), steps=4), strict=True))


def test_the_report_node_takes_a_model_of_the_wrapper_and_tells_its_run(network_class):
    from comfy_execution.validation import validate_node_input
    from comfyui_vc_attention.nodes.report_node import VCAttentionReport, reports_of
    from comfyui_vc_attention.nodes.report_text import report_text

    socket = VCAttentionReport.define_schema().inputs[0].get_io_type()
    assert all(validate_node_input(kind, socket) for kind in ("MODEL", "WANVIDEOMODEL"))
    assert not validate_node_input("RAY_ACTORS", socket)
    model, finished = patched(build(network_class, width=256, heads=2, blocks=2))
    assert reports_of(model) == []
    sample(model, steps=4)
    assert reports_of(model.clone()) == list(finished)
    text = report_text(finished)
    assert "Wan (WanVideoWrapper), 4 steps" in text and "16 of 16 video attention calls taken" in text


@pytest.mark.parametrize(("condition_frames", "calls"), [(0, 1), (1, 2)])
def test_longcat_in_the_wrapper_takes_squares_and_rectangles(longcat, condition_frames, calls):
    arguments = {"longcat_num_cond_latents": condition_frames}
    exact = sample(Patcher(longcat), steps=1, cfg=False, **arguments)
    model, finished = patched(longcat)
    ours = sample(model, steps=1, cfg=False, **arguments)
    (report,) = finished
    assert report.model_name == "LongCat-Video (WanVideoWrapper)"
    assert (report.received, report.taken, report.groupings_made) == (calls, calls, calls)
    assert all(0 < error < 0.02 for error in apart(exact, ours))


@pytest.fixture(scope="module")
def longcat(network_class):
    """One block at its real width, which is how the wrapper knows it."""
    return build(network_class, width=4096, heads=32, longcat=True)
