"""The one list of nodes, and that importing nodes/ alone needs no ComfyUI."""

import asyncio
import subprocess
import sys


def test_every_node_once():
    from comfyui_vc_attention.nodes.extension import VCAttentionExtension

    nodes = asyncio.run(VCAttentionExtension().get_node_list())
    names = [node.__name__ for node in nodes]
    assert names[0] == "VCAttentionPatch" and len(set(names)) == len(names)


def test_files_without_comfyui_import_without_it(pack_root):
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('pack', r'{pack_root / '__init__.py'}')\n"
        "sys.modules['pack'] = importlib.util.module_from_spec(spec)\n"
        "from pack.nodes import sample_clip, step_schedule\n"
        "assert not [name for name in sys.modules if name.split('.')[0].startswith('comfy')]\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
