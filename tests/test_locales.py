"""The Chinese names and tooltips cover every node, and name nothing that does not exist."""

import asyncio
import importlib.util
import json
import re
import sys

import pytest


@pytest.fixture(scope="module")
def schemas(pack_root):
    if "comfy_api" not in sys.modules:  # outside ComfyUI: the stand-in that the node tests use
        path = pack_root / "tests" / "nodes" / "conftest.py"
        spec = importlib.util.spec_from_file_location("node_stand_ins", path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    from comfyui_vc_attention.nodes.extension import VCAttentionExtension

    nodes = asyncio.run(VCAttentionExtension().get_node_list())
    return {schema.node_id: schema for schema in (node.define_schema() for node in nodes)}


@pytest.fixture(scope="module", params=["zh"])
def locale(request, pack_root):
    """A locale's node definitions and settings."""
    folder = pack_root / "locales" / request.param
    return {
        name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("nodeDefs", "settings")
    }


def test_nodes_inputs_and_outputs_are_all_named(locale, schemas):
    translated = locale["nodeDefs"]
    assert set(translated) == set(schemas)
    for node_id, schema in schemas.items():
        entry = translated[node_id]
        assert set(entry["inputs"]) == {given.id for given in schema.inputs}, node_id
        assert set(entry["outputs"]) == {str(slot) for slot in range(len(schema.outputs))}, node_id
        assert entry["display_name"] and entry["description"]
        assert all(given["name"] and given["tooltip"] for given in entry["inputs"].values()), node_id


def test_every_input_has_a_tooltip_in_english(schemas):
    for node_id, schema in schemas.items():
        missing = [given.id for given in schema.inputs if not getattr(given, "tooltip", "")]
        assert not missing, node_id
        assert schema.description, node_id


def test_settings_are_those_of_the_script(locale, pack_root):
    (setting,) = re.findall(r'SETTING = "([^"]+)"', (pack_root / "web" / "vc_attention.js").read_text())
    assert set(locale["settings"]) == {setting.replace(".", "_")}


def test_every_help_page_exists_in_chinese_and_names_the_inputs(schemas, pack_root):
    for node_id, schema in schemas.items():
        text = (pack_root / "web" / "docs" / node_id / "zh.md").read_text("utf-8")
        widgets = [g.id for g in schema.inputs if hasattr(g, "default") or hasattr(g, "options")]
        assert not [name for name in widgets if f"`{name}`" not in text], node_id
