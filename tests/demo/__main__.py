"""python tests/demo ...: what `python dev.py demo` runs in the virtual environment."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACK_ROOT = HERE.parents[1]


def alias(name, folder):
    """Make a folder importable under a name that is not its own."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def comfyui_python():
    """The Python that has ComfyUI's requirements: COMFYUI_PYTHON, else ComfyUI's own venv, else this one.

    Exits with a sentence where a variable names something that is not there.
    """
    path, python = os.environ["COMFYUI_PATH"], os.environ.get("COMFYUI_PYTHON")
    if not (Path(path) / "comfy" / "cli_args.py").exists():
        sys.exit(
            f"COMFYUI_PATH must be the folder of a ComfyUI checkout, got {path!r}, which has no "
            "comfy/cli_args.py; set it to one, or unset it and the demo runs on diffusers"
        )
    if python and shutil.which(python) is None:
        sys.exit(
            f"COMFYUI_PYTHON must be a Python program, got {python!r}; set it to the one that runs ComfyUI, "
            "or unset it"
        )
    if python:
        return python
    for place in (
        "venv/bin/python",
        ".venv/bin/python",
        "venv/Scripts/python.exe",
        ".venv/Scripts/python.exe",
    ):
        candidate = Path(path) / place
        if candidate.exists():
            return str(candidate)
    return sys.executable


def main():
    alias("vc_demo", HERE)
    from vc_demo.options import options_of

    options = options_of(sys.argv[1:])
    # in ComfyUI's Python if there is a ComfyUI; the variable tells the second process that it is the one
    if os.environ.get("COMFYUI_PATH") and not os.environ.get("VC_DEMO_IN_COMFYUI"):
        command = [comfyui_python(), str(HERE), *sys.argv[1:]]
        return subprocess.call(command, env={**os.environ, "VC_DEMO_IN_COMFYUI": "1"})
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (HERE, PACK_ROOT)]
    if not os.environ.get("COMFYUI_PATH"):
        alias("comfyui_vc_attention", PACK_ROOT)
    from vc_demo.demo import main as demo

    sys.argv = sys.argv[:1]  # ComfyUI reads the command line too
    return demo(options)


if __name__ == "__main__":
    sys.exit(main())
