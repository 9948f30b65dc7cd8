"""Trying a kernel: what is kept, what is tried again, and what takes the process with it."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels import AttentionProblem, device_record, registry, validation
from comfyui_vc_attention.kernels.benchmark_peers import PEERS
from comfyui_vc_attention.kernels.device_record import CRASHED, FAILED, PASSED, Speed
from comfyui_vc_attention.kernels.registry import KernelSpec, Stages, kernel_named
from comfyui_vc_attention.kernels.selftest import Case
from comfyui_vc_attention.kernels.validation import (
    UNTESTED,
    ContextLost,
    card_record,
    least_tokens,
    time_kernel,
    validate,
)

REFERENCE = kernel_named("reference").load()
CPU = torch.device("cpu")
CASES = (Case("plain", (1, 1, 40, 128), 40, means=False),)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(device_record, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(device_record, "_memory", {})
    monkeypatch.setattr(
        device_record, "surroundings", lambda: (("torch", "any"),)
    )  # of the other process, too
    return tmp_path


def kernel(attend=REFERENCE.attend, name="tried"):
    return KernelSpec(name, ("int8_int8",), lambda: Stages(REFERENCE.prepare, attend), lambda problem: None)


def raising(error):
    def attend(operands):
        raise error

    return attend


def try_it(spec, **options):
    return validate(spec, CPU, **{"cases": CASES, "lengths": (64,), **options})


def test_a_sound_kernel_passes_and_is_timed_once():
    seen = []
    entry = try_it(kernel(), advance=lambda: seen.append(1))
    assert entry.state == PASSED and [speed.tokens for speed in entry.speeds] == [64]
    assert entry.checks[0].startswith("plain: error 0.0") and len(seen) == validation.steps(CASES, (64,))
    assert try_it(kernel(raising(RuntimeError("never launched again")))) == entry
    assert card_record(CPU).entry("tried") == entry


def test_n15_noise_is_off_and_stays_off():
    entry = try_it(kernel(lambda operands: (torch.randn_like(REFERENCE.attend(operands)[0]), None)))
    assert entry.state == FAILED and "failed its self-test on this card (plain: error" in entry.reason
    assert card_record(CPU).entry("tried") == entry


def test_an_error_is_a_reason_on_one_line():
    entry = try_it(kernel(raising(RuntimeError("no kernel image is available\nsecond line"))))
    assert entry.reason == "its self-test stopped: RuntimeError: no kernel image is available"
    assert not list(card_record(CPU).folder.glob("*.testing"))


def test_out_of_memory_says_nothing_about_the_kernel():
    entry = try_it(kernel(raising(torch.OutOfMemoryError("CUDA out of memory"))))
    assert entry.state == UNTESTED and card_record(CPU).entry("tried") is None
    assert try_it(kernel()).state == PASSED


def test_a_lost_context_is_kept_and_raised(monkeypatch):
    monkeypatch.setattr(validation, "is_context_lost", lambda device: True)
    with pytest.raises(ContextLost, match=r"testing tried .*restart"):
        try_it(kernel(raising(RuntimeError("an illegal memory access was encountered"))))
    assert card_record(CPU).entry("tried").state == FAILED


DIES = """
import os, sys
sys.path.insert(0, {tests!r})
import conftest
from comfyui_vc_attention.kernels import AttentionProblem, device_record, registry, validation
from comfyui_vc_attention.kernels.benchmark_peers import PEERS
from comfyui_vc_attention.kernels.registry import KernelSpec, Stages, kernel_named
from pathlib import Path
device_record.cache_folder = lambda: Path({cache!r})
device_record.surroundings = lambda: (("torch", "any"),)
spec = KernelSpec("tried", ("int8_int8",), lambda: Stages(lambda *a, **o: os._exit(9), None), lambda p: None)
validation.validate(spec, "cpu")
"""


def test_a_kernel_that_killed_the_process_is_off_at_the_next_start(cache, pack_root):
    program = DIES.format(tests=str(pack_root / "tests"), cache=str(cache))
    assert subprocess.run([sys.executable, "-c", program]).returncode == 9
    assert list(card_record(CPU).folder.glob("tried.testing"))
    entry = card_record(CPU).entry("tried")
    assert entry.state == CRASHED and "process ended while this kernel was tried" in entry.reason
    assert not list(card_record(CPU).folder.glob("tried.testing"))
    assert try_it(kernel(raising(RuntimeError("never launched again")))) == entry
    card_record(CPU).forget("tried")
    assert try_it(kernel()).state == PASSED


def test_a_crash_is_seen_by_the_next_try_itself(cache, pack_root):
    program = DIES.format(tests=str(pack_root / "tests"), cache=str(cache))
    subprocess.run([sys.executable, "-c", program])
    assert try_it(kernel(raising(RuntimeError("never launched again")))).state == CRASHED


def test_a_long_call_that_goes_wrong_fails():
    def wrong_when_long(operands):
        out, lse = REFERENCE.attend(operands)
        return (out * 2 if out.shape[2] > 40 else out), lse

    entry = try_it(kernel(wrong_when_long))
    assert entry.state == FAILED and "at 64 tokens, limit 0.03" in entry.reason


def test_timing_stops_where_memory_ends(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    assert time_kernel(kernel(), torch.device("cuda", 0), (64,), lambda: None) == []


@pytest.mark.parametrize(
    ("ours", "expected"),
    [((3, 3, 3), None), ((1, 1, 1), 10), ((3, 1, 1), 20), ((1, 3, 1), 30), ((1, 1, 3), None), ((), None)],
)
def test_least_tokens_is_where_winning_begins_for_good(ours, expected):
    assert least_tokens([Speed(10 * (i + 1), t, 2) for i, t in enumerate(ours)]) == expected


def test_steps_do_not_pass_the_promise():
    seen = []
    try_it(replace(kernel(), why_not=lambda problem: None), advance=lambda: seen.append(1))
    assert len(seen) <= validation.steps(CASES, (64,))


class Cancelled(Exception):
    """What a host raises when its user cancels."""


def test_cancelling_while_building_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(validation, "build_ahead", lambda spec, device, advance: advance())
    with pytest.raises(Cancelled):
        try_it(kernel(), waiting=raising_now)
    assert not list(card_record(CPU).folder.glob("*"))


def test_what_is_built_ahead_is_what_the_card_needs_for_this_kernel(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(validation, "compile_ahead", lambda wanted, advance: asked.extend(wanted))
    validation.build_ahead(kernel_named("cuda_int8_int8_sm90"), torch.device("cuda", 0))
    names = {source.name for source, _, _ in asked}
    assert names == {"cuda_int8_int8_sm90.cu", "cuda_kmeans.cu", "cuda_sm90.cu"}


def test_comfy_kitchen_is_timed_where_it_runs(monkeypatch):
    kitchen = next(peer for peer in PEERS if peer.name.startswith("comfy-kitchen"))
    there = replace(kitchen, attend=PEERS[0].attend, why_not=lambda q: None)
    monkeypatch.setattr(validation, "PEERS", (PEERS[0], there))
    entry = try_it(kernel())
    assert entry.speeds[0].comfy_kitchen > 0 and "comfy-kitchen INT8" in str(entry.speeds[0])
    monkeypatch.setattr(validation, "PEERS", (PEERS[0], kitchen))
    assert try_it(kernel(name="other")).speeds[0].comfy_kitchen is None


# what is tried, and in which order


@pytest.fixture
def rows(monkeypatch):
    """Four rows: the fast recipe twice, the faithful one, and one that only its name reaches."""
    fast = replace(kernel(name="fast"), numerics=("int8_fp8",))
    by_name = replace(kernel(name="by_name"), automatic=lambda problem: False)
    made = (fast, replace(fast, name="next"), kernel(name="faithful"), by_name, kernel_named("reference"))
    monkeypatch.setattr(registry, "KERNELS", made)
    monkeypatch.setattr(validation, "KERNELS", made)
    return made


HOPPER = AttentionProblem.self_attention(8192, device_type="cuda", capability=(9, 0), device_name="H200")


def tried(problem, also=(), outcomes=None):
    """Names in their order, where a kernel's outcome is passed unless told otherwise."""
    names = []
    for spec in validation.yet_to_try(problem, also):
        names.append(spec.name)
        state = (outcomes or {}).get(spec.name, PASSED)
        if state != UNTESTED:
            device_record.record_of("H200", (9, 0)).save(device_record.Entry(spec.name, state, "because"))
    return names


def test_what_auto_takes_by_any_setting_is_tried_first_choice_first(rows):
    assert tried(HOPPER) == ["fast", "faithful"]
    assert tried(HOPPER) == []


def test_a_kernel_that_fails_is_followed_by_the_next_that_auto_takes(rows):
    assert tried(HOPPER, outcomes={"fast": FAILED}) == ["fast", "next", "faithful"]


def test_too_little_memory_does_not_try_for_ever(rows):
    assert tried(HOPPER, outcomes={"fast": UNTESTED}) == ["fast", "faithful"]


def test_more_rows_are_tried_by_name(rows):
    names = [spec.name for spec in rows]
    assert tried(HOPPER, names) == ["fast", "faithful", "next", "by_name"]


def test_a_user_who_cancels_leaves_nothing_behind():
    with pytest.raises(Cancelled):
        try_it(kernel(), advance=raising_now)
    assert card_record(CPU).entry("tried") is None
    assert not list(card_record(CPU).folder.glob("*"))


def raising_now():
    raise Cancelled


def test_i01_i17_without_a_c_compiler_a_triton_kernel_is_off_with_the_reason():
    error = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
    assert "Failed to find C compiler" in try_it(kernel(raising(error))).reason
