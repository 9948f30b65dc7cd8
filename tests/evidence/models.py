"""Stage "models": blocks of whole models in ComfyUI's own sampler, by tests/bench/bench_wan.py, as tables.

Needs a GPU, COMFYUI_PATH and ComfyUI's packages in the Python that runs it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .fidelity import log
from .tables import Table, named_failure

BENCH = Path(__file__).resolve().parents[1] / "bench" / "bench_wan.py"
# name in the tables, blocks of the whole model, blocks that are run
KINDS = {"wan": ("Wan 2.1 14B, 720p, 81 frames", 40, 4), "h3": ("MiniMax-H3, 1344x768", 50, 2)}
CLIP_STEPS, CLIP_GROUPED = 40, 10  # the node's window of a quarter
OURS = {"auto": "`auto`", "int8": "`expcast off`"}
LIMIT_S = 240  # for one kind (chosen)


def bench(kind, blocks):
    """Rows of the bench for one kind of model. Raises RuntimeError with its last words where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(BENCH), kind, "--blocks", str(blocks), "--json", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"bench_wan.py took more than {LIMIT_S:g} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise RuntimeError(f"bench_wan.py ended with {done.returncode}: {said[-1]}")
        return json.loads(out.read_text(encoding="utf-8"))["rows"]


def empty_tables():
    steps = Table(
        "Steps of whole models",
        "A sampling step of a model with real widths and random bf16 weights, one condition, no text encoder "
        "or VAE; a step of all blocks is extrapolated from the time inside those that ran.",
        ["model", "tokens", "attention", "blocks", "step ms", "attention ms", "share of attention",
         "peak of the step GiB", "all blocks", "step of all blocks s"],
    )  # fmt: skip
    clips = Table(
        "Whole clips",
        f"Seconds of {CLIP_STEPS} such steps of all blocks; ours: {CLIP_GROUPED} of them grouped. Limit: "
        "what attention that takes no time would give.",
        ["model", "attention", "clip s", *(f"{name} over it" for name in OURS.values()), "limit"],
    )
    return steps, clips


def add_rows(tables, kind, rows):
    """The bench's rows of one kind in both tables."""
    steps, clips = tables
    model, whole, blocks = KINDS[kind]
    for row in rows:
        steps.rows.append([model, row["tokens"], row["name"], blocks, row["step_ms"], row["attention_ms"],
                           row["share"], row["peak_gib"], whole, row["whole_step_s"]])  # fmt: skip
    seconds, ours = {}, {}
    for row in rows:
        name, _, state = row["name"].partition(", ")
        if name in OURS:
            times = CLIP_GROUPED if state.startswith("grouped") else CLIP_STEPS - CLIP_GROUPED
            ours[name] = ours.get(name, 0.0) + times * row["whole_step_s"]
        else:
            seconds[name] = (CLIP_STEPS * row["whole_step_s"], 1 / (1 - row["share"]))
    for name, (theirs, limit) in seconds.items():
        clips.rows.append([model, name, theirs, *(theirs / ours[each] for each in OURS), limit])
    for name, shown in OURS.items():
        clips.rows.append([model, shown, ours[name], None, None, None])


def run(device, save=lambda tables, data: None):
    """(tables, data) of this stage. save: given both after each model."""
    tables = empty_tables()
    if device.type != "cuda" or not os.environ.get("COMFYUI_PATH"):
        tables[0].notes.append("Not measured: needs a GPU and COMFYUI_PATH, a ComfyUI of 0.33 or newer.")
        return tables, {}
    data = {}
    for kind, (model, _, blocks) in KINDS.items():
        with named_failure(tables[0], model):
            data[kind] = bench(kind, blocks)
            add_rows(tables, kind, data[kind])
        log(model)
        save(tables, data)
    return tables, data
