"""Every workflow uses nodes and inputs that exist, with values that those inputs take."""

import asyncio
import importlib.util
import json
import sys

import pytest

NOTES = {"Note", "MarkdownNote"}  # drawn by the page, unknown to the server


@pytest.fixture(scope="module")
def schemas(pack_root):
    """The pack's nodes by id, as they describe themselves."""
    if "comfy_api" not in sys.modules:  # outside ComfyUI: the stand-in that the node tests use
        path = pack_root / "tests" / "nodes" / "conftest.py"
        spec = importlib.util.spec_from_file_location("node_stand_ins", path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    from comfyui_vc_attention.nodes.extension import VCAttentionExtension

    nodes = asyncio.run(VCAttentionExtension().get_node_list())
    described = (node.define_schema() for node in nodes)
    return {schema.node_id: schema for schema in described}


@pytest.fixture(scope="module")
def workflows(pack_root):
    found = sorted((pack_root / "workflows").glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in found}


@pytest.fixture(scope="module")
def foreign(pack_root, schemas):
    """Input names of other nodes: ComfyUI's as it described them, Raylight's as read in its source."""
    recorded = {}
    for name in ("object_info.json", "raylight_object_info.json"):
        recorded |= json.loads((pack_root / "tests" / "data" / name).read_text(encoding="utf-8"))
    names = {
        name: {*node["input"]["required"], *node["input"]["optional"]} for name, node in recorded.items()
    }
    return {name: inputs for name, inputs in names.items() if name not in schemas}


def is_widget(entry):
    return hasattr(entry, "default") or hasattr(entry, "options")


def widgets_of(schema):
    """Widget inputs in the order in which a workflow stores their values: required ones first."""
    return sorted(filter(is_widget, schema.inputs), key=lambda entry: bool(getattr(entry, "optional", False)))


def check_value(entry, value):
    if hasattr(entry, "options"):
        assert value in entry.options, entry.id
    elif hasattr(entry, "min"):
        assert entry.min <= value <= entry.max, entry.id
    else:
        assert type(value) is type(entry.default), entry.id


def test_there_is_one_for_the_sample_model(workflows):
    assert "wan_t2v_sample.json" in workflows


def test_nodes_and_inputs_exist(workflows, schemas, foreign):
    for workflow in workflows.values():
        for node in workflow["nodes"]:
            used = {slot["name"] for slot in node.get("inputs", [])}
            if node["type"] in NOTES:
                continue
            if node["type"] in foreign:
                assert used <= foreign[node["type"]], node["type"]
                continue
            schema = schemas[node["type"]]
            assert used <= {entry.id for entry in schema.inputs}, node["type"]
            named = [slot["name"] for slot in node.get("outputs", [])]
            assert named == [entry.display_name for entry in schema.outputs][: len(named)]


def test_stored_values_are_ones_that_the_inputs_take(workflows, schemas):
    for workflow in workflows.values():
        for node in workflow["nodes"]:
            if node["type"] not in schemas:
                continue
            widgets = widgets_of(schemas[node["type"]])
            for entry, value in zip(widgets, node["widgets_values"], strict=True):
                check_value(entry, value)


def test_links_join_what_they_say(workflows):
    for workflow in workflows.values():
        nodes = {node["id"]: node for node in workflow["nodes"]}
        links = {link[0]: link for link in workflow["links"]}
        for number, source, output, target, slot, kind in links.values():
            assert number in nodes[source]["outputs"][output]["links"]
            assert nodes[source]["outputs"][output]["type"] == kind
            assert nodes[target]["inputs"][slot]["link"] == number
            assert {kind, "*"} & set(nodes[target]["inputs"][slot]["type"].split(","))
        for node in workflow["nodes"]:
            for slot in node.get("inputs", []):
                assert slot.get("link") is None or slot["link"] in links


def test_ids_and_inputs_of_released_nodes_stay(schemas):
    """What saved workflows rely on: these may be appended to, never renamed or moved."""
    patch = [entry.id for entry in schemas["VCAttentionPatch"].inputs if is_widget(entry)]
    assert patch[:11] == [
        *("precision", "expcast", "grouping_window", "value_format", "regroup_every", "clusters"),
        *("start_percent", "end_percent", "exact_blocks", "min_tokens", "kernel"),
    ]


def test_every_node_has_a_help_page(schemas, pack_root):
    missing = [name for name in schemas if not (pack_root / "web" / "docs" / f"{name}.md").exists()]
    assert not missing


def test_help_names_every_input(schemas, pack_root):
    for name, schema in schemas.items():
        text = (pack_root / "web" / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert not [entry.id for entry in schema.inputs if is_widget(entry) and f"`{entry.id}`" not in text]
