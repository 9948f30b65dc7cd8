"""The Raylight nodes with fake actors; test_raylight_ray.py has real ones."""

import sys
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
