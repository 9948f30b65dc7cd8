"""The demo from its command line, two steps long, on both hosts."""

import os
import re
import subprocess
import sys

import pytest
from PIL import Image


def run_demo(pack_root, tmp_path, **environment):
    out = tmp_path / "clip.webp"
    command = [
        sys.executable,
        pack_root / "tests" / "demo",
        "--steps",
        "2",
        "--kernel",
        "reference",
        "--out",
        out,
    ]
    kept = {name: value for name, value in os.environ.items() if name != "COMFYUI_PATH"}
    done = subprocess.run(command, env={**kept, **environment}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


def check(out, path):
    assert re.search(r"calls taken +- +12\n", out)  # 6 blocks x 2 steps
    errors = [float(error) for error in re.findall(r"block \d +- +(\S+)", out)]
    assert len(errors) == 6
    assert all(0 < error < 0.03 for error in errors)
    assert float(re.search(r"PSNR against default +- +(\S+) dB", out)[1]) > 20
    with Image.open(path) as clip:
        assert clip.n_frames > 1
        assert clip.width == 2 * 4 * 96


def test_on_diffusers(pack_root, tmp_path):
    pytest.importorskip("diffusers")
    check(*run_demo(pack_root, tmp_path))


@pytest.mark.comfyui
def test_on_comfyui(pack_root, tmp_path, comfyui_path):
    check(*run_demo(pack_root, tmp_path, COMFYUI_PATH=str(comfyui_path)))
