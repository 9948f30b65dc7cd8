"""The browser script: its logic under Node's own test runner, and what it may do."""

import re
import shutil
import subprocess

import pytest


def test_logic_under_node(pack_root):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js 20 or newer")
    folder = pack_root / "tests" / "web"
    files = sorted(str(path) for path in folder.glob("*.test.mjs"))
    command = [node, "--import", str(folder / "comfyui_stub.mjs"), "--test", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.fixture
def scripts(pack_root):
    return sorted((pack_root / "web").rglob("*.js"))


def test_imports_only_what_comfyui_keeps_stable(scripts):
    allowed = {"/scripts/app.js", "/scripts/api.js"}
    for script in scripts:
        text = script.read_text()
        assert set(re.findall(r"^import .* from \"([^\"]+)\"", text, re.MULTILINE)) <= allowed
        assert not re.search(r"\bimport\(", text)


def test_reads_and_sends_nothing(scripts):
    for script in scripts:
        text = script.read_text()
        assert not re.search(
            r"\b(fetch\w*|eval|exec\w*|Function|XMLHttpRequest|localStorage|innerHTML)\s*[(=.]", text
        )


def test_event_name_is_the_servers(pack_root, scripts):
    from comfyui_vc_attention.nodes.status_events import EVENT

    assert any(f'"{EVENT}"' in script.read_text() for script in scripts)
