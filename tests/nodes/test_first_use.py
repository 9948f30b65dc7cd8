import logging
import sys
import types
from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels import AttentionProblem, VCConfig, device_record, registry
from comfyui_vc_attention.kernels.registry import KernelSpec, Stages, kernel_named
from comfyui_vc_attention.kernels.selftest import Case
from comfyui_vc_attention.kernels.validation import validate
from comfyui_vc_attention.nodes import first_use
from comfyui_vc_attention.nodes.first_use import choose_tested, with_measured_tokens
from comfyui_vc_attention.nodes.patch_settings import PatchSettings

REFERENCE = kernel_named("reference").load()
CPU = torch.device("cpu")
CASES = (Case("plain", (1, 1, 40, 128), 40, means=False),)
AUTO = PatchSettings(VCConfig())
# a CPU that calls itself a card, so that it has a record
PROBLEM = AttentionProblem.self_attention(8192, device_type="cpu", device_name="cpu")


class Cancelled(Exception):
    """What ComfyUI raises when the user cancels."""


def noise(operands):
    return torch.randn_like(REFERENCE.attend(operands)[0]), None


def spec(name, attend=REFERENCE.attend):
    return KernelSpec(name, ("int8_int8",), lambda: Stages(REFERENCE.prepare, attend), lambda problem: None)


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with three kernels, of which the first is broken, and a ComfyUI that shows progress."""
    state = types.SimpleNamespace(steps=0, total=0, tried=[], cancel=False)
    monkeypatch.setattr(device_record, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(device_record, "_memory", {})
    kernels = (spec("broken", noise), spec("good"), spec("better_never_asked"), kernel_named("reference"))
    monkeypatch.setattr(registry, "KERNELS", kernels)

    def small_validate(kernel, device, advance, waiting):
        state.tried.append(kernel.name)
        assert len(state.tried) < 9, "it never ends"
        return validate(kernel, device, advance, CASES, (), waiting)

    class ProgressBar:
        def __init__(self, total):
            state.total = total

        def update(self, value):
            state.steps += value

    def throw():
        if state.cancel:
            raise Cancelled

    monkeypatch.setattr(first_use, "validate", small_validate)
    package = sys.modules.get("comfy") or types.ModuleType("comfy")
    for name, content in (
        ("utils", {"ProgressBar": ProgressBar}),
        ("model_management", {"throw_exception_if_processing_interrupted": throw}),
    ):
        module = types.ModuleType(f"comfy.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, f"comfy.{name}", module)
        monkeypatch.setattr(package, name, module, raising=False)
    monkeypatch.setitem(sys.modules, "comfy", package)
    return state


def test_n15_auto_takes_the_first_kernel_that_passes_here(machine, caplog):
    with caplog.at_level(logging.INFO, "vc_attention"):
        assert choose_tested(PROBLEM, CPU, AUTO).kernel.name == "good"
    assert machine.tried == ["broken", "good"] and 0 < machine.steps <= 2 * machine.total
    said = "\n".join(caplog.messages)
    assert "broken runs on this card for the first time" in said
    assert "broken: failed its self-test on this card (plain: error" in said and "good: works" in said


def test_the_second_time_nothing_is_tried(machine, monkeypatch):
    choose_tested(PROBLEM, CPU, AUTO)
    monkeypatch.setattr(device_record, "_memory", {})  # another process
    machine.tried.clear()
    assert choose_tested(PROBLEM, CPU, AUTO).kernel.name == "good" and machine.tried == []


def test_an_explicit_kernel_is_tried_and_refused_with_the_reason(machine):
    choice = choose_tested(PROBLEM, CPU, replace(AUTO, kernel="broken"))
    assert choice.kernel is None and choice.reason.startswith("broken: failed its self-test on this card")
    assert machine.tried == ["broken"]


def test_without_a_card_nothing_is_tried(machine):
    problem = replace(PROBLEM, device_name="")
    assert choose_tested(problem, CPU, AUTO).kernel.name == "broken" and machine.tried == []


def test_nothing_is_tried_while_a_graph_is_recorded(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choose_tested(PROBLEM, torch.device("cuda", 0), AUTO)
    assert machine.tried == []


def test_too_little_memory_is_said_and_tried_again(machine, monkeypatch):
    def no_memory(operands):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(registry, "KERNELS", (spec("good", no_memory),))
    choice = choose_tested(PROBLEM, CPU, AUTO)
    assert choice.kernel is None and choice.reason == "good: not enough free GPU memory to test it"
    assert choose_tested(PROBLEM, CPU, replace(AUTO, kernel="good")).kernel.name == "good"
    assert machine.tried == ["good", "good"]


def test_cancelling_stops_it(machine):
    machine.cancel = True
    with pytest.raises(Cancelled):
        choose_tested(PROBLEM, CPU, AUTO)


def test_what_was_measured_reaches_the_settings():
    choice = choose_tested(PROBLEM, CPU, AUTO)
    record = device_record.record_of("cpu", None)
    record.save(replace(record.entry("good"), min_tokens=4096))
    assert with_measured_tokens(AUTO, PROBLEM, choice).shortest == 4096
    assert with_measured_tokens(AUTO, replace(PROBLEM, device_name=""), choice) == AUTO


@pytest.mark.parametrize("state", ["passed", "failed"])
def test_what_another_process_wrote_meanwhile_is_taken(machine, state, monkeypatch):
    device_record.known(PROBLEM, "good")  # this process remembers: nothing
    record = device_record.record_of("cpu", None)
    broken = device_record.Entry("broken", state, "by another process")
    record.save(broken)
    monkeypatch.setattr(device_record, "_memory", {("cpu", "None", "broken"): None})
    choice = choose_tested(PROBLEM, CPU, replace(AUTO, kernel="broken"))
    assert (choice.kernel is None) == (state == "failed")
