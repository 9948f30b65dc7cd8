"""The pack in a running ComfyUI: from a folder with an odd name, the example workflow queued over HTTP."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.comfyui

ODD_NAME = "vc attention.main (2)"
START_SECONDS, RUN_SECONDS = 240, 600  # a busy machine; normally 10 and 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A ComfyUI process with this pack and nothing else in its custom_nodes."""

    def __init__(self, comfyui_path, pack_root, folder):
        custom_nodes = folder / "custom_nodes"
        custom_nodes.mkdir()
        (custom_nodes / ODD_NAME).symlink_to(pack_root)
        for name in ("user", "output", "temp", "input"):
            (folder / name).mkdir()
        paths = folder / "paths.yaml"
        paths.write_text(f"pack:\n  base_path: {folder}\n  custom_nodes: custom_nodes/\n")
        self.output = folder / "output"
        self.log_path = folder / "log.txt"
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [
            *(sys.executable, "main.py", "--cpu", "--use-pytorch-cross-attention"),
            *("--port", self.url.rpartition(":")[2], "--extra-model-paths-config", paths),
            *("--user-directory", folder / "user", "--output-directory", self.output),
            *("--temp-directory", folder / "temp", "--input-directory", folder / "input"),
            *("--database-url", "sqlite:///:memory:"),
        ]
        self.log_file = self.log_path.open("w")
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=comfyui_path,
            stdout=self.log_file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def wait_until_up(self):
        self.wait(lambda: self.get("/object_info/KSampler"), START_SECONDS)

    def wait(self, ready, seconds):
        """ready()'s first true answer. Raises with the log if the server ends or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                answer = ready()
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                answer = None
            if answer:
                return answer
            time.sleep(0.5)
        raise AssertionError(f"ComfyUI did not answer; its log ends with\n{self.log[-3000:]}")

    def queue(self, prompt):
        """Run an API prompt to its end; its history entry."""
        body = json.dumps({"prompt": prompt}).encode()
        request = urllib.request.Request(self.url + "/prompt", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            prompt_id = json.loads(answer.read())["prompt_id"]
        history = self.wait(lambda: self.get(f"/history/{prompt_id}").get(prompt_id), RUN_SECONDS)
        assert history["status"]["status_str"] == "success", history["status"]
        return history

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log_file.close()


@pytest.fixture(scope="module")
def server(comfyui_path, pack_root, tmp_path_factory):
    made = Server(comfyui_path, pack_root, tmp_path_factory.mktemp("server"))
    try:
        made.wait_until_up()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def workflow(server, pack_root, to_api):
    """The example workflow in API form, on the reference kernel, because the host runs on a CPU."""
    ui = json.loads((pack_root / "workflows" / "wan_t2v_sample.json").read_text())
    types = {node["type"] for node in ui["nodes"]}
    info = {name: entry for name in types for name, entry in server.get(f"/object_info/{name}").items()}
    prompt = to_api(ui, info)
    by_type = {node["class_type"]: node["inputs"] for node in prompt.values()}
    assert by_type["VCAttentionPatch"]["min_tokens"] == 1
    by_type["VCAttentionPatch"]["kernel"] = "reference"
    by_type["VCAttentionPatch"]["clusters"] = 8  # quick
    by_type["KSampler"]["steps"] = 2
    return SimpleNamespace(prompt=prompt, **by_type)


def test_loads_from_an_odd_folder_name(server):
    assert ODD_NAME in server.log and "IMPORT FAILED" not in server.log
    for node in ("VCAttentionPatch", "VCAttentionSample", "VCAttentionSampleDecode"):
        assert node in server.get(f"/object_info/{node}")
    info = server.get("/object_info/VCAttentionPatch")["VCAttentionPatch"]
    assert info["output"] == ["MODEL", "MODEL"] and info["category"] == "model/patch"


def test_workflow_is_listed_as_a_template(server):
    assert "wan_t2v_sample" in server.get("/workflow_templates")[ODD_NAME]


def test_example_workflow_makes_a_clip(server, workflow):
    """6 blocks x 2 steps, both conditions in one call; the other half of the calls is cross-attention."""
    history = server.queue(workflow.prompt)
    (saved,) = next(iter(history["outputs"].values()))["images"]
    assert (server.output / saved["subfolder"] / saved["filename"]).stat().st_size > 1000
    line = [line for line in server.log.splitlines() if "[VC-Attention]" in line][-1]
    assert "12 of 24 calls low-bit (12 reference" in line and "12 cross-attention" in line
    assert re.search(r"grouped in 1 of 2 steps \(order made 12 times", line)  # with and without the prompt


def test_l15_the_patch_survives_a_cached_node(server, workflow):
    """The second prompt changes the seed only, so our node does not execute again."""
    workflow.KSampler["seed"] += 1
    server.queue(workflow.prompt)
    lines = [line for line in server.log.splitlines() if "calls low-bit" in line]
    assert len(lines) == 2 and "12 of 24" in lines[-1]


def test_an_explicit_kernel_that_cannot_run_fails_the_prompt_with_its_reason(server, workflow):
    workflow.VCAttentionPatch["kernel"] = "triton_int8_fp8"
    body = json.dumps({"prompt": workflow.prompt}).encode()
    request = urllib.request.Request(server.url + "/prompt", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        prompt_id = json.loads(answer.read())["prompt_id"]
    history = server.wait(lambda: server.get(f"/history/{prompt_id}").get(prompt_id), RUN_SECONDS)
    assert history["status"]["status_str"] == "error"
    assert "cannot run here: triton_int8_fp8: needs an NVIDIA GPU, got a CPU" in json.dumps(history["status"])


# Every module of ComfyUI that is loaded, and the identity of everything in it and in its classes.
SNAPSHOT = """
import asyncio, importlib.util, os, sys
comfyui, pack_root = sys.argv[1:3]
sys.path.insert(0, comfyui)
sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
import comfy.sd, comfy.samplers, comfy.ldm.modules.attention, comfy.patcher_extension, execution, server
import nodes as comfy_nodes
from comfy_api.latest import io


def theirs(name):
    package = name.split(".")[0]
    return package in ("comfy", "comfy_api", "comfy_execution", "nodes", "execution", "server", "torch")


def snapshot():
    seen = {}
    for name, module in list(sys.modules.items()):
        if module is None or not theirs(name):
            continue
        for key, value in list(vars(module).items()):
            if name.split(".")[0] == "torch" and key not in ("scaled_dot_product_attention", "compile"):
                continue
            seen[name, key] = id(value)
            if isinstance(value, type) and not name.startswith("torch"):
                seen.update({(name, key, part): id(item) for part, item in list(vars(value).items())})
    seen["args"] = repr(comfy.cli_args.args)
    return seen


def load():
    spec = importlib.util.spec_from_file_location("odd name", os.path.join(pack_root, "__init__.py"))
    pack = importlib.util.module_from_spec(spec)
    sys.modules["odd name"] = pack
    spec.loader.exec_module(pack)
    extension = asyncio.run(pack.comfy_entrypoint())
    return [node.GET_SCHEMA() for node in asyncio.run(extension.get_node_list())]


before = snapshot()
print("nodes:", len(load()))
after = snapshot()
fleeting = ("_abc_impl", "__dict__", "__weakref__")  # made anew at every look
changed = [key for key in before if key[-1] not in fleeting and after.get(key) != before[key]]
print("changed:", changed)
added = {key for key in after if key not in before and ("%s.%s" % key[:2]) not in sys.modules}
print("added:", sorted(key for key in added if key[0] in {other[0] for other in before if other != "args"}))
"""


def test_l02_importing_the_pack_changes_no_attribute_of_comfyui(comfyui_path, pack_root):
    script = textwrap.dedent(SNAPSHOT)
    result = subprocess.run(
        [sys.executable, "-c", script, str(comfyui_path), str(pack_root)],
        capture_output=True, text=True, cwd=comfyui_path, timeout=START_SECONDS,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines() if ": " in line)
    assert int(lines["nodes"]) >= 3
    assert lines["changed"] == "[]" and lines["added"] == "[]", result.stdout
