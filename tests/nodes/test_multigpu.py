"""ComfyUI's MultiGPU CFG Split: one thread per device inside an evaluation, one override for all of them.

Two threads with faked devices: what is kept under one device is never used, counted or freed for another.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens
from comfyui_vc_attention.kernels.testing import relative_l2
from comfyui_vc_attention.nodes import model_patch
from comfyui_vc_attention.nodes.families import family_of
from comfyui_vc_attention.nodes.model_patch import patch_attention
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.run_state import Forward, GroupingStore
from comfyui_vc_attention.nodes.sampling_hooks import OVERRIDE

from tests.evidence.bounds import bound

DEVICES = ("cuda:0", "cuda:1")
BLOCKS, CLUSTERS, HEADS = 3, 4, 2


@pytest.fixture(autouse=True)
def faked_device(monkeypatch):
    """Tensors stay on the CPU; the state believes that each thread has the device of its name."""
    original = Forward.layer_key

    def layer_key(self, layer, device, *rest):
        return original(self, layer, torch.device(threading.current_thread().name), *rest)

    monkeypatch.setattr(Forward, "layer_key", layer_key)


@pytest.fixture
def grouped_with(monkeypatch):
    """What group_tokens was given: (device, first value of v, whether it was warm-started)."""
    seen, lock = [], threading.Lock()

    def recorded(v, clusters, previous=None, key_mask=None):
        with lock:
            seen.append((threading.current_thread().name, float(v[0, 0, 0, 0]), previous is not None))
        return group_tokens(v, clusters, previous, key_mask)

    monkeypatch.setattr(model_patch, "group_tokens", recorded)
    return seen


class Split:
    """The split as ComfyUI does it: per device its conditions, its options, its own call of the model."""

    def __init__(self, model):
        self.model, self.outputs = model, {}
        self.qkv = {which: self.tensors(seed=which) for which in (0, 1)}

    @staticmethod
    def tensors(seed, tokens=96):
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(1, tokens, HEADS * 128, generator=generator) for _ in range(3))

    def sample(self, sigmas, assignments, fail=None):
        """assignments[step]: for each device the conditions it computes, or None."""
        step = iter(range(len(assignments)))

        def evaluate(options):
            number = next(step)
            barrier = threading.Barrier(len(DEVICES), timeout=60)
            errors = []

            def work(device, which):
                try:
                    barrier.wait()
                    self.call_model(options, device, which, number, fail)
                except Exception as error:
                    errors.append(error)

            threads = [
                threading.Thread(target=work, name=device, args=(device, which))
                for device, which in zip(DEVICES, assignments[number], strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return SimpleNamespace(run=options["vc_attention_run"], errors=errors)

        return self.model.sample(sigmas, evaluate, conditions=(((0, 1), 40),))

    def call_model(self, options, device, which, step, fail):
        if which is None:
            return
        mine = {**options, "cond_or_uncond": [which], "uuids": [options["uuids"][which]]}
        mine["multigpu_thread_device"] = device
        mine["vc_attention_forward"] = Forward(options["vc_attention_run"])
        for block in range(BLOCKS):
            if fail == (device, step, block):
                raise RuntimeError("this card ran out of luck")
            out = mine[OVERRIDE](
                not_reached, *self.qkv[which], heads=HEADS,
                transformer_options={**mine, "block_index": block, "block_type": "double"},
            )  # fmt: skip
            self.outputs[device, step, block] = out


def not_reached(*args, **kwargs):
    raise AssertionError("the call was declined")


@pytest.fixture
def split(make_model):
    model = make_model()
    settings = PatchSettings(VCConfig(clusters=CLUSTERS), "reference", grouping_window=1.0, min_tokens=1)
    return Split(patch_attention(model, settings, family_of(model.model.diffusion_model)))


def exact(q, k, v):
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_each_device_groups_its_own_values_and_reuses_its_own_order(split, grouped_with):
    results = split.sample([1.0, 0.9, 0.8, 0.0], [(0, 1)] * 3)
    assert not any(result.errors for result in results)
    expected = {(device, float(split.qkv[which][2][0, 0, 0]), False) for which, device in enumerate(DEVICES)}
    assert set(grouped_with) == expected
    assert len(grouped_with) == BLOCKS * len(DEVICES)
    for (device, _, _), out in split.outputs.items():
        error = relative_l2(out, exact(*split.qkv[DEVICES.index(device)]))
        assert error < bound("int8_int8, means, sequence")
    assert results[-1].run.report.taken == 3 * BLOCKS * 2


def test_a_condition_that_moves_to_another_device_is_grouped_there(split, grouped_with):
    """ComfyUI hands out conditions anew in every evaluation."""
    split.sample([1.0, 0.9, 0.8, 0.0], [(0, 1), (1, 0), (1, 0)])
    assert len(grouped_with) == 2 * BLOCKS * len(DEVICES)
    assert not any(warm for _, _, warm in grouped_with)  # never from the other device's centroids


def test_one_condition_on_both_devices_keeps_two_orders(split, grouped_with):
    """Areas and hooks can put one condition on two devices at once."""
    split.sample([1.0, 0.9, 0.0], [(0, 0)] * 2)
    assert sorted(device for device, _, _ in grouped_with) == sorted(DEVICES * BLOCKS)


def test_results_are_those_of_one_device(split):
    split.sample([1.0, 0.9, 0.0], [(0, 1)] * 2)
    together = dict(split.outputs)
    for which, device in enumerate(DEVICES):
        split.outputs.clear()
        alone = tuple(which if other == device else None for other in DEVICES)
        split.sample([1.0, 0.9, 0.0], [alone] * 2)
        assert split.outputs
        assert all(out.equal(together[key]) for key, out in split.outputs.items())


def test_an_error_on_one_device_leaves_the_other_alone(split):
    results = split.sample([1.0, 0.9, 0.0], [(0, 1)] * 2, fail=("cuda:1", 0, 1))
    assert [str(error) for error in results[0].errors] == ["this card ran out of luck"]
    assert not results[1].errors
    assert {key for key in split.outputs if key[0] == "cuda:0"} == {
        ("cuda:0", step, block) for step in (0, 1) for block in range(BLOCKS)
    }
    assert results[-1].run.report.taken == len(split.outputs) == 2 * BLOCKS * 2 - 2


def test_nothing_is_kept_after_the_run(split):
    run = split.sample([1.0, 0.9, 0.0], [(0, 1)] * 2)[-1].run
    assert len(run.store) == 0


def test_one_device_can_be_freed_alone():
    store = GroupingStore()
    for device in ("cpu", "meta"):
        v = torch.empty(1, 2, 8, 16, device=device)
        kept = SimpleNamespace(order=v[..., 0].int(), centroids=v)
        store.grouping((device, "layer"), ["cond"], v, lambda *a, kept=kept: kept, 0, 4)
    store.clear(torch.device("meta"))
    assert len(store) == 1
    store.clear()
    assert len(store) == 0


def test_many_threads_lose_no_count_and_no_order():
    """Sixteen threads on one store: every layer is grouped once per device."""
    store, made, lock = GroupingStore(), [], threading.Lock()
    v = torch.zeros(1, 1, 8, 16)

    def work(device):
        for step in range(4):
            for layer in range(8):
                kept = SimpleNamespace(order=v[..., 0].int(), centroids=v)
                _, count = store.grouping((device, layer), ["cond"], v, lambda *a, kept=kept: kept, step, 4)
                with lock:
                    made.append(count)
            store.drop_unused(step, 4)

    threads = [threading.Thread(target=work, args=(device,)) for device in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(made) == len(store) == 16 * 8
