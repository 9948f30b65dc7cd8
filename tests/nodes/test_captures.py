import pytest
import torch
from comfyui_vc_attention.nodes.captures import DEFAULT_PREFIX, next_path, read_call, safe_name, write


@pytest.mark.parametrize(
    "text, name",
    [
        ("run 1", "run_1"),
        ("../../etc/passwd", "etc_passwd"),
        ("C:\\Windows\\x", "C_Windows_x"),
        ("", DEFAULT_PREFIX),
        ("../", DEFAULT_PREFIX),
        ("a" * 500, "a" * 80),
        ("%date%/x\n", "date_x"),
    ],
)
def test_prefix_is_a_file_name_and_nothing_else(text, name):
    assert safe_name(text) == name


def test_files_are_numbered(tmp_path):
    tensors = {"step0.block0.call0.q": torch.zeros(2)}
    names = [write(tmp_path / "new", "x", tensors, {}).name for _ in range(2)]
    assert names == ["x_00001.safetensors", "x_00002.safetensors"]
    (tmp_path / "x_00007.safetensors").touch()
    (tmp_path / "x_y_00009.safetensors").touch()
    assert next_path(tmp_path, "x").name == "x_00008.safetensors"


def test_the_first_call_is_read_back(tmp_path):
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    parts = {f"step3.block1.call0.{part}": tensor for part, tensor in zip("qkv", (q, k, v), strict=True)}
    name = write(tmp_path, "x", {**parts, "step5.block0.call0.q": q.clone()}, {}).name
    call, read = read_call(tmp_path, name)
    assert call == "step3.block1.call0" and all(
        torch.equal(a, b) for a, b in zip(read, (q, k, v), strict=True)
    )


@pytest.mark.parametrize("name", ["missing.safetensors", "../x.safetensors", "x.pt", ""])
def test_only_captures_in_the_folder_are_read(tmp_path, name):
    folder = tmp_path / "output"
    write(tmp_path, "x", {"a": torch.zeros(1)}, {})
    folder.mkdir()
    with pytest.raises(ValueError, match="no capture of this name"):
        read_call(folder, name)


def test_other_safetensors_are_refused(tmp_path):
    name = write(tmp_path, "x", {"weight": torch.zeros(1)}, {}).name
    with pytest.raises(ValueError, match="holds no captured attention call"):
        read_call(tmp_path, name)
