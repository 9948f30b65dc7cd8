"""python tests/sample_model train|sample|classify ...: the sample model's tools, each with its own --help."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = ("train", "sample", "classify")


def alias_packages():
    """Name the checkout ``comfyui_vc_attention`` and this folder ``sample_model``, as the test suite does."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.util.spec_from_file_location("comfyui_vc_attention", HERE.parents[1] / "__init__.py")
    pack = importlib.util.module_from_spec(spec)
    sys.modules["comfyui_vc_attention"] = pack
    spec.loader.exec_module(pack)
    tools = types.ModuleType("sample_model")
    tools.__path__ = [str(HERE)]
    sys.modules["sample_model"] = tools


if len(sys.argv) < 2 or sys.argv[1] not in TOOLS:
    sys.exit(f"usage: python tests/sample_model {'|'.join(TOOLS)} [options]")
alias_packages()
importlib.import_module(f"sample_model.{sys.argv[1]}").main(sys.argv[2:])
