"""What the Comfy registry and pip are given."""

import re
import shutil
import subprocess
import sys

import pytest

# a user's own builds; pip would replace them if a requirement named them
NEVER_REQUIRED = {"torch", "torchvision", "torchaudio", "triton", "triton-windows", "numpy", "xformers"}


@pytest.fixture
def read(pack_root):
    return lambda name: (pack_root / name).read_text(encoding="utf-8")


@pytest.fixture
def tracked(pack_root):
    """tracked(*options): files that git tracks, as `git ls-files` takes options."""
    if shutil.which("git") is None or not (pack_root / ".git").exists():
        pytest.skip("needs git and a git checkout")

    def tracked(*options):
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", *options]
        done = subprocess.run(command, cwd=pack_root, capture_output=True, text=True, check=True)
        return set(filter(None, done.stdout.split("\0")))

    return tracked


@pytest.fixture
def archive(tracked):
    """The files that a published version holds: what git tracks, less what .comfyignore names."""
    return tracked() - tracked("--ignored", "--exclude-from=.comfyignore")


def requirements(text):
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def test_user_requirements_replace_nothing(read):
    wanted = requirements(read("requirements.txt"))
    assert not {re.split(r"[^\w-]", line)[0].lower() for line in wanted} & NEVER_REQUIRED
    assert not [line for line in wanted if re.search(r"://|@|^-", line)]


def test_pyproject_requires_the_same(read):
    (line,) = re.findall(r"^dependencies = \[(.*)\]", read("pyproject.toml"), re.MULTILINE)
    assert re.findall(r'"([^"]+)"', line) == requirements(read("requirements.txt"))


def test_development_requirements_are_pinned(read):
    for line in requirements(read("requirements-dev.txt")):
        assert re.match(r"[\w-]+==[\d.]+( ;|$)", line), line


def test_version_is_semantic_and_in_the_changelog(read):
    (version,) = re.findall(r'^version = "(.*)"', read("pyproject.toml"), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"## {version}" in read("CHANGELOG.md")


def test_registry_metadata_is_complete(read):
    text = read("pyproject.toml")
    for key in ("name", "description", "license", "requires-python", "PublisherId", "DisplayName"):
        assert re.search(rf"^{key} = ", text, re.MULTILINE), key
    assert "requires-comfyui" in text


def test_pip_knows_every_package_of_kernels(read, archive):
    folders = {name.rpartition("/")[0] for name in archive if re.match(r"kernels/(.*/)?__init__\.py$", name)}
    expected = {"comfyui_vc_attention", *(f"comfyui_vc_attention.{f.replace('/', '.')}" for f in folders)}
    (block,) = re.findall(r"^packages = \[(.*?)\]", read("pyproject.toml"), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"([^"]+)"', block)) == expected


def test_archive_has_no_development_files(archive):
    roots = {name.split("/")[0] for name in archive}
    assert not roots & {"tests", "dev.py", "requirements-dev.txt", ".ci", ".github", "CONTRIBUTING.md"}
    assert not [name for name in archive if re.search(r"\.(pyc|cubin|so|dll|pyd|exe)$", name)]


def test_archive_has_what_users_need(archive):
    for name in (
        *("__init__.py", "install.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md"),
        *("nodes/extension.py", "kernels/registry.py", "kernels/attend/reference.py"),
        *("web/docs/VCAttentionPatch.md", "workflows/wan_t2v_sample.json"),
        "nodes/sample_model/wan_sample.safetensors",
    ):
        assert name in archive, name


def test_every_cuda_source_is_in_the_archive(archive, tracked):
    assert {name for name in tracked("kernels") if name.endswith((".cu", ".cuh"))} <= archive


def test_the_registrys_tool_finds_nothing_unsafe(pack_root):
    """The rules that comfy-cli checks a whole checkout by before it publishes."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "S102,S307,E702",
        ".",
    ]
    done = subprocess.run(command, cwd=pack_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_readme_stays_short_and_links_exist(read, pack_root):
    text = read("README.md")
    assert len(text.splitlines()) < 150
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (pack_root / target).exists(), target


def test_readme_links_lead_somewhere_in_the_archive(read, archive):
    """But for the one section about what only a git checkout has."""
    text, _, _ = read("README.md").partition("### In a git checkout")
    targets = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert "kernels/README.md" in targets and not set(targets) - archive
    assert not re.search(r"tests/|bench_attend|CONTRIBUTING", text)


def test_readme_starts_with_the_two_commands_and_the_node_name(read):
    first_screen = "\n".join(read("README.md").splitlines()[:60])  # with room for rows of the tables
    for words in ("python dev.py demo", "python dev.py test", "VC-Attention Patch", "python install.py"):
        assert words in first_screen, words
