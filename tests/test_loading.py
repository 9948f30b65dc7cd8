"""The pack loads as ComfyUI loads it: by path, from a folder of any name, changing nothing around it."""

import shutil
import subprocess
import sys
import textwrap

import pytest

# What ComfyUI does with a folder in custom_nodes, and what must hold afterwards.
LOAD = """
import asyncio, importlib.util, os, sys

folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])  # where the stand-in for comfy_api is
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(folder)]
before = list(sys.path), set(sys.modules)

name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
pack = importlib.util.module_from_spec(spec)
sys.modules[name] = pack
spec.loader.exec_module(pack)
assert set(sys.modules) - before[1] == {name}, set(sys.modules) - before[1]

kernels = importlib.import_module(name + ".kernels")
print("kernels:", *(spec.name for spec in kernels.KERNELS))
if sys.argv[3] == "nodes":
    extension = asyncio.run(pack.comfy_entrypoint())
    print("nodes:", *(node.__name__ for node in asyncio.run(extension.get_node_list())))

assert sys.path == before[0]
assert os.path.isdir(os.path.join(folder, pack.WEB_DIRECTORY))
for ours in ("kernels", "nodes", "tests", "workflows", "web", "install"):
    assert ours not in sys.modules, ours
"""

# Just enough of ComfyUI's V3 API for a node module to be defined; any attribute is a class.
COMFY_API = """
class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (cls,), {})

    def __call__(cls, *args, **kwargs):
        return type.__call__(cls)


class _Root(metaclass=_Anything):
    pass


class ComfyExtension:
    pass


io = _Anything("io", (_Root,), {})
ui = _Anything("ui", (_Root,), {})
"""


@pytest.fixture
def load(pack_root, tmp_path):
    """Run LOAD on a copy of the pack in a folder of the name given; returns what it printed."""

    def load(folder_name, what):
        folder = tmp_path / folder_name
        shutil.copytree(pack_root, folder, ignore=shutil.ignore_patterns(".*", "tests", "__pycache__"))
        api = tmp_path / "stand-in" / "comfy_api" / "latest"
        api.mkdir(parents=True)
        (api.parent / "__init__.py").touch()
        (api / "__init__.py").write_text(textwrap.dedent(COMFY_API))
        command = [sys.executable, "-c", LOAD, str(folder), str(tmp_path / "stand-in"), what]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return load


@pytest.mark.parametrize("folder_name", ["ComfyUI-VC-Attention", "vc.attention-main", "with space"])
def test_loads_from_any_folder_name(load, folder_name):
    out = load(folder_name, "nodes")
    assert "reference" in out.partition("kernels:")[2]
    assert "VCAttentionPatch" in out.partition("nodes:")[2]


def test_pack_root_is_not_importable_in_tests(pack_root):
    assert str(pack_root) not in sys.path
    for ours in ("kernels", "workflows", "web"):
        assert ours not in sys.modules
