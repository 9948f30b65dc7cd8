"""What the browser is told while a model samples: one event, read by web/vc_attention.js.

An event is a plain dict. "node" names the patch node; "phase" is ready (patched, waiting for a sampler),
step, ended, or note (a sentence the user should see). Step and ended carry what RunReport.status() counts.
"""

import sys
from typing import Any

EVENT = "vc_attention.status"


def server():
    """ComfyUI's server object, or None outside a running server."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def show_text(text: str, node_id: str | None) -> None:
    """ComfyUI's own progress text on a node, for browsers without our script; nothing without a server."""
    if node_id is not None and hasattr(server(), "send_progress_text"):
        server().send_progress_text(text, node_id)


def send_status(node_id: str | None, phase: str, **status: Any) -> None:
    """Tell every open browser; nothing without a server or a node."""
    if node_id is not None and hasattr(server(), "send_sync"):
        server().send_sync(EVENT, {"node": str(node_id), "phase": phase, **status})
