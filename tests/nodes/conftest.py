"""Stand-ins for the few ComfyUI names that nodes/ imports, where no ComfyUI is on the path."""

import importlib.util
import sys
import types
from types import SimpleNamespace

import pytest


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


def io_type(name):
    made = {part: type(part, (Recorded,), {"io_type": name}) for part in ("Input", "Output")}
    return SimpleNamespace(**made)


def stand_in_for_comfy_api():
    io = SimpleNamespace(
        **{name: io_type(name) for name in ("Model", "Combo", "Float", "Int", "String", "Conditioning", "Latent")},
        Image=io_type("Image"),
        ComfyNode=type("ComfyNode", (), {"hidden": None}),
        Schema=Recorded,
        NodeOutput=NodeOutput,
        Hidden=SimpleNamespace(unique_id="unique_id"),
    )
    latest = types.ModuleType("comfy_api.latest")
    latest.io = io
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
