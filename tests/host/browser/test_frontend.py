"""What a user does in the page: a real ComfyUI server on a CPU, its real page in a headless Chromium.

Needs COMFYUI_PATH, Node.js with playwright-core (PLAYWRIGHT_CORE names its index.js if it is not beside the
checkout), and a Chromium (CHROMIUM, else found on PATH). Screenshots go to BROWSER_SHOTS, if that is set.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfyui

HERE = Path(__file__).parent
START_SECONDS, SCENARIO_SECONDS = 240, 1800  # a busy machine; normally 10 and 180
IN_THE_PAGE = (
    "from_templates",
    *("search_and_run", "compare_and_copy", "both_renderers", "bypassed", "not_active", "switched_off"),
    *("script_missing", "every_workflow"),
)
THIRD_PARTIES = ("WanVideo", "Ray", "XFuser")  # their packs are not installed here
MODEL_FILES = {"unet_name", "clip_name", "clip_name1", "clip_name2", "vae_name", "image"}


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def start_server(comfyui_path, python, folder, *more):
    """A ComfyUI process that keeps everything it writes in folder: (process, address)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("user", "output", "temp", "input"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "paths.yaml").write_text(f"pack:\n  base_path: {folder}\n  custom_nodes: custom_nodes/\n")
    command = [
        *(python, "main.py", "--cpu", "--use-pytorch-cross-attention", "--port", port),
        *("--extra-model-paths-config", folder / "paths.yaml", "--user-directory", folder / "user"),
        *("--output-directory", folder / "output", "--temp-directory", folder / "temp"),
        *("--input-directory", folder / "input", "--database-url", "sqlite:///:memory:", *more),
    ]
    with (folder / "log.txt").open("w") as log:
        arguments = [str(part) for part in command]
        process = subprocess.Popen(arguments, cwd=comfyui_path, stdout=log, stderr=subprocess.STDOUT)
    return process, f"http://127.0.0.1:{port}"


def wait_until_up(process, url, folder):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/object_info/KSampler", timeout=10):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise AssertionError(
        f"ComfyUI did not start; its log ends with\n{(folder / 'log.txt').read_text()[-3000:]}"
    )


@pytest.fixture(scope="module")
def play(comfyui_path, comfyui_python, pack_root, tmp_path_factory):
    """play(scenarios, *server arguments): what each scenario answers, on a server of its own."""
    if shutil.which("node") is None or chromium() is None:
        pytest.skip("needs Node.js and a Chromium")
    shots = Path(os.environ.get("BROWSER_SHOTS") or tmp_path_factory.mktemp("shots"))
    environment = {**os.environ, "CHROMIUM": chromium(), "SHOTS": str(shots)}
    probe = "await import(process.env.PLAYWRIGHT_CORE ?? 'playwright-core')"
    command = ["node", "--input-type=module", "-e", probe]
    if subprocess.run(command, env=environment, cwd=HERE, capture_output=True).returncode:
        pytest.skip("needs playwright-core; PLAYWRIGHT_CORE may name its index.js")

    def play(scenarios, *more):
        folder = tmp_path_factory.mktemp("server")
        (folder / "custom_nodes").mkdir()
        (folder / "custom_nodes" / "ComfyUI-VC-Attention").symlink_to(pack_root)
        process, url = start_server(comfyui_path, comfyui_python, folder, *more)
        try:
            wait_until_up(process, url, folder)
            command = ["node", HERE / "scenarios.mjs", url, pack_root / "workflows", *scenarios]
            done = subprocess.run(
                [str(part) for part in command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=SCENARIO_SECONDS,
            )
        finally:
            process.terminate()
            process.wait(30)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return play


@pytest.fixture(scope="module")
def answers(play):
    return play(IN_THE_PAGE)


@pytest.mark.parametrize("scenario", IN_THE_PAGE)
def test_nothing_fails_and_nothing_is_thrown(answers, scenario):
    assert "failed" not in answers[scenario], answers[scenario]["failed"]
    # the page itself asks for pictures and help pages that may not exist
    assert not [text for text in answers[scenario]["problems"] if "404" not in text]


def test_the_template_browser_offers_the_comparison_with_its_picture(answers):
    answer = answers["from_templates"]
    assert answer["thumbnails"] >= 8
    assert {"VCAttentionPatch", "VCAttentionCompare", "VCAttentionReport"} <= set(answer["types"])


def test_found_by_search_the_node_shows_each_step(answers):
    answer = answers["search_and_run"]
    assert answer["offered"] and answer["added"] == ["VCAttentionPatch"]
    assert answer["status"] == "success"
    assert any(line.startswith("Step ") and "grouped" in line for line in answer["lines"])
    assert "running" in answer["levels"] and answer["levels"][-1] == "ok"
    assert answer["lines"][-1].startswith("100% of the video attention at 8-bit")
    assert "18 reference int8_int8 of 18 calls" in answer["boxes"][0]["detail"]


def test_a_click_copies_the_report_without_paths(answers, comfyui_path):
    answer = answers["compare_and_copy"]
    assert answer["copied"].startswith("VC-Attention ") and "video attention calls taken" in answer["copied"]
    assert any("PSNR" in text for text in answer["outputs"])
    for text in (answer["copied"], *answer["outputs"]):
        assert str(comfyui_path) not in text and str(Path.home()) not in text
    assert not answer["saved_has_box"]


def test_the_boxes_survive_a_change_of_renderer(answers):
    answer = answers["both_renderers"]
    assert len(answer["vue"]) == 3 and answer["vue"] == answer["classic"] == answer["vue_again"]


def test_a_bypassed_patch_changes_nothing_and_says_nothing(answers):
    answer = answers["bypassed"]
    assert answer["status"] == "success"
    assert any("The clips are identical. VC-Attention did not run in B" in text for text in answer["outputs"])
    assert not any("inf" in text for text in answer["outputs"])
    assert not [box for box in answer["boxes"] if "video attention" in box["line"]]


def test_without_a_kernel_the_node_warns_with_the_reason(answers):
    boxes = answers["not_active"]["boxes"]
    assert len(boxes) == 3  # the patch, the report, the comparison
    for box in boxes:
        assert box["level"] == "warning" and "needs an NVIDIA GPU" in box["line"] and len(box["line"]) < 200
    assert "not active, output is unchanged" in boxes[0]["line"]
    assert any("identical" in text for text in answers["not_active"]["outputs"])


@pytest.mark.parametrize("scenario", ["switched_off", "script_missing"])
def test_without_our_box_comfyuis_own_text_is_left(answers, scenario):
    answer = answers[scenario]
    assert answer["boxes"] == [] and answer["status"] == "success"
    assert len(answer["own_text"]) == 1 and "18 of 36 calls" in answer["own_text"][0]


def test_every_workflow_opens_whole_and_lacks_only_model_files(answers):
    for name, answer in answers["every_workflow"].items():
        if name == "problems":
            continue
        missing = {kind for kind in answer["missing"] if not kind.startswith(THIRD_PARTIES)}
        assert not missing and answer["links"], name
        if answer["missing"]:
            continue  # a third party's nodes: the server cannot check them
        absent = {"value_not_in_list", "custom_validation_failed"}  # a model file, the start picture
        files = [error for error in answer["errors"] if error["type"] in absent]
        assert files == answer["errors"] and {error["input"] for error in files} <= MODEL_FILES, name
        assert (answer["status"] == 200) == (not files), name


def test_a_workflow_opens_without_the_pack(play):
    answer = play(["pack_disabled"], "--disable-all-custom-nodes")["pack_disabled"]
    assert "failed" not in answer and not answer["problems"]
    assert answer["nodes"] == 9 and answer["ours"] == []
