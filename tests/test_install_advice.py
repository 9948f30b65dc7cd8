"""What install.py tells people to do next: the exact command for what is missing, with this very Python."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.test_field_faults import import_that_fails


def steps(install, monkeypatch, card, cuda="13.0", driver="none", nvrtc=None, triton="3.6.0", failed=False):
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.driver_version", lambda: driver)
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.why_no_build", lambda: nvrtc)
    monkeypatch.setattr(install, "triton_version", lambda: triton)
    version = SimpleNamespace(cuda=cuda, hip=None)
    return install.next_steps(SimpleNamespace(version=version, __version__="2.9.1"), card, failed)


def test_cpu_torch_beside_an_nvidia_card_gets_the_command_for_another_torch(install, monkeypatch):
    (line,) = steps(install, monkeypatch, install.Card("no GPU", "cpu"), cuda=None, driver="580.65.06")
    assert install.pip_command("--force-reinstall torch") in line and sys.executable in line
    assert "/whl/cu130" in line


def test_old_driver_gets_its_version_and_what_to_do(install, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (line,) = steps(install, monkeypatch, install.Card("no GPU", "cpu"), driver="470.10")
    assert line.startswith("Update the NVIDIA driver (this is 470.10)") and install.this_command() in line


def test_a_hidden_card_is_not_taken_for_an_old_driver(install, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (line,) = steps(install, monkeypatch, install.Card("no GPU", "cpu"), driver="580.65.06")
    assert line.startswith("CUDA_VISIBLE_DEVICES is ''") and install.this_command() in line
    assert "driver" not in line


def test_no_driver_gets_what_to_do_and_what_it_would_bring(install, monkeypatch):
    lines = steps(install, monkeypatch, install.Card("no GPU", "cpu"), cuda=None)
    assert "install its driver" in lines[0] and lines[0].endswith(install.this_command())
    assert lines[1].endswith(install.this_command("--dry-run --arch sm_120"))


def test_a_mac_gets_no_advice_about_nvidia_cards(install, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert steps(install, monkeypatch, install.Card("no GPU", "cpu"), cuda=None) == []
    assert steps(install, monkeypatch, install.Card("Apple GPU", "mps"), cuda=None) == []


def test_missing_triton_gets_its_package(install, monkeypatch):
    monkeypatch.setattr(install, "triton_package", lambda torch: "triton==3.6.0")
    card = install.Card("H100", "cuda", (9, 0), 80.0)
    (line,) = steps(install, monkeypatch, card, triton="not usable: No module named 'triton'")
    package = install.pip_command("triton==3.6.0")
    assert line == f"For the Triton kernels: {package}"


@pytest.mark.parametrize(
    ("cuda", "package"), [("12.8", "nvidia-cuda-nvrtc-cu12"), ("13.0", "nvidia-cuda-nvrtc")]
)
def test_missing_nvrtc_gets_the_package_of_torchs_cuda(install, monkeypatch, cuda, package):
    card = install.Card("H100", "cuda", (9, 0), 80.0)
    (line,) = steps(install, monkeypatch, card, cuda=cuda, nvrtc="NVRTC was not found")
    assert line == f"For the CUDA kernels: {install.pip_command(package)}"


def test_i17_old_cards_are_not_sold_what_would_not_help(install, monkeypatch):
    card = install.Card("RTX 2080", "cuda", (7, 5), 8.0)
    assert steps(install, monkeypatch, card, triton="not usable: x", nvrtc="no NVRTC") == []


def test_i03_a_triton_whose_library_does_not_load_is_told_from_one_that_works(install, monkeypatch):
    import_that_fails(monkeypatch, "triton", OSError("libcuda.so: cannot open"))
    assert install.triton_version() == "not usable: libcuda.so: cannot open"


@pytest.mark.parametrize(
    ("platform", "version", "package"),
    [
        ("win32", "2.9.1+cu130", '"triton-windows<3.6"'),
        ("win32", "2.10.0", '"triton-windows<3.7"'),
        ("win32", "2.30.0", "triton-windows"),
    ],
)
def test_triton_package_fits_this_torch(install, monkeypatch, platform, version, package):
    monkeypatch.setattr(sys, "platform", platform)
    assert install.triton_package(SimpleNamespace(__version__=version)) == package


@pytest.mark.parametrize(
    ("requirement", "package"),
    [
        ('triton==3.6.0; platform_system == "Linux"', '"triton==3.6.0"'),
        ('triton~=3.8.0; python_version < "3.15"', '"triton~=3.8.0"'),
        ("jinja2", "triton"),
    ],
)
def test_on_linux_the_triton_is_the_one_that_torch_asks_for(
    install, monkeypatch, tmp_path, requirement, package
):
    monkeypatch.setattr(sys, "platform", "linux")
    about = tmp_path / "torch-2.11.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Requires-Dist: sympy>=1.13.3\nRequires-Dist: {requirement}\n")
    assert install.triton_package(SimpleNamespace(__file__=tmp_path / "torch" / "__init__.py")) == package


def test_i10_this_command_is_quoted_where_paths_have_spaces(install, monkeypatch):
    monkeypatch.setattr(sys, "executable", r"D:\my AI\python_embeded\python.exe")
    monkeypatch.setattr(install, "ROOT", Path("/custom nodes/pack"))
    assert install.this_command("--retest") == (
        r'"D:\my AI\python_embeded\python.exe" -s "/custom nodes/pack/install.py" --retest'
    )


@pytest.mark.parametrize(
    ("executable", "has_pip", "expected"),
    [
        ("/opt/venv/bin/python", True, "/opt/venv/bin/python -m pip install triton"),
        ("/opt/conda/envs/c/bin/python", True, "/opt/conda/envs/c/bin/python -m pip install triton"),
        (
            r"C:\Users\Jane Doe\Documents\ComfyUI\.venv\Scripts\python.exe",
            False,
            r'uv pip install --python "C:\Users\Jane Doe\Documents\ComfyUI\.venv\Scripts\python.exe" triton',
        ),
        (
            r"D:\my AI\python_embeded\python.exe",
            True,
            r'"D:\my AI\python_embeded\python.exe" -s -m pip install triton',
        ),
        ("/my apps/bin/python", True, '"/my apps/bin/python" -m pip install triton'),
        (r"C:\C\python_embeded\python.exe", True, r"C:\C\python_embeded\python.exe -s -m pip install triton"),
        ("/uv/bin/python", False, "uv pip install --python /uv/bin/python triton"),
    ],
    ids=["venv", "conda", "desktop", "portable with space", "space", "portable", "uv"],
)
def test_i10_i11_pip_command_names_this_python(install, monkeypatch, executable, has_pip, expected):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "flags", SimpleNamespace(no_user_site=0))
    monkeypatch.setitem(sys.modules, "pip", SimpleNamespace() if has_pip else None)
    assert install.pip_command("triton") == expected
