"""Four commands for a fresh checkout; they need Python 3.10 or newer and nothing else.

python dev.py demo      denoise one clip of the sample model twice, with and without VC-Attention
python dev.py test      lint, then the whole test suite (further arguments go to pytest)
python dev.py evidence  measure fidelity and speed here; tables and plots go to tests/evidence/results/
python dev.py archive   build the zip that the Comfy registry would hand out, in dist/, and print its size

All but the last make the virtual environment .venv beside this file on first use. A development tool: the
published archive does not contain it.
"""

from __future__ import annotations  # so that an old Python reaches the check in main()

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "installed-requirements"
REQUIREMENTS = ("requirements.txt", "requirements-dev.txt")
# their adapters are tested against the real packages, whose own requirements would bring a CUDA stack
ALONE = ("xfuser==0.7.0", "vllm-omni==0.30.0 ; python_version < '3.14'")
# two tests at a time where there are two cores; a test's own threads would only fight over them
PARALLEL = ("-n", "auto", "--dist", "loadfile", "--maxprocesses", "8")


def say(text: str) -> None:
    print(f"[dev] {text}", flush=True)


def run(*command, **variables) -> int:
    """Run a command in the checkout with more environment variables. Returns its exit status."""
    # a PYTHONPATH from outside would put other people's modules before the pinned ones
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONNOUSERSITE": "1"} | variables
    return subprocess.call([str(part) for part in command], cwd=ROOT, env=environment)


def fingerprint() -> str:
    """What the environment was made from: this Python, where it stands, and the requirements."""
    digest = hashlib.sha256(f"{sys.version} {VENV} {ALONE}".encode())
    for name in REQUIREMENTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def ensure_environment() -> None:
    """Make .venv and install the pinned requirements, unless that was done before."""
    wanted = fingerprint()
    if VENV_PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    if run(sys.executable, "-m", "venv", "--clear", VENV):
        sys.exit(
            f"[dev] {sys.executable} could not make a virtual environment. On Debian and Ubuntu install "
            f"its venv package: apt install python{sys.version_info.major}.{sys.version_info.minor}-venv"
        )
    say("installing requirements; the first time this downloads PyTorch")
    requirements = [part for name in REQUIREMENTS for part in ("-r", ROOT / name)]
    for packages in (requirements, ["--no-deps", *ALONE]):
        if run(VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *packages):
            sys.exit("[dev] pip could not install the requirements; its own message is above")
    STAMP.write_text(wanted)


def demo(arguments: list[str], python=None) -> int:
    return run(python or VENV_PYTHON, ROOT / "tests" / "demo", *arguments)


def evidence(arguments: list[str], python=None) -> int:
    return run(python or VENV_PYTHON, ROOT / "tests" / "evidence", *arguments)


def test(arguments: list[str]) -> int:
    steps = (
        ("-m", "ruff", "check", "."),
        ("-m", "ruff", "format", "--check", "."),
        ("-m", "pytest", *PARALLEL, *arguments),
    )
    failed = []
    for step in steps:
        command = " ".join(step[1:])
        say(command)
        if run(VENV_PYTHON, *step, OMP_NUM_THREADS="1"):
            failed.append(command)
    for command in failed:
        say(f"failed: {command}")
    return 1 if failed else 0


def tracked(*options: str) -> set[str]:
    """Files that git tracks, as `git ls-files` takes options."""
    command = ("git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", *options)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"[dev] the archive is what git tracks, and git says: {done.stderr.strip()}")
    return set(filter(None, done.stdout.split("\0")))


def archive(arguments: list[str]) -> int:
    """dist/<name>-<version>.zip, or the path given: what git tracks less what .comfyignore names."""
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    name, version = (re.search(rf'^{key} = "(.+)"', metadata, re.MULTILINE)[1] for key in ("name", "version"))
    path = Path(arguments[0]) if arguments else ROOT / "dist" / f"{name}-{version}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(tracked() - tracked("--ignored", "--exclude-from=.comfyignore"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            # one date for all, so that equal files make equal archives
            entry = zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            packed.writestr(entry, (ROOT / file).read_bytes())
    say(f"{path.name}: {len(files)} files, {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def main(arguments: list[str]) -> int:
    commands = {"demo": demo, "test": test, "evidence": evidence, "archive": archive}
    asks = {"-h", "--help"} & set(arguments)
    if asks and arguments[0] in ("demo", "evidence"):
        # their command lines are read before anything is imported that is not Python's own
        return commands[arguments[0]](["--help"], sys.executable)
    if asks or not arguments or arguments[0] not in commands:
        print(__doc__)
        return 0 if asks else 2
    if sys.version_info < (3, 10):  # noqa: UP036, nothing else checks it here
        sys.exit(f"[dev] needs Python 3.10 or newer, got {sys.version.split()[0]}")
    if arguments[0] != "archive":
        ensure_environment()
    return commands[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
