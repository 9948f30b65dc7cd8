from comfyui_vc_attention.nodes.pack_version import pack_version


def test_version_is_that_of_the_metadata(pack_root):
    assert f'version = "{pack_version()}"' in (pack_root / "pyproject.toml").read_text(encoding="utf-8")
