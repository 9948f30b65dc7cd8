"""The Raylight nodes: with fake actors, and with two real Ray actors where Ray is installed."""

import importlib.util
import sys
import textwrap
import types
from concurrent.futures import Future

import pytest
from comfy_api.latest import io
from comfyui_vc_attention.nodes import raylight_node, raylight_worker
from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch
from comfyui_vc_attention.nodes.raylight_node import (
    VCAttentionPatchRaylight,
    VCAttentionReportRaylight,
    describe_function,
    patch_function,
)

WIDGETS = {"precision": "8-bit", "kernel": "reference", "min_tokens": 1}


class Method:
    """An actor's method: .remote() gives a reference at once."""

    def __init__(self, function):
        self.function = function

    def remote(self, *args):
        future = Future()
        try:
            future.set_result(self.function(*args))
        except Exception as error:
            future.set_exception(error)
        return types.SimpleNamespace(future=lambda: future)


class Worker:
    """As much of Raylight's worker as a model node uses."""

    def __init__(self, model, **degrees):
        self.model = model
        self.get_parallel_dict = Method(lambda: {"ulysses_degree": 1, "ring_degree": 1, **degrees})
        self.model_function_runner = Method(self.run)
        self.model_function_runner_get_values = Method(lambda function: function(self.model))

    def run(self, function):
        self.model = function(self.model)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The pack is loaded here already, under the name that ComfyUI gives it."""
    name = raylight_node.PACK.replace(".", "_x_") + ".nodes.raylight_worker"
    monkeypatch.setitem(sys.modules, name, raylight_worker)
    monkeypatch.setitem(sys.modules, "nodes", types.ModuleType("nodes"))
    if not hasattr(io, "Custom"):
        monkeypatch.setattr(io, "Custom", lambda name: io.Model, raising=False)


def actors(make_model, **degrees):
    return {"workers": [Worker(make_model(), **degrees) for _ in range(2)]}


def said(caplog):
    return "\n".join(record.getMessage() for record in caplog.records)


def test_patches_every_worker_and_passes_the_actors_on(make_model, caplog):
    caplog.set_level("INFO", "vc_attention")
    ray_actors = actors(make_model)
    assert VCAttentionPatchRaylight.execute(ray_actors, **WIDGETS).args == (ray_actors,)
    for worker in ray_actors["workers"]:
        assert raylight_worker.our_override(worker.model).settings.kernel == "reference"
    assert "rank 0: Wan: reference\nrank 1: Wan: reference" in said(caplog)


def test_says_that_ulysses_does_not_reach_wan(make_model, caplog):
    caplog.set_level("INFO", "vc_attention")
    VCAttentionPatchRaylight.execute(actors(make_model, ulysses_degree=2), **WIDGETS)
    assert "rank 1: Wan: " in said(caplog)
    assert "CFG degree 2" in said(caplog)


def test_three_runs_leave_one_patch_and_off_removes_it(make_model):
    ray_actors = actors(make_model)
    for _ in range(3):
        VCAttentionPatchRaylight.execute(ray_actors, **WIDGETS)
    model = ray_actors["workers"][1].model
    assert raylight_worker.our_override(model)._vc_previous is None
    assert all(len(functions["vc_attention"]) == 1 for functions in model.wrappers.values())
    VCAttentionPatchRaylight.execute(ray_actors, precision="off")
    assert ray_actors["workers"][1].model.model_options["transformer_options"] == {}


def test_an_error_in_a_worker_ends_the_node(make_model):
    with pytest.raises(ValueError, match="VC-Attention cannot run here"):
        VCAttentionPatchRaylight.execute(actors(make_model), kernel="triton_int8_fp8")


def test_report_has_a_line_for_every_rank(make_model):
    ray_actors = actors(make_model)
    VCAttentionPatchRaylight.execute(ray_actors, **WIDGETS)
    passed, text = VCAttentionReportRaylight.execute(ray_actors).args
    assert passed is ray_actors
    assert text.splitlines() == [
        f"rank {rank}: 0 calls, because it has not sampled since the patch" for rank in (0, 1)
    ]


def test_report_before_the_patch_says_so(make_model, monkeypatch):
    monkeypatch.setattr(raylight_node, "PACK", "/somewhere/else")
    _, text = VCAttentionReportRaylight.execute(actors(make_model)).args
    assert text.startswith("rank 0: 0 calls, because VC-Attention is not loaded in this worker")


def test_report_is_never_cached():
    assert VCAttentionReportRaylight.fingerprint_inputs() != VCAttentionReportRaylight.fingerprint_inputs()


def test_same_widgets_in_the_same_order_as_the_main_node():
    names = [widget.id for widget in VCAttentionPatchRaylight.define_schema().inputs]
    main = [widget.id for widget in VCAttentionPatch.define_schema().inputs]
    assert names[0] == "ray_actors"
    assert names[1:] == [name for name in main if name not in ("model", "model_2")]


def test_what_crosses_to_a_worker_carries_plain_values_only():
    for function in (patch_function("/pack", {}, 1), describe_function("/pack", "describe_run", {})):
        held = [cell.cell_contents for cell in function.__closure__]
        assert all(isinstance(value, (str, int, dict)) for value in held)
        # a name from this pack would be pickled as a reference to a module that a worker cannot import
        assert not set(function.__code__.co_names) & set(vars(raylight_node))


def test_a_pack_that_does_not_load_is_said(monkeypatch):
    async def load_custom_node(path):
        return False

    sys.modules["nodes"].load_custom_node = load_custom_node
    with pytest.raises(RuntimeError, match="could not load /somewhere/else"):
        patch_function("/somewhere/else", {}, 1)(None)


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


@pytest.fixture
def two_ray_actors(tmp_path, pack_root, monkeypatch):
    """Two real Ray actors on this machine's CPU, with stand-ins for ComfyUI and a fake model each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or it writes a token into the home folder
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)  # Ray puts the working folder on the actors' path: ComfyUI's, in real life
    (tmp_path / "nodes.py").write_text(textwrap.dedent(WORKER_SIDE))
    conftest = str(pack_root / "tests" / "nodes" / "conftest.py")
    environment = {"PYTHONPATH": str(tmp_path), "RAY_DEDUP_LOGS": "0"}
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": environment},
    )  # fmt: skip

    class RayWorker:
        def __init__(self):
            spec = importlib.util.spec_from_file_location("stand_ins", conftest)
            stand_ins = importlib.util.module_from_spec(spec)
            sys.modules["stand_ins"] = stand_ins
            spec.loader.exec_module(stand_ins)
            self.model = stand_ins.FakeModel()

        def get_parallel_dict(self):
            return {"ulysses_degree": 1, "ring_degree": 1, "cfg_degree": 2}

        def model_function_runner(self, function):
            self.model = function(self.model)

        def model_function_runner_get_values(self, function):
            return function(self.model)

    try:
        yield {"workers": [ray.remote(num_cpus=1)(RayWorker).remote() for _ in range(2)]}
    finally:
        ray.shutdown()


def test_crosses_to_real_ray_actors(two_ray_actors, caplog):
    caplog.set_level("INFO", "vc_attention")
    VCAttentionPatchRaylight.execute(two_ray_actors, **WIDGETS)
    assert "rank 0: Wan: reference\nrank 1: Wan: reference" in said(caplog)
    _, text = VCAttentionReportRaylight.execute(two_ray_actors).args
    assert text.count("0 calls, because it has not sampled since the patch") == 2
    with pytest.raises(ValueError, match="VC-Attention cannot run here"):
        VCAttentionPatchRaylight.execute(two_ray_actors, kernel="triton_int8_fp8")
