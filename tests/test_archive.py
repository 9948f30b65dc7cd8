"""The archive that the Comfy registry hands out, built by its one command and searched as a scanner would."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

# What made versions of other packs "flagged", whatever it was used for. Substrings, as scanners take them.
FLAGGED = re.compile(
    r"\bsubprocess\b|\bos\.system\b|\bpopen\b|\bsocket\b|\burllib\b|\brequests\b|\bhttp\.client\b|\bhttpx\b|\baiohttp\b"
    r"|(?<!\w)exec\s*\(|(?<!\w)eval\s*\(|\.eval\s*\(|\bcompile\s*\(|__import__|\bimport_module\b|\bimportlib\b"
    r"|\bpickle\b|\bmarshal\b|\bbase64\b|\bctypes\b|\bwebbrowser\b|\bpip install\b|\bgetattr\(__builtins__"
)
FLAGGED_IN_SCRIPTS = re.compile(
    r"\beval\s*\(|\bFunction\s*\(|\bfetch\w*\s*\(|XMLHttpRequest|WebSocket|\batob\s*\("
)
ALLOWED = {
    ("kernels/attend/cuda_build.py", "ctypes"),  # the driver and NVRTC
    # words in a message or a docstring, told to people
    ("install.py", "pip install"),
    ("kernels/parallel/vllm_omni.py", "pip install"),
}
LARGEST = 25 * 2**20


@pytest.fixture(scope="module")
def archive(pack_root, tmp_path_factory):
    """The open archive."""
    if shutil.which("git") is None or not (pack_root / ".git").exists():
        pytest.skip("needs git and a git checkout")
    path = tmp_path_factory.mktemp("archive") / "pack.zip"
    command = [sys.executable, str(pack_root / "dev.py"), "archive", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"pack\.zip: \d+ files, [\d.]+ MiB", done.stdout)
    with zipfile.ZipFile(path) as opened:
        yield opened


def hits(archive, suffix, pattern):
    for name in archive.namelist():
        if name.endswith(suffix):
            text = archive.read(name).decode("utf-8")
            yield from ((name, found.group().strip()) for found in pattern.finditer(text))


def test_nothing_in_it_is_flagged(archive):
    assert not set(hits(archive, ".py", FLAGGED)) - ALLOWED
    assert not list(hits(archive, (".js", ".mjs"), FLAGGED_IN_SCRIPTS))


def test_nothing_in_it_is_obfuscated(archive):
    for name in archive.namelist():
        if name.endswith((".py", ".js", ".cu", ".cuh")):
            assert max(map(len, archive.read(name).decode("utf-8").splitlines()), default=0) <= 200, name


def test_no_requirement_is_an_address(archive):
    for name in ("requirements.txt", "pyproject.toml"):
        text = archive.read(name).decode("utf-8")
        assert not re.search(r"@ ?(git|http)|git\+|--index-url|--find-links", text), name


def test_it_holds_what_users_need_and_no_tests(archive):
    names = archive.namelist()
    for start in ("nodes/", "kernels/attend/csrc/", "web/docs/", "locales/zh/", "workflows/"):
        assert any(name.startswith(start) for name in names), start
    assert "web/vc_attention.js" in names and "nodes/sample_model/wan_sample.safetensors" in names
    assert not [name for name in names if name.startswith(("tests/", "bench", ".ci", ".github", "dist/"))]
    assert not {"dev.py", "requirements-dev.txt"} & set(names)


def test_workflows_lie_flat_with_a_thumbnail_each(archive):
    files = [name for name in archive.namelist() if name.startswith("workflows/")]
    assert not [name for name in files if name.count("/") > 1]
    graphs, pictures = (
        {name.removesuffix(end) for name in files if name.endswith(end)} for end in (".json", ".jpg")
    )
    assert graphs == pictures


def test_it_is_small(archive):
    assert sum(entry.compress_size for entry in archive.infolist()) < LARGEST


def test_no_user_or_machine_is_named(archive):
    for name in archive.namelist():
        if not name.endswith((".safetensors", ".jpg", ".png", ".webp")):
            text = archive.read(name).decode("utf-8")
            assert not re.search(r"/(home|root|Users)/\w|[A-Z]:\\\\Users", text), name
