"""Make this checkout importable as ``comfyui_vc_attention``, as ComfyUI does it: by path.

The pack root must stay off sys.path: there, ``nodes`` shadows ComfyUI's nodes.py and
``kernels`` shadows Hugging Face's package, which transformers and diffusers import.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest
import torch

# Without a GPU, Triton kernels run in its interpreter. Set before any kernel is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def let_interpreter_count_to_tensors():
    """`range(n)` over a kernel's scalar: Triton's interpreter takes int() of a one-element array for it,
    which NumPy 2.4 and newer refuse."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


if os.environ.get("TRITON_INTERPRET") == "1":
    let_interpreter_count_to_tensors()

PACK_NAME = "comfyui_vc_attention"
TESTS = Path(__file__).resolve().parent
PACK_ROOT = TESTS.parent

# `python -m pytest` puts the working directory first on sys.path; take it off again.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != PACK_ROOT]

spec = importlib.util.spec_from_file_location(PACK_NAME, PACK_ROOT / "__init__.py")
pack = importlib.util.module_from_spec(spec)
sys.modules[PACK_NAME] = pack
spec.loader.exec_module(pack)

# Tests import from their neighbours by way of `tests`; some wheels (xfuser's) bring a package of that name.
sys.modules["tests"] = ours = types.ModuleType("tests")
ours.__path__ = [str(TESTS)]

# Uninitialised memory in kernel tests. As a byte 0x7F it is E4M3's NaN and INT8's largest code; as an
# index it is wrong but near, so that a forgotten write fails a comparison instead of the whole process.
POISON = 127


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, and say why."""
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    no_comfyui = pytest.mark.skip(reason="set COMFYUI_PATH to a ComfyUI checkout to run this")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "comfyui" in item.keywords and not os.environ.get("COMFYUI_PATH"):
            item.add_marker(no_comfyui)


@pytest.fixture(scope="session")
def pack_root() -> Path:
    """The checkout that the tests run in."""
    return PACK_ROOT


@pytest.fixture(scope="session")
def install():
    """install.py as a module; its main is not run."""
    spec = importlib.util.spec_from_file_location("vc_install", PACK_ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """The ComfyUI checkout of COMFYUI_PATH, for tests marked ``comfyui``."""
    return Path(os.environ["COMFYUI_PATH"]).expanduser().resolve()


@pytest.fixture(scope="session")
def comfyui_python(comfyui_path) -> str:
    """The Python that has ComfyUI's requirements: COMFYUI_PYTHON, else its own venv, else this one."""
    if os.environ.get("COMFYUI_PYTHON"):
        return os.environ["COMFYUI_PYTHON"]
    places = ("venv/bin/python", ".venv/bin/python", "venv/Scripts/python.exe", ".venv/Scripts/python.exe")
    found = [comfyui_path / place for place in places if (comfyui_path / place).exists()]
    return str(found[0]) if found else sys.executable


def poisoned(allocate):
    """The same allocation, filled with NaN (floats), 127 (integers) or True."""

    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.dtype.is_floating_point and tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(POISON)
        else:
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point or tensor.is_complex() else POISON)
        return tensor

    return allocate_poisoned


@pytest.fixture
def poisoned_memory(monkeypatch):
    """No test passes because fresh memory happened to hold zeros."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def poison_kernel_tests(request):
    """Every test of a kernel allocates poisoned memory."""
    if request.path.is_relative_to(TESTS / "kernels") or request.path.is_relative_to(TESTS / "gpu"):
        request.getfixturevalue("poisoned_memory")
