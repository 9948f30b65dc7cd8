"""The demo from its command line, two steps long, on both hosts."""

import os
import re
import subprocess
import sys

import pytest
import torch
from comfyui_vc_attention.kernels.config import EXPCAST_CARDS
from PIL import Image

from tests.evidence.bounds import bound

FAST_CARD = torch.cuda.is_available() and torch.cuda.get_device_capability() in EXPCAST_CARDS
RECIPE = "int8_fp8 + ExpCast, no means" if FAST_CARD else "int8_int8, no means"


def start_demo(pack_root, tmp_path, *arguments, **environment):
    command = [sys.executable, pack_root / "tests" / "demo", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMFYUI_P")}
    return subprocess.run(command, env={**kept, **environment}, cwd=tmp_path, capture_output=True, text=True)


def run_demo(pack_root, tmp_path, **environment):
    out = tmp_path / "clip.webp"
    arguments = ("--steps", "2", "--kernel", "reference", "--out", out)
    done = start_demo(pack_root, tmp_path, *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


def check(out, path):
    assert re.search(r"calls taken +- +12\n", out)  # 6 blocks x 2 steps
    errors = [float(error) for error in re.findall(r"block \d +- +(\S+)", out)]
    assert len(errors) == 6
    assert all(0 < error < bound(RECIPE, "captured") for error in errors)
    assert float(re.search(r"PSNR against default +- +(\S+) dB", out)[1]) > 20
    with Image.open(path) as clip:
        assert clip.n_frames > 1
        assert clip.width == 2 * 4 * 96


def test_on_diffusers(pack_root, tmp_path):
    pytest.importorskip("diffusers")
    check(*run_demo(pack_root, tmp_path))


@pytest.mark.comfyui
def test_on_comfyui(pack_root, tmp_path, comfyui_path, comfyui_python):
    paths = {"COMFYUI_PATH": str(comfyui_path), "COMFYUI_PYTHON": comfyui_python}
    check(*run_demo(pack_root, tmp_path, **paths))


@pytest.mark.parametrize(
    "arguments, paths, reason",
    [
        (["--steps", "0"], {}, "--steps: must be 1 or more, got 0"),
        ([], {"COMFYUI_PATH": "."}, "COMFYUI_PATH must be the folder of a ComfyUI checkout, got '.'"),
        ([], {"COMFYUI_PATH": "host", "COMFYUI_PYTHON": "no_python"}, "got 'no_python'; set it to"),
        (["--kernel", "fastest"], {}, "unknown kernel 'fastest'; choose auto"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(pack_root, tmp_path, arguments, paths, reason):
    (tmp_path / "host" / "comfy").mkdir(parents=True)
    (tmp_path / "host" / "comfy" / "cli_args.py").touch()
    done = start_demo(pack_root, tmp_path, *arguments, **paths)
    assert done.returncode and reason in done.stderr and "Traceback" not in done.stderr
