"""What is known about a card survives other processes, other versions, damage and read-only disks."""

import json
import subprocess
import sys
import threading
import types
from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels import AttentionProblem, choose_kernel, device_record, registry
from comfyui_vc_attention.kernels.attend.cuda_build import CudaBuildError
from comfyui_vc_attention.kernels.device_record import CRASHED, FAILED, PASSED, Entry, Speed, known, record_of

CARD = ("NVIDIA H200", (9, 0))
GOOD = Entry("k", PASSED, "", ["plain: error 0.0100, limit 0.03"], [Speed(2048, 1.0, 2.0, 1.5)], 2048, 3.5)
PROBLEM = AttentionProblem.self_attention(256, device_type="cuda", capability=CARD[1], device_name=CARD[0])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(device_record, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(device_record, "_memory", {})
    return tmp_path


@pytest.fixture
def another_process(monkeypatch):
    """another_process(): from here on nothing is remembered but what lies on the disk."""
    return lambda: monkeypatch.setattr(device_record, "_memory", {})


def test_an_entry_comes_back_whole(another_process):
    record_of(*CARD).save(GOOD)
    another_process()
    assert record_of(*CARD).entry("k") == GOOD and known(PROBLEM, "k") == GOOD
    assert record_of(*CARD).entries(["k", "other"]) == {"k": GOOD}


def test_a_card_is_described_beside_its_entries():
    record_of(*CARD).save(GOOD)
    described = json.loads((record_of(*CARD).folder / "card.json").read_text())
    assert described["card"] == "NVIDIA H200" and described["torch"] == torch.__version__
    assert set(described) == {"card", "capability", "driver", "torch", "triton", "nvrtc", "sources"}


@pytest.mark.parametrize("what", ["driver", "torch", "triton", "nvrtc", "sources"])
def test_another_version_is_another_card(monkeypatch, what):
    record_of(*CARD).save(GOOD)
    changed = tuple((n, "other" if n == what else v) for n, v in device_record.surroundings())
    monkeypatch.setattr(device_record, "surroundings", lambda: changed)
    assert record_of(*CARD).entry("k") is None


def test_what_surrounds_a_card_is_asked_of_each(monkeypatch):
    asked = {
        "driver_version": "580.65",
        "nvrtc_version": "13.0",
        "_triton": "triton-3.6.0",
        "source_hash": "a",
    }
    for name, answer in asked.items():
        monkeypatch.setattr(device_record, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    found = dict(device_record.surroundings.__wrapped__())
    assert list(found.items()) == [
        ("driver", "580.65"),
        ("torch", "2.11.0"),
        ("triton", "triton-3.6.0"),
        ("nvrtc", "13.0"),
        ("sources", "a"),
    ]


def test_without_nvrtc_a_card_still_has_a_record(monkeypatch):
    def missing():
        raise CudaBuildError("NVRTC was not found")

    monkeypatch.setattr(device_record, "nvrtc_version", missing)
    assert dict(device_record.surroundings.__wrapped__())["nvrtc"] == "none"


def test_cuda_visible_devices_and_order_do_not_matter():
    record_of(*CARD).save(GOOD)
    assert record_of("NVIDIA GeForce RTX 4090", (8, 9)).entry("k") is None
    assert record_of(*CARD).entry("k") == GOOD


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace('"passed"', '"splendid"'),
        lambda text: text.replace('"k"', '"another"'),
        lambda text: text.replace('"reason"', '"ground"'),
        lambda text: text.replace('"min_tokens": 2048', '"min_tokens": "many"'),
        lambda text: "\x00\xff" * 9,
    ],
)
def test_a_damaged_entry_is_as_good_as_none(damage, another_process):
    record_of(*CARD).save(GOOD)
    another_process()
    path = record_of(*CARD).folder / "k.json"
    path.write_text(damage(path.read_text()))
    assert known(PROBLEM, "k") is None


def test_bytes_that_are_no_text_are_as_good_as_none():
    record_of(*CARD).save(GOOD)
    (record_of(*CARD).folder / "k.json").write_bytes(b"\xff\xfe\x00")
    assert record_of(*CARD).entry("k") is None


def test_an_unwritable_disk_costs_only_the_memory(cache, another_process):
    (cache / "cards").write_text("a file: nothing can be made below it")
    record = record_of(*CARD)
    with record.trying("k") as entry:
        assert entry is None
        record.save(GOOD)
    assert known(PROBLEM, "k") == GOOD
    another_process()
    assert known(PROBLEM, "k") is None


def test_a_mark_lies_there_only_while_a_kernel_is_tried():
    record, mark = record_of(*CARD), record_of(*CARD).folder / "k.testing"
    with record.trying("k") as entry:
        assert entry is None and mark.read_text() == "testing k\n"
    assert not mark.exists()
    with pytest.raises(KeyError), record.trying("k"):
        raise KeyError
    assert not mark.exists() and record.entry("k") is None


HOLDS = """
import sys
sys.path.insert(0, {tests!r})
import conftest
from pathlib import Path
from comfyui_vc_attention.kernels import device_record
device_record.cache_folder = lambda: Path({cache!r})
device_record.surroundings = lambda: (("torch", "any"),)
record = device_record.record_of("NVIDIA H200", (9, 0))
with record.trying("k") as entry:
    print("trying", flush=True)
    if sys.stdin.readline().strip() == "die":
        import os
        os._exit(1)
    record.save(device_record.Entry("k", "passed", "by the other process"))
"""


@pytest.fixture
def other(cache, pack_root, monkeypatch):
    """A process that tries the kernel k until it is told to die or to end."""
    monkeypatch.setattr(device_record, "surroundings", lambda: (("torch", "any"),))
    program = HOLDS.format(tests=str(pack_root / "tests"), cache=str(cache))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout.readline() == "trying\n"
        yield process
        process.kill()


def test_a_kernel_that_another_process_tries_is_neither_known_nor_crashed(other):
    assert record_of(*CARD).entry("k") is None
    assert (record_of(*CARD).folder / "k.testing").exists()


def test_two_processes_try_a_kernel_one_after_the_other(other):
    seen = []

    def wait():
        with record_of(*CARD).trying("k") as entry:
            seen.append(entry)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not seen
    other.stdin.write("end\n")
    other.stdin.flush()
    waiting.join(timeout=30)
    assert seen[0].reason == "by the other process"
    assert not (record_of(*CARD).folder / "k.testing").exists()


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_mark_that_its_last_holder_took_away_is_nobodys(cache, made_anew):
    pytest.importorskip("fcntl")  # an open file cannot be deleted on Windows
    mark = cache / "k.testing"
    file = device_record._open_mark(mark, create=True)
    mark.unlink()
    if made_anew:
        mark.write_text("of the next one")
    with device_record.held(file, mark) as mine:
        assert not mine
    assert mark.exists() == made_anew


def test_waiting_for_another_process_can_be_cancelled(other, monkeypatch):
    def cancel():
        raise KeyError

    monkeypatch.setattr(device_record.time, "sleep", lambda seconds: pytest.fail("nobody was asked"))
    with pytest.raises(KeyError), record_of(*CARD).trying("k", cancel):
        pass
    assert (record_of(*CARD).folder / "k.testing").exists()


def test_a_process_that_died_leaves_its_kernel_off(other):
    other.stdin.write("die\n")
    other.stdin.flush()
    other.wait(timeout=30)
    entry = known(PROBLEM, "k")
    assert entry.state == CRASHED and "install.py --retest" in entry.reason
    assert not (record_of(*CARD).folder / "k.testing").exists()
    record_of(*CARD).forget("k")
    assert record_of(*CARD).entry("k") is None


def test_writers_at_once_leave_whole_entries():
    record = record_of(*CARD)
    writers = [
        threading.Thread(target=record.save, args=(replace(GOOD, reason=str(i) * 5000),)) for i in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set(record.entry("k").reason)) == 1
    assert {path.name for path in record.folder.iterdir()} == {"k.json", "card.json"}


def test_the_source_hash_follows_the_sources(monkeypatch, tmp_path):
    (tmp_path / "a.cu").write_text("1")
    monkeypatch.setattr(device_record, "KERNELS_FOLDER", tmp_path)
    first = device_record.source_hash.__wrapped__()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "b.py").write_text("1")
    assert device_record.source_hash.__wrapped__() == first
    (tmp_path / "a.cu").write_text("2")
    assert device_record.source_hash.__wrapped__() != first


# what choose_kernel makes of it


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(registry, "_triton_missing", lambda: None)
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.why_no_build", lambda: None)


def write(kernel, state=PASSED, reason="", **fields):
    record_of(*CARD).save(Entry(kernel, state, reason, **fields))


def test_without_a_record_auto_is_the_first_row_that_runs(with_triton):
    assert choose_kernel(PROBLEM).kernel.name == "cuda_int8_fp8_sm90"


def test_n15_auto_leaves_a_kernel_that_failed_here(with_triton):
    write("cuda_int8_fp8_sm90", FAILED, "failed its self-test on this card (plain: error 1.4, limit 0.07)")
    write("triton_int8_fp8")
    assert choose_kernel(PROBLEM).kernel.name == "triton_int8_fp8"


def test_auto_takes_only_what_passed_here(with_triton):
    write("cuda_int8_fp8_sm90", CRASHED, "the process ended while it was tried")
    choice = choose_kernel(PROBLEM)
    assert choice.kernel is None
    assert "the process ended" in choice.reason
    untested = "triton_int8_fp8, cuda_fp8_fp8_sm90, triton_fp8_fp8: not tested on this card yet"
    assert f"{untested}, `python install.py --all` does it" in choice.reason
    # the same numerics before a faster kernel of coarser ones
    assert choose_kernel(PROBLEM, untested=True).kernel.name == "triton_int8_fp8"


def test_where_only_untested_kernels_take_the_head_dim_the_command_that_tests_them_is_named(with_triton):
    write("cuda_int8_fp8_sm90")
    narrow = replace(PROBLEM, q_shape=(1, 2, 256, 64), k_shape=(1, 2, 256, 64))
    choice = choose_kernel(narrow)
    assert choice.kernel is None and "`python install.py --all`" in choice.reason
    assert "needs head_dim 128, got 64" in choice.reason
    assert choose_kernel(narrow, "triton_int8_fp8").kernel.name == "triton_int8_fp8"
    write("triton_int8_fp8")
    assert choose_kernel(narrow).kernel.name == "triton_int8_fp8"


def test_auto_leaves_a_kernel_that_is_slower_than_pytorch_here(with_triton):
    write("cuda_int8_fp8_sm90", speeds=[Speed(2048, 2.0, 1.0), Speed(32768, 2.0, 1.5)])
    write("triton_int8_fp8", speeds=[Speed(32768, 1.0, 1.5)], min_tokens=32768)
    assert choose_kernel(PROBLEM).kernel.name == "triton_int8_fp8"
    assert choose_kernel(PROBLEM, "cuda_int8_fp8_sm90").kernel.name == "cuda_int8_fp8_sm90"
    assert "slower than PyTorch's attention on this card (0.75x at 32,768 tokens)" in str(
        known(PROBLEM, "cuda_int8_fp8_sm90").why_not_auto
    )


def test_an_explicit_kernel_that_failed_here_is_refused_with_the_reason(with_triton):
    write("cuda_int8_fp8_sm90", FAILED, "failed its self-test on this card (plain: error 1.4, limit 0.07)")
    choice = choose_kernel(PROBLEM, "cuda_int8_fp8_sm90")
    failed = "failed its self-test on this card (plain: error 1.4, limit 0.07)"
    assert choice.kernel is None and choice.reason == f"cuda_int8_fp8_sm90: {failed}"
    assert choose_kernel(PROBLEM, "triton_int8_fp8").kernel.name == "triton_int8_fp8"


def test_two_cards_have_two_records(with_triton):
    write("cuda_int8_fp8_sm90", FAILED, "no")
    other = replace(PROBLEM, device_name="NVIDIA H100 PCIe")
    assert choose_kernel(other).kernel.name == "cuda_int8_fp8_sm90"


def test_the_installed_triton_is_named_without_importing_it(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    for folder in ("triton_windows-3.5.0.post21.dist-info", "torch-2.9.1.dist-info"):
        (tmp_path / folder).mkdir()
    assert device_record._triton() == "triton_windows-3.5.0.post21"
    (tmp_path / "triton_windows-3.5.0.post21.dist-info").rmdir()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert device_record._triton() == "none"


def test_marks_on_windows_are_locked_by_their_first_byte(monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def locking(number, mode, count):
        assert (mode, count) == ("LK_NBLCK", 1)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = "LK_NBLCK", locking
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    monkeypatch.setattr(device_record, "WINDOWS", True)
    test_a_mark_lies_there_only_while_a_kernel_is_tried()
    with record_of(*CARD).trying("k"):
        assert record_of(*CARD).entry("k") is None
        assert (record_of(*CARD).folder / "k.testing").exists()
