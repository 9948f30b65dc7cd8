"""dev.py: what it does before there is an environment."""

import importlib.util
import shutil
import subprocess
import sys

import pytest


@pytest.fixture
def dev(pack_root, tmp_path, monkeypatch):
    """dev.py as a module, its commands recorded instead of run, its environment elsewhere."""
    spec = importlib.util.spec_from_file_location("vc_dev", pack_root / "dev.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / "a b" / ".venv")
    monkeypatch.setattr(module, "VENV_PYTHON", module.VENV / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", module.VENV / "installed-requirements")
    module.commands, module.failing = [], set()

    def run(*command, **variables):
        words = [str(part) for part in command]
        module.commands.append(words)
        if "venv" in words:
            module.VENV_PYTHON.parent.mkdir(parents=True, exist_ok=True)
            module.VENV_PYTHON.touch()
        return int(any(word in module.failing for word in words))

    monkeypatch.setattr(module, "run", run)
    return module


def test_environment_is_made_once(dev):
    dev.ensure_environment()
    assert ["venv" in command for command in dev.commands] == [True, False, False]
    assert all("pip" in command for command in dev.commands[1:])
    assert "--no-deps" in dev.commands[2]
    dev.commands.clear()
    dev.ensure_environment()
    assert dev.commands == []


def test_interrupted_or_outdated_environment_is_made_again(dev):
    dev.ensure_environment()
    dev.STAMP.write_text("of other requirements")
    dev.commands.clear()
    dev.ensure_environment()
    assert len(dev.commands) == 3


def test_failures_are_sentences(dev):
    dev.failing = {"venv"}
    with pytest.raises(SystemExit, match="could not make a virtual environment"):
        dev.ensure_environment()
    dev.failing = {"pip"}
    with pytest.raises(SystemExit, match="could not install"):
        dev.ensure_environment()
    assert not dev.STAMP.exists()


def test_tests_run_after_a_lint_error_and_the_status_tells(dev):
    dev.failing = {"check"}
    assert dev.test(["-k", "x"]) == 1
    assert [command[2] for command in dev.commands] == ["ruff", "ruff", "pytest"]
    assert dev.commands[-1][-2:] == ["-k", "x"]
    dev.failing = set()
    assert dev.test([]) == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["demo", "--help"], "--prompt"),
        (["evidence", "-h"], "fidelity"),
        (["test", "--help"], "python dev.py test"),
        (["archive", "--help"], "python dev.py archive"),
        (["--help"], "python dev.py demo"),
    ],
)
def test_help_needs_nothing_and_makes_nothing(pack_root, tmp_path, arguments, told):
    """From a copy that has no environment, in a Python that has no site packages."""
    shutil.copy(pack_root / "dev.py", tmp_path)
    for folder in ("demo", "evidence"):
        shutil.copytree(pack_root / "tests" / folder, tmp_path / "tests" / folder)
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-S", tmp_path / "dev.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and told in done.stdout, done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_without_a_command_it_explains_itself(pack_root):
    done = subprocess.run([sys.executable, pack_root / "dev.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "python dev.py demo" in done.stdout
