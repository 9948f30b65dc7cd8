"""Files of captured attention inputs: where they lie, what they are called, how they are read and written.

One safetensors file per run in ComfyUI's output folder; tensors "step<s>.block<b>.call<n>.<q|k|v>", each
[1, H, L, D] after the rotary embedding. The metadata says what they are, never where they come from.
"""

import re
from pathlib import Path

import torch

SUFFIX = ".safetensors"
DEFAULT_PREFIX = "vc_attention_capture"


def output_folder() -> Path:
    import folder_paths

    return Path(folder_paths.get_output_directory())


def safe_name(text: str) -> str:
    """A file name without folders: all but letters, digits, - and _ becomes _; never empty, never long."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[:80] or DEFAULT_PREFIX


def next_path(folder: Path, prefix: str) -> Path:
    """The first unused <prefix>_<number>.safetensors in folder."""
    name = safe_name(prefix)
    pattern = rf"{re.escape(name)}_(\d+){re.escape(SUFFIX)}"
    used = [
        int(found[1])
        for path in folder.glob(f"{name}_*{SUFFIX}")
        if (found := re.fullmatch(pattern, path.name))
    ]
    return folder / f"{name}_{max(used, default=0) + 1:05d}{SUFFIX}"


def write(folder: Path, prefix: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write one capture and return its path."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = next_path(folder, prefix)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), metadata)
    return path


def read_call(folder: Path, name: str) -> tuple[str, tuple[torch.Tensor, ...]]:
    """(which call, its q, k, v): the first call of a capture. Raises ValueError for anything else.

    name: a file name in folder; folders in it are not followed.
    """
    from safetensors import safe_open

    path = folder / Path(name.replace("\\", "/")).name
    if path.suffix != SUFFIX or not path.is_file():
        raise ValueError(f"no capture of this name in the output folder, got {path.name!r}")
    with safe_open(str(path), framework="pt") as opened:
        names = list(opened.keys())
        calls = sorted(name[:-2] for name in names if re.fullmatch(r"step\d+\.block\d+\.call\d+\.q", name))
        if not calls:
            raise ValueError(f"{path.name} holds no captured attention call")
        return calls[0], tuple(opened.get_tensor(f"{calls[0]}.{part}") for part in "qkv")
