"""Import names of the checkout and of the test folders, for programs that run outside pytest."""

import importlib.util
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
FOLDERS = {"evidence": HERE, "sample_model": TESTS / "sample_model", "bench": TESTS / "bench"}


def alias_folders():
    """Make the folders importable as evidence, sample_model and bench."""
    for name, folder in FOLDERS.items():
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules.setdefault(name, package)


def alias_pack():
    """Name the checkout ``comfyui_vc_attention``, as the test suite does."""
    # a program's own folder comes first on the path; names there are not top-level modules
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (HERE, TESTS.parent)]
    spec = importlib.util.spec_from_file_location("comfyui_vc_attention", TESTS.parent / "__init__.py")
    pack = importlib.util.module_from_spec(spec)
    sys.modules["comfyui_vc_attention"] = pack
    spec.loader.exec_module(pack)
