"""The house rules that a machine can check (CONTRIBUTING.md says them in words)."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def below(*folders, suffixes=(".py",)):
    """Files of the checkout below folders, relative to its root."""
    found = (p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes)
    return sorted(p.relative_to(ROOT) for p in found if not {".cache", "__pycache__"} & set(p.parts))


SOURCES = below("nodes", "kernels")
SHIPPED = [*SOURCES, Path("__init__.py"), Path("install.py")]
CUDA = below("kernels", suffixes=(".cu", ".cuh"))
SMALL = [*SHIPPED, Path("dev.py"), *below("tests/demo", "tests/sample_model")]

COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfyui_version",
    "folder_paths",
    "latent_preview",
    "nodes",
    "server",
}
# what each layer may import besides the standard library and its own relatives
LAYERS = {
    "kernels": {"torch", "triton"},
    "nodes": {"torch", "numpy", "PIL", "safetensors"} | COMFYUI,
}
# attachments to other hosts may import theirs, in these places only
HOSTS = {
    "kernels/benchmark_peers.py": {"comfy_kitchen", "flash_attn", "sageattention"},
    "kernels/adapters": {"diffusers"},
    "kernels/parallel": {"diffusers", "vllm_omni", "xfuser", "yunchang"},
    "nodes/raylight_worker.py": {"raylight", "yunchang"},
}
UNMIRRORED = {"__init__.py", "testing.py"}
VAGUE = {"utils.py", "core.py", "common.py", "helpers.py", "misc.py", "util.py", "base.py"}

# The registry's scanner flags an archive by these, whatever they are used for.
FLAGGED_MODULES = {
    *("subprocess", "socket", "urllib", "http", "requests", "ftplib", "pickle", "marshal", "shelve"),
    *("base64", "ctypes", "importlib", "runpy", "code", "pty", "multiprocessing", "zlib"),
}
FLAGGED_TEXT = re.compile(r"\b(eval|exec|compile|__import__|os\.system|popen|urlopen|import_module)\s*\(")
MAY_LOAD_LIBRARIES = {Path("kernels/attend/cuda_build.py")}  # the driver and NVRTC, through ctypes


def every(sources):
    return pytest.mark.parametrize("source", sources, ids=lambda source: source.as_posix())


def tree(source):
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


def absolute_imports(source):
    """Top-level names of the modules that source imports absolutely, anywhere in it."""
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def relative_imports(source):
    """The checkout's files or folders that source imports relatively."""
    for node in ast.walk(tree(source)):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = source.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for alias in node.names:
            inner = base / alias.name
            is_module = (ROOT / inner).is_dir() or (ROOT / inner.with_suffix(".py")).exists()
            yield inner if is_module else base


@every(SOURCES)
def test_layering(source):
    layer = source.parts[0]
    hosts = HOSTS.get(source.parent.as_posix(), set()) | HOSTS.get(source.as_posix(), set())
    allowed = LAYERS[layer] | hosts | set(sys.stdlib_module_names)
    assert not set(absolute_imports(source)) - allowed
    if layer == "kernels":
        assert not [target for target in relative_imports(source) if target.parts[:1] != ("kernels",)]


@every(SOURCES)
def test_relative_imports_exist(source):
    for target in relative_imports(source):
        assert (ROOT / target).is_dir() or (ROOT / target.with_suffix(".py")).exists(), target


@every(SHIPPED)
def test_nothing_the_registry_flags(source):
    allowed = {"ctypes"} if source in MAY_LOAD_LIBRARIES else set()
    assert not set(absolute_imports(source)) & FLAGGED_MODULES - allowed
    assert not FLAGGED_TEXT.findall((ROOT / source).read_text(encoding="utf-8"))


@every(SOURCES)
def test_touches_no_import_path(source):
    assert not re.search(r"\bsys\.(path\b|modules\[.*\] =)", (ROOT / source).read_text(encoding="utf-8"))


@every(SOURCES)
def test_broad_handlers_raise_again(source):
    for node in ast.walk(tree(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = (
            {"BaseException"}
            if node.type is None
            else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        )
        if caught & {"Exception", "BaseException"}:
            assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), f"line {node.lineno}"


@every(SOURCES)
def test_custom_ops_carry_our_prefix(source):
    for name in re.findall(r"custom_op\(\s*[\"']([^\"']+)", (ROOT / source).read_text(encoding="utf-8")):
        assert name.startswith("comfyui_vc_attention::")


@every([source for source in SOURCES if source.parts[0] == "nodes"])
def test_nodes_change_nothing_of_comfyui(source):
    text = (ROOT / source).read_text(encoding="utf-8")
    assert not re.search(r"setattr\((comfy|torch)|add_object_patch\([^)]*forward", text)


@every([source for source in SOURCES if source.name not in UNMIRRORED])
def test_mirrored_by_a_test_file(source):
    mirror = ROOT / "tests" / source.parent / f"test_{source.name}"
    assert mirror.exists(), f"write {mirror.relative_to(ROOT)}"


@every([source for source in CUDA if source.suffix == ".cu"])
def test_cuda_source_has_its_host_side(source):
    host = source.parents[1] / f"{source.stem}.py"
    assert (ROOT / host).exists(), f"write {host}"


@every(SOURCES)
def test_name_says_a_thing(source):
    assert source.name not in VAGUE


@every([*SMALL, *CUDA])
def test_file_size(source):
    assert len((ROOT / source).read_text(encoding="utf-8").splitlines()) <= 400


@every(SMALL)
def test_function_size(source):
    for node in ast.walk(tree(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (150 if is_kernel else 60), f"{node.name} has {lines} lines"
