"""install.py says the truth about every machine it can meet, and exits 0 on all of them."""

import importlib.util
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

RUNNER = "import sys, runpy; {before}; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.fixture(scope="module")
def install(pack_root):
    spec = importlib.util.spec_from_file_location("vc_install", pack_root / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.name_the_pack()
    return module


def run(script, before="pass", **environment):
    """stdout of install.py in a process of its own, after some Python of the test's."""
    command = [sys.executable, "-c", RUNNER.format(before=before), str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def fake_torch(cards=(), cuda="13.0", hip=None, mps=False, warning=None):
    """The part of torch that cards_of asks."""

    def is_available():
        if warning:
            import warnings

            warnings.warn(warning, stacklevel=2)
        return bool(cards)

    def properties(i):
        name, capability, gib = cards[i]
        return SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=gib * 2**30)

    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=is_available, device_count=lambda: len(cards), get_device_properties=properties
        ),
        version=SimpleNamespace(cuda=cuda, hip=hip),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
    )


def test_runs_with_an_empty_environment_from_a_folder_with_spaces(pack_root, tmp_path):
    folder = tmp_path / "custom nodes" / "vc.attention main"
    shutil.copytree(pack_root, folder, ignore=shutil.ignore_patterns(".*", "tests", "__pycache__"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    out = run(folder / "install.py", PATH="")
    assert "VC-Attention 0." in out
    assert "reference" in out
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before


def test_without_torch_names_the_python_to_use(pack_root):
    out = run(pack_root / "install.py", "sys.modules['torch'] = None", PATH="")
    assert "torch cannot be imported" in out
    assert sys.executable in out


def test_leaves_our_folders_off_the_import_path(pack_root):
    check = (
        "import atexit, importlib.util as u; "
        "atexit.register(lambda: print('found:', u.find_spec('kernels'), u.find_spec('nodes')))"
    )
    out = run(pack_root / "install.py", f"sys.path.insert(0, {str(pack_root)!r}); {check}", PATH="")
    assert "found: None None" in out


def test_a_surprise_is_shown_and_still_exits_0(pack_root):
    before = "import torch; torch.cuda.is_available = lambda: 1 / 0"
    command = [sys.executable, "-c", RUNNER.format(before=before), str(pack_root / "install.py")]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr
    assert "please report" in done.stdout


@pytest.mark.parametrize(
    ("machine", "card", "reason"),
    [
        (fake_torch(cuda=None), "no GPU", "built without CUDA"),
        (fake_torch(), "no GPU", "finds no GPU"),
        (fake_torch(warning="The NVIDIA driver is too old"), "no GPU", "driver is too old"),
        (fake_torch(cuda=None, mps=True), "Apple GPU", ""),
        (fake_torch([("RX 7900", (11, 0), 24)], cuda=None, hip="7.1"), "RX 7900, 24 GiB", ""),
        (fake_torch([("RTX 4090", (8, 9), 24)]), "RTX 4090, sm_89, 24 GiB", ""),
    ],
    ids=["cpu torch", "no gpu", "old driver", "apple", "rocm", "nvidia"],
)
def test_devices(install, machine, card, reason):
    (found,), why = install.cards_of(machine)
    assert str(found) == card
    assert reason in why
    assert bool(reason) == bool(why)


def test_two_cards_of_two_kinds(install):
    cards, _ = install.cards_of(fake_torch([("RTX 5090", (12, 0), 32), ("RTX 2080", (7, 5), 8)]))
    assert [card.capability for card in cards] == [(12, 0), (7, 5)]


@pytest.mark.parametrize(
    ("device", "capability", "refusal"),
    [("cuda", (7, 5), "sm_75"), ("rocm", None, "rocm"), ("mps", None, "mps"), ("cpu", None, "cpu")],
)
def test_what_cannot_run_says_why(install, device, capability, refusal):
    rows, automatic = install.kernel_rows(torch, install.Card("x", device, capability))
    assert automatic == ""
    for name, reason in rows:
        assert name == "reference" or refusal in reason


def test_a_supported_card_gets_a_kernel(install):
    rows, automatic = install.kernel_rows(torch, install.Card("H200", "cuda", (9, 0)))
    assert automatic
    assert dict(rows)[automatic] == ""


def test_missing_triton_is_named_with_the_command_that_mends_it(install, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "not usable" in install.triton_version()
    install.print_kernels(torch, install.Card("RTX 3090", "cuda", (8, 6), 24.0))
    out = capsys.readouterr().out
    assert "needs Triton" in out
    assert install.pip_command("triton") in out


@pytest.mark.parametrize(
    ("executable", "has_pip", "expected"),
    [
        ("/opt/venv/bin/python", True, "/opt/venv/bin/python -m pip install triton"),
        ("/my apps/bin/python", True, '"/my apps/bin/python" -m pip install triton'),
        (r"C:\C\python_embeded\python.exe", True, r"C:\C\python_embeded\python.exe -s -m pip install triton"),
        ("/uv/bin/python", False, "uv pip install --python /uv/bin/python triton"),
    ],
    ids=["venv", "space", "portable", "uv"],
)
def test_pip_command_names_this_python(install, monkeypatch, executable, has_pip, expected):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "flags", SimpleNamespace(no_user_site=0))
    monkeypatch.setitem(sys.modules, "pip", SimpleNamespace() if has_pip else None)
    assert install.pip_command("triton") == expected


def test_version_is_that_of_pyproject(install, pack_root):
    line = f'version = "{install.pack_version()}"'
    assert line in (pack_root / "pyproject.toml").read_text(encoding="utf-8")
