import sys
import types

import pytest
from comfyui_vc_attention.nodes.status_events import EVENT, send_status, show_text


@pytest.fixture
def server(monkeypatch):
    """A running server that keeps what it is told to send."""
    instance = types.SimpleNamespace(sent=[], texts=[])
    instance.send_sync = lambda event, data: instance.sent.append((event, data))
    instance.send_progress_text = lambda text, node: instance.texts.append((text, node))
    module = types.ModuleType("server")
    module.PromptServer = types.SimpleNamespace(instance=instance)
    monkeypatch.setitem(sys.modules, "server", module)
    return instance


def test_an_event_names_its_node_and_phase(server):
    send_status("7:3", "step", step=2, steps=20)
    assert server.sent == [(EVENT, {"node": "7:3", "phase": "step", "step": 2, "steps": 20})]


def test_text_goes_to_the_node(server):
    show_text("hello", "7")
    assert server.texts == [("hello", "7")]


def test_without_a_node_nothing_is_sent(server):
    send_status(None, "step")
    show_text("hello", None)
    assert not server.sent and not server.texts


def test_without_a_server_nothing_happens(monkeypatch):
    monkeypatch.delitem(sys.modules, "server", raising=False)
    send_status("7", "step")
    show_text("hello", "7")
