"""The real ComfyUI Manager installs, disables, enables, updates and removes the pack from a git address.

Needs COMFYUI_PATH and COMFYUI_MANAGER_CLI, the cm-cli of an environment that has comfyui-manager and
ComfyUI's requirements. The address is a copy of this checkout's last commit, served on this machine.
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfyui

NAME = "ComfyUI-VC-Attention"
OFFLINE = ("--mode", "cache", "--channel", "default")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and prints nothing."""

    def log_message(self, *args):
        pass


def git(*arguments, cwd):
    command = ["git", "-c", "safe.directory=*", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def address(pack_root, tmp_path_factory):
    """(address of a bare copy of the checkout, its folder), as plain files over HTTP."""
    folder = tmp_path_factory.mktemp("remote")
    bare = folder / f"{NAME}.git"
    git("clone", "--quiet", "--bare", pack_root, bare, cwd=folder)
    git("update-server-info", cwd=bare)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{NAME}.git", bare
        server.shutdown()


@pytest.fixture(scope="module")
def manager(comfyui_path, tmp_path_factory):
    """manager(command, what): what cm-cli prints, on a copy of ComfyUI."""
    command = os.environ.get("COMFYUI_MANAGER_CLI")
    if not command:
        pytest.skip("set COMFYUI_MANAGER_CLI to the cm-cli of comfyui-manager to run this")
    host = tmp_path_factory.mktemp("host") / "ComfyUI"
    shutil.copytree(
        comfyui_path, host, ignore=shutil.ignore_patterns(".git", "models", "output", "__pycache__")
    )

    def run(*arguments):
        environment = {**os.environ, "COMFYUI_PATH": str(host)}
        done = subprocess.run(
            [command, *arguments, *OFFLINE], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r"\s+", " ", done.stdout)

    run.nodes = host / "custom_nodes"
    return run


def test_install_disable_enable_update_and_remove(manager, address):
    url, bare = address
    out = manager("install", url)
    pack = manager.nodes / NAME
    assert pack.is_dir() and "[INSTALLED]" in out
    assert "VC-Attention" in out and "Kernels" in out  # its install.py ran

    assert "[DISABLED]" in manager("disable", NAME)
    assert not pack.exists() and list((manager.nodes / ".disabled").iterdir())

    assert "[ENABLED]" in manager("enable", NAME)
    assert pack.is_dir()

    before = git("rev-parse", "HEAD", cwd=pack)
    commit_something(bare)
    out = manager("update", NAME)
    assert git("rev-parse", "HEAD", cwd=pack) != before and "Kernels" in out

    assert "[UNINSTALLED]" in manager("uninstall", NAME)
    assert not pack.exists()


def commit_something(bare: Path) -> None:
    """One more commit on the branch that the remote serves."""
    who = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    tree, parent = git("rev-parse", "HEAD^{tree}", cwd=bare), git("rev-parse", "HEAD", cwd=bare)
    made = git(*who, "commit-tree", tree, "-p", parent, "-m", "an update", cwd=bare)
    git("update-ref", "HEAD", made, cwd=bare)
    git("update-server-info", cwd=bare)
