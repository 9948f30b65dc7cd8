"""Stand-ins for the few ComfyUI names that nodes/ imports, where no ComfyUI is on the path."""

import importlib.util
import json
import sys
import types
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


class Recorded:
    """An io object that remembers what it was made with."""

    def __init__(self, *args, **kwargs):
        self.args = args
        self.__dict__.update(kwargs)

    @property
    def id(self):
        return self.args[0]


class NodeOutput(Recorded):
    """What execute returns."""


class PreviewImage(Recorded):
    """A picture shown on a node; the real one saves it in the temporary folder."""

    def as_dict(self):
        return {"images": self.args}


def io_type(name):
    made = {part: type(part, (Recorded,), {"io_type": name}) for part in ("Input", "Output")}
    return SimpleNamespace(**made)


def stand_in_for_comfy_api():
    sockets = ("Model", "Conditioning", "Latent", "Image", "AnyType")
    widgets = ("Combo", "Float", "Int", "String", "Boolean")
    io = SimpleNamespace(
        **{name: io_type(name) for name in (*sockets, *widgets)},
        Custom=io_type,
        MultiType=SimpleNamespace(Input=type("Input", (Recorded,), {"io_type": "multiple"})),
        ComfyNode=type("ComfyNode", (), {"hidden": None}),
        Schema=Recorded,
        NodeOutput=NodeOutput,
        Hidden=SimpleNamespace(unique_id="unique_id"),
    )
    latest = types.ModuleType("comfy_api.latest")
    latest.io = io
    latest.ui = SimpleNamespace(PreviewImage=PreviewImage)
    latest.ComfyExtension = type("ComfyExtension", (), {})
    package = types.ModuleType("comfy_api")
    package.latest = latest
    sys.modules.update({"comfy_api": package, "comfy_api.latest": latest})


def stand_in_for_patcher_extension():
    extension = types.ModuleType("comfy.patcher_extension")
    extension.WrappersMP = SimpleNamespace(
        OUTER_SAMPLE="outer_sample", PREDICT_NOISE="predict_noise", APPLY_MODEL="apply_model"
    )
    extension.CallbacksMP = SimpleNamespace(ON_CLEANUP="on_cleanup")
    package = sys.modules.setdefault("comfy", types.ModuleType("comfy"))
    package.patcher_extension = extension
    sys.modules["comfy.patcher_extension"] = extension


if importlib.util.find_spec("comfy_api") is None:
    stand_in_for_comfy_api()
    stand_in_for_patcher_extension()


class Executor:
    """ComfyUI's wrapper chain: each wrapper gets the rest of the chain as an executor."""

    def __init__(self, function, owner, wrappers):
        self.function = function
        self.class_obj = owner
        self.wrappers = wrappers

    def __call__(self, *args, **kwargs):
        if not self.wrappers:
            return self.function(*args, **kwargs)
        rest = Executor(self.function, self.class_obj, self.wrappers[1:])
        return self.wrappers[0](rest, *args, **kwargs)


class FakeModel:
    """As much of a ModelPatcher as a patch touches."""

    def __init__(self, module="comfy.ldm.wan.model", name="WanModel", shift=8.0):
        diffusion_model = type(name, (), {"__module__": module, "__qualname__": name})()
        self.model = SimpleNamespace(
            diffusion_model=diffusion_model, get_dtype_inference=lambda: torch.float32
        )
        self.load_device = torch.device("cpu")
        self.shift = shift
        self.model_options = {"transformer_options": {}}
        self.wrappers, self.callbacks, self.object_patches = {}, {}, {}

    def clone(self):
        other = FakeModel.__new__(FakeModel)
        other.__dict__.update(self.__dict__)
        other.model_options = copy_dicts(self.model_options)
        other.wrappers, other.callbacks = copy_dicts(self.wrappers), copy_dicts(self.callbacks)
        return other

    def add_wrapper_with_key(self, event, key, function):
        self.wrappers.setdefault(event, {}).setdefault(key, []).append(function)

    def get_wrappers(self, event, key):
        return self.wrappers.get(event, {}).get(key, [])

    def remove_wrappers_with_key(self, event, key):
        self.wrappers.get(event, {}).pop(key, None)

    def add_callback_with_key(self, event, key, function):
        self.callbacks.setdefault(event, {}).setdefault(key, []).append(function)

    def remove_callbacks_with_key(self, event, key):
        self.callbacks.get(event, {}).pop(key, None)

    def get_model_object(self, name):
        assert name == "model_sampling"
        return self

    def percent_to_sigma(self, percent):
        """Flow sampling with a shift, as Wan has it."""
        if percent <= 0 or percent >= 1:
            return float(percent <= 0)
        return self.shift * (1 - percent) / (1 + (self.shift - 1) * (1 - percent))

    def all(self, table, event):
        return [function for functions in table.get(event, {}).values() for function in functions]

    def sample(self, sigmas, forward, conditions=(((1, 0), 40),), evaluations=None):
        """What ComfyUI does around forward(options, conditions), once per entry of conditions and evaluation.

        conditions: (cond_or_uncond, text tokens) of each call of the model. evaluations: the sigmas of
        the sampler's calls, by default one per step.
        """
        guider = SimpleNamespace(model_patcher=self, model_options=copy_dicts(self.model_options))
        uuids = {which: uuid.uuid4() for which in (0, 1)}
        outputs = []

        def apply_model(x, t, c_concat, c_crossattn, control, transformer_options):
            outputs.append(forward(dict(transformer_options)))

        def predict_noise(x, timestep, model_options, seed):
            for which, text in conditions:
                options = {
                    **copy_dicts(model_options["transformer_options"]),
                    "cond_or_uncond": list(which),
                    "uuids": [uuids[one] for one in which],
                    "sigmas": timestep,
                    "sample_sigmas": torch.tensor(sigmas),
                }
                context = torch.zeros(len(which), text, 8)
                wrappers = self.all(self.wrappers, "apply_model")
                Executor(apply_model, self.model, wrappers)(x, timestep, None, context, None, options)

        def outer_sample(noise, latent, sampler, sigma_tensor, *rest, **kwargs):
            try:
                for sigma in evaluations if evaluations is not None else sigmas[:-1]:
                    wrappers = self.all(self.wrappers, "predict_noise")
                    execute = Executor(predict_noise, guider, wrappers)
                    execute(noise, torch.tensor([sigma]), guider.model_options, 0)
            finally:
                for callback in self.all(self.callbacks, "on_cleanup"):
                    callback(self)

        execute = Executor(outer_sample, guider, self.all(self.wrappers, "outer_sample"))
        execute(torch.zeros(1), None, None, torch.tensor(sigmas), None, None, True, 0, latent_shapes=[])
        return outputs


def copy_dicts(value):
    """As ComfyUI copies model options: into dicts and lists, no further."""
    if isinstance(value, dict):
        return {key: copy_dicts(item) for key, item in value.items()}
    return [copy_dicts(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
def make_model():
    """make_model(module, name, shift): a fake ModelPatcher."""
    return FakeModel


@pytest.fixture(scope="session")
def recorded():
    """What real ComfyUI does: attention calls per family, and where samplers evaluate."""
    path = Path(__file__).resolve().parents[1] / "data" / "attention_calls.json"
    return json.loads(path.read_text())


@pytest.fixture
def simple_sigmas():
    """simple_sigmas(n, shift): ComfyUI's 'simple' schedule of n steps for a flow model."""
    return lambda n, shift=8.0: (
        [shift * (1 - i / n) / (1 + (shift - 1) * (1 - i / n)) for i in range(n)] + [0.0]
    )


@pytest.fixture
def make_report():
    """make_report(steps, blocks): the report of a finished run, as if block 0 was kept exact."""
    from comfyui_vc_attention.kernels import VCConfig
    from comfyui_vc_attention.nodes.patch_settings import PatchSettings
    from comfyui_vc_attention.nodes.run_report import RunReport

    def make(steps=20, blocks=30, kernel="triton_int8_fp8 int8_fp8"):
        report = RunReport("Wan", steps, PatchSettings(VCConfig(), exact_blocks=frozenset({0})))
        record, grouped_steps = report.record, max(1, steps // 4)
        for step in range(steps):
            for block in range(blocks):
                reason = "kept exact by exact_blocks"
                record.add(step, block, kernel if block else reason)
                if block:
                    report.add_taken(kernel, 32760, step if step < grouped_steps else None)
                else:
                    report.add_declined(reason, video=True)
                report.add_declined("cross-attention")
        record.milliseconds.update({kernel: 9000.0, "grouping": 800.0, "usual attention": 1500.0})
        record.timed_calls.update({kernel: steps * (blocks - 1), "grouping": 2, "usual attention": steps})
        record.errors = {(block, kernel, False): 0.01 + 0.001 * block for block in range(1, blocks)}
        record.energy = {(0, 1): (0.08, 0.36)}
        record.seconds = 42.0
        report.add_groupings(2 * blocks, 200 * 2**20)
        return report

    return make


@pytest.fixture
def finished_report(make_report):
    return make_report()


@pytest.fixture(scope="session")
def wan_video():
    """The stand-in for WanVideoWrapper: make_patcher() and sample()."""
    return load_beside("wan_video_stand_in")


@pytest.fixture(scope="session")
def raylight_stand_in():
    """The stand-in for Raylight's attention slot: add_slot()."""
    return load_beside("raylight_stand_in")


@pytest.fixture(scope="session")
def raylight_actor():
    """A Raylight worker for Ray: RayWorker."""
    return load_beside("raylight_actor")


def load_beside(name):
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
