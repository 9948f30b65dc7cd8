"""The example workflows are what the builder writes from the recorded node definitions, and hold together."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def builder():
    sys.modules["graph"] = load("graph")  # build.py runs as a script, with its folder on the path
    yield load("build")
    del sys.modules["graph"]


@pytest.fixture(scope="module")
def shipped(builder, pack_root):
    """The workflows that the builder writes; others were made by hand."""
    names = [build.__name__ for build in builder.WORKFLOWS]
    return {name: json.loads((pack_root / "workflows" / f"{name}.json").read_text()) for name in names}


def test_shipped_files_are_what_the_builder_writes(builder, pack_root):
    info = builder.object_info()
    for build in builder.WORKFLOWS:
        text = (pack_root / "workflows" / f"{build.__name__}.json").read_text()
        assert text == builder.text_of(build(info)), f"run python tests/workflows/build.py ({build.__name__})"


def test_each_has_one_note_that_renders_in_both_renderers(shipped):
    for name, graph in shipped.items():
        notes = [node["widgets_values"][0] for node in graph["nodes"] if node["type"] == "MarkdownNote"]
        assert len(notes) == 1 and notes[0].startswith("## "), name
        # inline code is unreadable on the note's colour in the Vue renderer of frontend 1.49
        assert "`" not in notes[0], name


def test_required_sockets_are_connected(builder, shipped):
    info = builder.object_info()
    for name, graph in shipped.items():
        for node in graph["nodes"]:
            connected = {slot["name"] for slot in node["inputs"] if slot.get("link") is not None}
            for required, spec in info.get(node["type"], {"input": {}})["input"].get("required", {}).items():
                options = spec[1] if len(spec) > 1 else {}
                kind = "COMBO" if isinstance(spec[0], list) else spec[0]
                if not load("graph").is_widget(kind, options):
                    assert required in connected, f"{name}: {node['type']}.{required}"


def test_nodes_do_not_overlap(shipped):
    for name, graph in shipped.items():
        boxes = [
            (n["pos"][0], n["pos"][1] - 30, *n["size"], n.get("title", n["type"])) for n in graph["nodes"]
        ]
        for i, (x, y, w, h, one) in enumerate(boxes):
            for left, top, width, height, other in boxes[i + 1 :]:
                apart = x + w <= left or left + width <= x or y + h + 30 <= top or top + height + 30 <= y
                assert apart, f"{name}: {one} and {other}"


def test_models_are_offered_over_https_into_a_models_folder(shipped):
    folders = {"diffusion_models", "text_encoders", "vae", "loras", "clip_vision"}
    for graph in shipped.values():
        for node in graph["nodes"]:
            for model in node["properties"].get("models", []):
                assert model["url"].startswith("https://huggingface.co/") and model["directory"] in folders
                assert model["url"].endswith("/" + model["name"]) and model["name"] in node["widgets_values"]


def test_the_recorded_pack_nodes_are_todays(builder):
    """A changed schema needs tests/workflows/record_object_info.py run again."""
    recorded = builder.object_info()
    if "comfy_api" not in sys.modules:
        path = HERE.parent / "nodes" / "conftest.py"
        spec = importlib.util.spec_from_file_location("node_stand_ins", path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    from comfyui_vc_attention.nodes.extension import NODES

    for schema in (node.define_schema() for node in NODES):
        if schema.node_id not in recorded:
            continue  # in no workflow of the builder
        named = {name for group in recorded[schema.node_id]["input"].values() for name in group}
        assert {entry.id for entry in schema.inputs} == named, schema.node_id
