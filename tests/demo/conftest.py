"""Make this folder importable as ``vc_demo``, and the sample model's as ``sample_model``."""

import sys
import types
from pathlib import Path

for name, folder in (
    ("vc_demo", Path(__file__).parent),
    ("sample_model", Path(__file__).parents[1] / "sample_model"),
):
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
