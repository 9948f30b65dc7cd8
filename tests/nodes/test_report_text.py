from pathlib import Path

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, device_record
from comfyui_vc_attention.nodes.pack_version import pack_version
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.report_text import report_text, without_paths
from comfyui_vc_attention.nodes.run_report import RunReport


@pytest.fixture
def report():
    report = RunReport("Wan", 20, PatchSettings(VCConfig(), exact_blocks=frozenset({0, 39})))
    for step in range(3):
        report.add_taken("triton_int8_fp8 int8_fp8", 32760, 0 if step == 0 else None)
        report.record.add(step, 0, "triton_int8_fp8 int8_fp8")
    report.add_declined("kept exact by exact_blocks", video=True)
    report.add_declined("cross-attention")
    report.record.milliseconds["triton_int8_fp8 int8_fp8"] = 36.0
    report.record.timed_calls["triton_int8_fp8 int8_fp8"] = 3
    report.record.energy = {(0, 0): (0.08, 0.36)}
    return report


def test_report_tells_machine_calls_times_energy_and_settings(report):
    text = report_text([report])
    for part in (
        f"VC-Attention {pack_version()}",
        "torch ",
        "3 of 4 video attention calls taken",
        "0.04 s, 12.00 ms each",
        "left alone: cross-attention",
        "36% of the value energy, 8% in token order",
        "exact_blocks 0,39",
    ):
        assert part in text


def test_steps_and_blocks_are_told_in_spans(report, make_report):
    text = report_text([report])
    kernel = "triton_int8_fp8 int8_fp8"
    assert f"  steps: 1 {kernel}, grouped; 2-3 {kernel}\n" in text and f"  blocks: 0 {kernel}\n" in text
    text = report_text([make_report(steps=20, blocks=40)])
    assert f"  blocks: 0 kept exact by exact_blocks; 1-39 {kernel}\n" in text
    assert f"  steps: 1-5 {kernel} and kept exact by exact_blocks, grouped; 6-20 " in text


def test_many_spans_are_cut(make_report):
    report = make_report(steps=60, blocks=2)
    for step in range(0, 60, 2):
        report.record.add(step, 1, "something else")
    (line,) = [line for line in report_text([report]).splitlines() if line.startswith("  steps:")]
    assert line.endswith("; ...") and line.count(";") == 12


def test_two_runs_share_one_machine_line(report):
    assert report_text([report, report]).count("torch ") == 1


@pytest.mark.parametrize(
    "text, clean",
    [
        ("/home/ann/ComfyUI/custom_nodes/Other.nodes.patch on blocks", "Other.nodes.patch on blocks"),
        (r"C:\Users\Ann Lee\ComfyUI\custom_nodes\Other failed", "Other failed"),
        ("cannot open '/root/.cache/x/kernel.cubin'", "cannot open 'kernel.cubin'"),
        ("~/models/wan.safetensors", "wan.safetensors"),
        ("12 and/or 13, 3/4 of it", "12 and/or 13, 3/4 of it"),
        (f"{Path.home()} is home", "~ is home"),
    ],
)
def test_no_paths_and_no_user_names(text, clean):
    assert without_paths(text) == clean


def test_failures_are_cleaned_too(report):
    report.add_failure("triton", "no such file: /home/ann/.triton/cache/x.so")
    text = report_text([report])
    assert "ann" not in text.split("! ")[1].splitlines()[0] and "x.so" in text


@pytest.fixture
def on_card(tmp_path, monkeypatch):
    """on_card(name, capability): its record, which holds nothing, on a machine that seems to have it."""

    def be(*card):
        monkeypatch.setattr(device_record, "cache_folder", lambda: tmp_path)
        monkeypatch.setattr(device_record, "_memory", {})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: card[0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: card[1])
        return device_record.record_of(*card)

    return be


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_datacenter_blackwell_is_experimental_until_a_self_test_ran_there(
    finished_report, on_card, capability
):
    record = on_card("NVIDIA B200", capability)
    assert "experimental: the kernels are compiled for such cards" in report_text([finished_report])
    record.save(device_record.Entry("triton_fp8_fp8", "passed"))
    text = report_text([finished_report])
    assert "experimental" not in text and "triton_fp8_fp8: tested on this card" in text


def test_other_cards_are_not_experimental(finished_report, on_card):
    on_card("NVIDIA H200", (9, 0))
    assert "experimental" not in report_text([finished_report])


def test_the_report_says_what_the_self_test_on_this_card_found(finished_report, on_card):
    speeds = [device_record.Speed(32768, 10.0, 25.0, 12.0)]
    record = on_card("NVIDIA GeForce RTX 4090", (8, 9))
    record.save(device_record.Entry("triton_int8_int8", "passed", speeds=speeds, min_tokens=4096))
    record.save(device_record.Entry("triton_int8_fp8", "failed", "failed its self-test on this card"))
    text = report_text([finished_report])
    assert "triton_int8_int8: tested on this card; 2.50x PyTorch, 1.20x comfy-kitchen INT8" in text
    assert "triton_int8_fp8: failed its self-test on this card" in text
