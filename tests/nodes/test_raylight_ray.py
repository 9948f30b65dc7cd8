"""The Raylight nodes with two real Ray actors on a CPU, and Raylight's slot, by its contract, between them.

The actors hold a stand-in for ComfyUI and exchange heads over gloo; Ray, what crosses to the actors and back,
and everything of the pack inside them are real.
"""

import os
import sys
import textwrap

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.dispatch import plain
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv
from comfyui_vc_attention.nodes import raylight_node
from comfyui_vc_attention.nodes.raylight_node import VCAttentionPatchRaylight, VCAttentionReportRaylight

from tests.evidence.bounds import bound

WIDGETS = {"precision": "8-bit", "kernel": "reference", "min_tokens": 1}
LIMIT = bound("int8_int8, means, sequence")


def said(caplog):
    return "\n".join(record.getMessage() for record in caplog.records)


# What a Raylight worker has of ComfyUI, for a real Ray actor: nodes.load_custom_node, and a model.
WORKER_SIDE = '''
import asyncio, importlib.util, os, sys

async def load_custom_node(path):
    """As ComfyUI does it: by path, under a name made of the path, then its entry point."""
    name = path.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(path, "__init__.py"))
    sys.modules[name] = pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    await pack.comfy_entrypoint()
    return True
'''


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A Ray of this machine's own, with two CPUs and a stand-in for ComfyUI's nodes.py on its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or it writes a token into the home folder
        ray = pytest.importorskip("ray", reason="needs Ray (pip install ray)")
        if " " in sys.executable:
            pytest.skip("Ray's workers do not start from a Python whose path has a space in it")
        comfyui = tmp_path_factory.mktemp("comfyui")
        (comfyui / "nodes.py").write_text(textwrap.dedent(WORKER_SIDE))
        patch.chdir(comfyui)  # Ray puts the working folder on the actors' path: ComfyUI's, in real life
        environment = {
            "PYTHONPATH": str(comfyui), "RAY_DEDUP_LOGS": "0", "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": environment},
        )  # fmt: skip
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def two_ray_actors(ray, raylight_actor, tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    tests = os.path.dirname(os.path.abspath(__file__))
    actor = ray.remote(num_cpus=1)(raylight_actor.RayWorker)
    workers = [actor.remote(tests, rank, store) for rank in range(2)]
    # a worker process that cannot start is started again for ever, and every call waits for it
    ray.get([worker.__ray_ready__.remote() for worker in workers], timeout=120)
    return {"workers": workers}


H3, WAN = ("comfy.ldm.minimax.model", "MiniMaxH3Model"), ("comfy.ldm.wan.model", "WanModel")


@pytest.fixture
def load(two_ray_actors):
    """load(model): Raylight's loader; the actors with that model."""

    def load(model):
        raylight_node.on_all(two_ray_actors["workers"], "load_unet", *model)
        return two_ray_actors

    return load


@pytest.fixture
def sample(two_ray_actors):
    """sample(q, k, v): both actors sample, each with half of the tokens; whole outputs, and dense calls."""

    def sample(*qkv):
        halves = zip(*(x.chunk(2, 1) for x in qkv), strict=True)
        workers = two_ray_actors["workers"]
        futures = [worker.sample.remote(*half).future() for worker, half in zip(workers, halves, strict=True)]
        outs, dense_calls = zip(*(future.result(timeout=120) for future in futures), strict=True)
        return [torch.cat(parts, 1) for parts in zip(*outs, strict=True)], dense_calls

    return sample


@pytest.fixture
def qkv():
    return [x.transpose(1, 2).contiguous() for x in sample_qkv("clustered", (1, 2, 700, 64))]


def test_slot_of_real_ray_actors_gives_what_one_process_gives(load, sample, qkv, caplog):
    caplog.set_level("INFO", "vc_attention")
    ray_actors = load(H3)
    VCAttentionPatchRaylight.execute(ray_actors, **WIDGETS, grouping_window=0.5, clusters=4)
    line = "MiniMax-H3: reference after Raylight's exchange"
    assert f"rank 0: {line}\nrank 1: {line}" in said(caplog)
    outs, dense_calls = sample(*qkv)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    config = VCConfig(clusters=4)
    first = vc_attention(q, k, v, config, grouping=group_tokens(v, 4), kernel="reference")
    later = vc_attention(q, k, v, plain(config), kernel="reference")
    assert dense_calls == (0, 0)
    for out, one in zip(outs, (first, first, later, later), strict=True):
        assert relative_l2(out.transpose(1, 2), one) < 1e-6
    _, text = VCAttentionReportRaylight.execute(ray_actors).args
    assert [line[:7] for line in text.splitlines()] == ["rank 0:", "rank 1:"]
    assert text.count("4 of 4") == 2


def test_real_ray_actors_under_a_forward_that_drops_the_options(load, caplog):
    caplog.set_level("INFO", "vc_attention")
    VCAttentionPatchRaylight.execute(load(WAN), **WIDGETS)
    assert "rank 1: Wan: Raylight does not pass attention options for Wan" in said(caplog)


def test_an_error_crosses_from_real_ray_actors(load):
    with pytest.raises(ValueError, match="VC-Attention cannot run here"):
        VCAttentionPatchRaylight.execute(load(H3), kernel="triton_int8_fp8")


def test_off_takes_the_patch_out_of_real_ray_actors(load, sample, qkv):
    ray_actors = load(H3)
    VCAttentionPatchRaylight.execute(ray_actors, **WIDGETS)
    VCAttentionPatchRaylight.execute(ray_actors, precision="off")
    assert sample(*qkv)[1] == (4, 4)


def test_a_kernel_that_fails_on_one_rank_does_not_stop_the_other(load, sample, qkv):
    """Last of these: the second actor's kernel stays broken."""
    ray_actors = load(H3)
    VCAttentionPatchRaylight.execute(ray_actors, **WIDGETS)
    raylight_node.on_all(ray_actors["workers"][1:], "break_kernel")
    outs, dense_calls = sample(*qkv)
    assert dense_calls == (0, 4)
    exact = exact_attention(*(x.transpose(1, 2) for x in qkv))[0].transpose(1, 2)
    for out in outs:
        assert 0 < relative_l2(out[:, :, :1], exact[:, :, :1]) < LIMIT  # heads of rank 0
        assert relative_l2(out[:, :, 1:], exact[:, :, 1:]) < 1e-5
    _, text = VCAttentionReportRaylight.execute(ray_actors).args
    assert "no image for this card" in text.splitlines()[1]
