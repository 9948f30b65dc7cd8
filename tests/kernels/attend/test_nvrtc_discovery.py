"""Where NVRTC is looked for, on faked folders of Linux and Windows: no such machine is needed."""

import pytest
import torch
from comfyui_vc_attention.kernels.attend import cuda_build

LINUX = {
    "torch wheel of CUDA 13": ["site/nvidia/cu13/lib/libnvrtc.so.13"],
    "torch wheel of CUDA 12": ["site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"],
    "torch's own folder": ["site/torch/lib/libnvrtc.so.12"],
    "toolkit": ["toolkit 12.8/lib64/libnvrtc.so.12.8.93"],
}
WINDOWS = {
    "torch's own folder": ["site/torch/lib/nvrtc64_120_0.dll"],
    "torch's own folder, CUDA 13": ["site/torch/lib/nvrtc64_130_0.dll"],
    "pip, CUDA 12": ["site/nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll"],
    "pip, CUDA 13": ["site/nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll"],
    "toolkit": ["toolkit 12.8/bin/nvrtc64_120_0.dll"],
    "toolkit, CUDA 13": ["toolkit 12.8/bin/x64/nvrtc64_130_0.dll"],
}
BESIDE = {  # what lies in the same folders and is not NVRTC
    False: ["libnvrtc-builtins.so.12.8", "libnvrtc.alt.so.12", "libcudart.so.12"],
    True: ["nvrtc-builtins64_128.dll", "nvrtc64_120_0.alt.dll", "cudart64_12.dll"],
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(windows, files, cuda): a computer with these files, and a torch of that CUDA."""

    def make(windows, files, cuda="12.8"):
        site = tmp_path / "user name" / "site"
        for name in files:
            path = tmp_path / "user name" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            for other in BESIDE[windows]:
                (path.parent / other).write_bytes(b"")
        monkeypatch.setattr(torch, "__file__", str(site / "torch" / "__init__.py"))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(cuda_build, "WINDOWS", windows)
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.setenv("CUDA_PATH", str(tmp_path / "user name" / "toolkit 12.8"))
        return [path.relative_to(tmp_path / "user name").as_posix() for path in cuda_build.nvrtc_paths()]

    return make


@pytest.mark.parametrize("place", LINUX)
def test_linux(machine, place):
    assert [path for path in machine(False, LINUX[place]) if not path.startswith("/")] == LINUX[place]


@pytest.mark.parametrize("place", WINDOWS)
def test_windows(machine, place):
    assert machine(True, WINDOWS[place]) == WINDOWS[place]


def test_nothing_there_is_no_error_yet(machine):
    assert machine(True, []) == []


def test_torchs_own_cuda_goes_first_then_the_older(machine):
    both = [*WINDOWS["pip, CUDA 13"], *WINDOWS["toolkit"]]
    assert machine(True, both, "13.0") == both
    assert machine(True, both, "12.6") == both[::-1]
    assert machine(True, both, None) == both[::-1]


def test_a_missing_library_is_said_without_a_command_for_another_python(machine, monkeypatch):
    machine(True, [])
    with pytest.raises(cuda_build.CudaBuildError, match=r"NVRTC, .* was not found$") as raised:
        cuda_build._nvrtc.__wrapped__()
    assert "pip install" not in str(raised.value)


def test_i03_a_library_that_does_not_load_says_its_own_words(machine):
    machine(False, LINUX["torch wheel of CUDA 12"])
    words = r"does not load: .*libnvrtc\.so\.12: .*(file too short|invalid ELF)"
    with pytest.raises(cuda_build.CudaBuildError, match=words) as raised:
        cuda_build._nvrtc.__wrapped__()
    assert len(str(raised.value).splitlines()) == 1  # a cell of install.py's table


def test_cache_of_a_read_only_pack_is_windows_local_app_data(monkeypatch, tmp_path):
    pack = tmp_path / "a file"
    pack.write_text("")
    monkeypatch.setattr(cuda_build, "KERNELS", pack)
    monkeypatch.setattr(cuda_build, "WINDOWS", True)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Jane Doe" / "AppData" / "Local"))
    expected = tmp_path / "Jane Doe" / "AppData" / "Local" / "comfyui-vc-attention"
    assert cuda_build.cache_folder.__wrapped__() == expected and expected.is_dir()


def test_a_machine_where_nothing_can_be_written_gets_a_temporary_folder(monkeypatch, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr(cuda_build, "KERNELS", blocked)
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("LOCALAPPDATA", str(blocked))
    folder = cuda_build.cache_folder.__wrapped__()
    assert folder.is_dir() and folder.name.startswith("comfyui-vc-attention-")
    folder.rmdir()


def test_no_driver_is_no_error():
    assert isinstance(cuda_build.driver_version(), str)
