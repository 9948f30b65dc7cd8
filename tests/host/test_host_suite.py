"""Where pytest itself runs in a Python without ComfyUI's requirements: run these tests in ComfyUI's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfyui


def test_the_comfyui_tests_pass_under_comfyuis_python(host_ready, comfyui_python, comfyui_path, pack_root):
    """COMFYUI_PYTHON names that Python (it needs pytest too); else ComfyUI's own venv is looked for."""
    if host_ready:
        pytest.skip("this Python has ComfyUI's requirements, so the tests run here")
    if Path(comfyui_python) == Path(sys.executable):
        pytest.fail("this Python cannot import ComfyUI; set COMFYUI_PYTHON to the one that ComfyUI runs in")
    command = [comfyui_python, "-m", "pytest", "-m", "comfyui", "-q", str(Path(__file__).parent)]
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(command, cwd=pack_root, env=environment, capture_output=True, text=True)
    print(result.stdout[-6000:])
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
