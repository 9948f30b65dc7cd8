"""install.py says the truth about every machine it can meet, and exits 0 on all of them."""

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

RUNNER = "import sys, runpy; {before}; sys.argv[:] = sys.argv[1:]; " + (
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def run(script, before="pass", arguments=(), **environment):
    """stdout of install.py in a process of its own, after some Python of the test's."""
    command = [sys.executable, "-c", RUNNER.format(before=before), str(script), *arguments]
    environment = {"CUDA_VISIBLE_DEVICES": "", **environment}  # a card would be tested, for minutes
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def fake_torch(cards=(), cuda="13.0", hip=None, mps=False, warning=None):
    """The part of torch that cards_of asks."""

    def is_available():
        if warning:
            import warnings

            warnings.warn(warning, stacklevel=2)
        return bool(cards)

    def properties(i):
        name, capability, gib = cards[i]
        return SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=gib * 2**30)

    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=is_available, device_count=lambda: len(cards), get_device_properties=properties
        ),
        version=SimpleNamespace(cuda=cuda, hip=hip),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
    )


def test_i07_runs_with_an_empty_environment_from_a_folder_with_spaces(pack_root, tmp_path):
    folder = tmp_path / "custom nodes" / "vc.attention main"
    shutil.copytree(pack_root, folder, ignore=shutil.ignore_patterns(".*", "tests", "__pycache__"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    out = run(folder / "install.py", PATH="")
    assert "VC-Attention 0." in out
    assert "reference" in out
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before


def test_letters_that_the_console_has_not_do_not_stop_it(pack_root, tmp_path):
    folder = tmp_path / "видео 文"
    shutil.copytree(pack_root, folder, ignore=shutil.ignore_patterns(".*", "tests", "__pycache__"))
    out = run(folder / "install.py", arguments=("--dry-run",), PATH="", PYTHONIOENCODING="ascii")
    assert "please report" not in out and r"\u6587" in out


def test_without_torch_names_the_python_to_use(pack_root):
    out = run(pack_root / "install.py", "sys.modules['torch'] = None", PATH="")
    assert "torch cannot be imported" in out
    assert sys.executable in out


def test_leaves_our_folders_off_the_import_path(pack_root):
    check = (
        "import atexit, importlib.util as u; "
        "atexit.register(lambda: print('found:', u.find_spec('kernels'), u.find_spec('nodes')))"
    )
    out = run(pack_root / "install.py", f"sys.path.insert(0, {str(pack_root)!r}); {check}", PATH="")
    assert "found: None None" in out


def test_a_surprise_is_shown_and_still_exits_0(pack_root):
    before = "import torch; torch.cuda.is_available = lambda: 1 / 0"
    command = [sys.executable, "-c", RUNNER.format(before=before), str(pack_root / "install.py")]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr
    assert "please report" in done.stdout


@pytest.mark.parametrize(
    ("machine", "card", "reason"),
    [
        (fake_torch(cuda=None), "no GPU", "built without CUDA"),
        (fake_torch(), "no GPU", "finds no GPU"),
        (fake_torch(warning="The NVIDIA driver is too old"), "no GPU", "driver is too old"),
        (fake_torch(cuda=None, mps=True), "Apple GPU", ""),
        (fake_torch([("RX 7900", (11, 0), 24)], cuda=None, hip="7.1"), "RX 7900, 24 GiB", ""),
        (fake_torch([("RTX 4090", (8, 9), 24)]), "RTX 4090, sm_89, 24 GiB", ""),
    ],
    ids=["cpu torch", "no gpu", "old driver", "apple", "rocm", "nvidia"],
)
def test_devices(install, machine, card, reason):
    (found,), why = install.cards_of(machine)
    assert str(found) == card
    assert reason in why
    assert bool(reason) == bool(why)


def test_two_cards_of_two_kinds(install):
    cards, _ = install.cards_of(fake_torch([("RTX 5090", (12, 0), 32), ("RTX 2080", (7, 5), 8)]))
    assert [card.capability for card in cards] == [(12, 0), (7, 5)]


@pytest.mark.parametrize(
    ("device", "capability", "refusal"),
    [
        ("cuda", (7, 5), "sm_75"),
        ("rocm", None, "an AMD GPU"),
        ("mps", None, "an Apple GPU"),
        ("cpu", None, "a CPU"),
    ],
)
def test_what_cannot_run_says_why(install, device, capability, refusal):
    rows, automatic = install.kernel_rows(install.Card("x", device, capability))
    assert automatic == ""
    for name, reason in rows:
        assert name == "reference" or refusal in reason


def test_a_supported_card_gets_a_kernel(install):
    rows, automatic = install.kernel_rows(install.Card("H200", "cuda", (9, 0)))
    assert automatic
    assert dict(rows)[automatic] == ""


def readme_offers(text):
    """By sm number, what the README's table of cards says: kernels as "cuda int8_int8"."""
    table = text.partition("**Does it run on my card?**")[2].strip().partition("\n\n")[0]
    eights, offers = {}, {}
    for line in table.splitlines()[2:]:
        cards, eight, four, _ = line.strip("|").split("|")
        if alike := re.search(r"as (RTX \d+)", eight):
            eight = next(cell for name, cell in eights.items() if alike[1] in name)
        eights[cards] = eight
        first, _, second = eight.partition(";")
        cuda = re.findall(r"`(\w+)`", four) + (re.findall(r"`(\w+)`", first) if "CUDA" in first else [])
        triton = re.findall(r"`(\w+)`", second if "CUDA" in first else first)
        triton += [name for name in cuda if "the same" in second and name != "nvfp4"]
        for number in re.findall(r"sm_(\d+)", cards):
            offers[number] = {f"cuda {name}" for name in cuda} | {f"triton {name}" for name in triton}
    return offers


def test_the_readmes_table_of_cards_is_true(install, pack_root, monkeypatch):
    monkeypatch.setattr("comfyui_vc_attention.kernels.registry._triton_missing", lambda: None)
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.why_no_build", lambda: None)
    offers = readme_offers((pack_root / "README.md").read_text(encoding="utf-8"))
    assert set(offers) == {"80", "86", "89", "90", "100", "103", "120"}
    for number, said in offers.items():
        rows, automatic = install.kernel_rows(install.card_of_arch(number))
        found = {re.sub(r"_sm\d+$", "", name).replace("_", " ", 1) for name, reason in rows if not reason}
        if number in ("100", "103"):  # what else runs there is slow: a setting may ask for it
            assert said == {automatic.replace("_", " ", 1)}
        else:
            assert found - {"reference"} == said, number


def test_i01_missing_triton_is_named_with_the_command_that_mends_it(install, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "not usable" in install.triton_version()
    out = "\n".join(install.kernel_lines(torch, install.Card("RTX 3090", "cuda", (8, 6), 24.0)))
    assert "needs Triton" in out
    assert install.pip_command(install.triton_package(torch)) in out


# With a card: what is built, kept and said. The card is a CPU that calls itself one.

CARD = ("NVIDIA GeForce RTX 4090", (8, 9))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The record of CARD on an empty disk, as if Triton and NVRTC were there."""
    from comfyui_vc_attention.kernels import device_record, registry

    monkeypatch.setattr(device_record, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(device_record, "_memory", {})
    monkeypatch.setattr(registry, "_triton_missing", lambda: None)
    return device_record.record_of(*CARD)


def entry(*fields, **more):
    from comfyui_vc_attention.kernels.device_record import Entry

    kernel, state, *rest = (*fields, "passed") if len(fields) == 1 else fields
    return Entry(kernel, state, *rest, **more)


def speed(tokens, ours, pytorch, kitchen=None):
    from comfyui_vc_attention.kernels.device_record import Speed

    return Speed(tokens, ours, pytorch, kitchen)


def lines_of(install, details=False):
    return "\n".join(install.kernel_lines(torch, install.Card(CARD[0], "cuda", CARD[1], 24.0), details))


def test_table_tells_what_was_tested_and_how_fast_it_is(install, kept):
    kept.save(entry("triton_int8_int8", speeds=[speed(32768, 10.0, 25.0, 12.0)], min_tokens=4096))
    out = lines_of(install)
    assert "tested on this card; 2.50x PyTorch, 1.20x comfy-kitchen INT8 at 32,768 tokens" in out
    assert "faster from 4,096 on" in out and "The node's auto takes triton_int8_int8." in out


@pytest.mark.parametrize(("capability", "said"), [((10, 0), True), ((10, 3), True), ((12, 0), False)])
def test_cards_that_nobody_told_of_a_test_on_are_experimental(install, monkeypatch, capability, said):
    monkeypatch.setattr("comfyui_vc_attention.kernels.registry._triton_missing", lambda: None)
    lines = install.kernel_lines(torch, install.Card("a card", "cuda", capability))
    assert any("never run on one" in line for line in lines) == said


def test_untested_kernels_are_never_picked_where_others_were_tested(install, kept):
    kept.save(entry("triton_int8_fp8"))
    out = lines_of(install)
    assert "no fast kernel can run here" in out and "triton_int8_int8  " in out


def test_a_slower_kernel_is_left_by_auto_and_that_is_said(install, kept):
    kept.save(entry("triton_int8_int8", speeds=[speed(32768, 30.0, 25.0)]))
    out = lines_of(install)
    assert "0.83x PyTorch at 32,768 tokens; so auto leaves it" in out and "no fast kernel" in out


def test_n15_a_failed_kernel_says_why_and_how_to_try_again(install, kept):
    kept.save(
        entry(
            "triton_int8_int8", "failed", "failed its self-test on this card (means: error 1.4, limit 0.015)"
        )
    )
    out = lines_of(install)
    assert "no   failed its self-test on this card (means: error 1.4" in out
    assert f"To test again what failed: {install.this_command('--retest')}" in out
    assert sys.executable in out and str(install.ROOT / "install.py") in out


def test_report_holds_every_check_and_no_path(install, kept, monkeypatch, capsys):
    reason = "its self-test stopped: OSError: /home/jane/ComfyUI/custom_nodes/x.so is missing on this card"
    kept.save(
        entry(
            "triton_int8_int8", "failed", reason, ["plain: error 0.0100, limit 0.03"], [speed(2048, 1.0, 2.0)]
        )
    )
    monkeypatch.setattr(
        install, "cards_of", lambda torch: ([install.Card(CARD[0], "cuda", CARD[1], 24.0)], "")
    )
    monkeypatch.setattr(install, "try_kernels", lambda *a: pytest.fail("a report tries nothing"))
    install.main(["--report"])
    out = capsys.readouterr().out
    assert "- plain: error 0.0100, limit 0.03" in out and "- 2,048 tokens: 1.000 ms, PyTorch 2.000 ms" in out
    assert "x.so is missing" in out and "RTX 4090" in out
    assert "jane" not in out and str(Path.home()) not in out and sys.executable not in out


def set_rows(monkeypatch, *names):
    from comfyui_vc_attention.kernels import registry, validation

    rows = [replace(registry.kernel_named(name), load=None) for name in names]
    for module in (registry, validation):
        monkeypatch.setattr(module, "KERNELS", rows)
    monkeypatch.setattr("comfyui_vc_attention.kernels.KERNELS", rows)


@pytest.fixture
def two_kernels(one_kernel, monkeypatch):
    """One kernel that auto takes by some setting, and one that it does not."""
    from comfyui_vc_attention.kernels import registry

    set_rows(monkeypatch, "triton_int8_int8", "reference")
    by_name = replace(registry.KERNELS[0], name="triton_fp8_fp8", automatic=lambda problem: False)
    registry.KERNELS.insert(1, by_name)
    return one_kernel


@pytest.fixture
def one_kernel(install, kept, monkeypatch):
    """A machine with one CUDA card and two kernels, of which validate says what the test sets."""
    from comfyui_vc_attention.kernels import validation

    def kept_or_passed(spec, device):
        known = kept.entry(spec.name)
        if known is None:
            kept.save(entry(spec.name))
        return kept.entry(spec.name)

    state = SimpleNamespace(validate=kept_or_passed)
    set_rows(monkeypatch, "triton_int8_int8", "reference")
    monkeypatch.setattr(validation, "card_record", lambda device: kept)
    monkeypatch.setattr(validation, "validate", lambda spec, device: state.validate(spec, device))
    monkeypatch.setattr(
        install, "cards_of", lambda torch: ([install.Card(CARD[0], "cuda", CARD[1], 24.0)] * 2, "")
    )
    return state


def test_equal_cards_are_tried_once_and_the_second_run_tries_nothing(install, one_kernel, capsys):
    install.main([])
    first = capsys.readouterr().out
    assert first.count("trying triton_int8_int8") == 1 and first.count("Kernels on") == 1
    assert "auto takes triton_int8_int8" in first and "gpu 1" in first
    install.main([])
    assert "trying" not in capsys.readouterr().out


@pytest.fixture
def machine(install, kept, monkeypatch):
    """visible: the cards that torch numbers, may be changed; tried: cards that a kernel was tried on."""
    from comfyui_vc_attention.kernels import validation

    state = SimpleNamespace(visible=[], tried=[])

    def validate(spec, device):
        state.tried.append(torch.cuda.get_device_name(device))
        validation.card_record(device).save(entry(spec.name))
        return entry(spec.name)

    def cards_of(torch):
        return [install.Card(name, "cuda", c, 24.0, i) for i, (name, c) in enumerate(state.visible)], ""

    set_rows(monkeypatch, "triton_int8_int8", "reference")
    monkeypatch.setattr(validation, "validate", validate)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: state.visible[device.index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.visible[device.index][1])
    monkeypatch.setattr(install, "cards_of", cards_of)
    return state


NEWER = ("NVIDIA GeForce RTX 5090", (12, 0))


def test_each_of_two_cards_is_tried_and_has_its_table(install, machine, capsys):
    machine.visible[:] = [CARD, NEWER]
    install.main([])
    out = capsys.readouterr().out
    assert machine.tried == [CARD[0], NEWER[0]]
    for name, capability in machine.visible:
        assert f"Kernels on {name}, sm_{capability[0]}{capability[1]}, 24 GiB:" in out


def test_cuda_visible_devices_changed_and_no_card_is_taken_for_another(install, machine, capsys):
    """The number of a card is not its name: what was tested follows the card."""
    for machine.visible[:] in ([CARD], [NEWER, CARD], [CARD, NEWER], [NEWER]):
        install.main([])
    assert machine.tried == [CARD[0], NEWER[0]]
    assert capsys.readouterr().out.count("trying ") == 2


def test_a_line_for_each_kernel_and_the_time_of_all(install, one_kernel, kept, capsys):
    def passed(spec, device):
        kept.save(entry(spec.name, seconds=4.5, build_seconds=2.0))
        return kept.entry(spec.name)

    one_kernel.validate = passed
    install.main([])
    out = capsys.readouterr().out
    assert "trying triton_int8_int8 on NVIDIA GeForce RTX 4090 ... passed: tested and timed in 2.5 s" in out
    assert re.search(r"This took [\d.]+ s, .* start, 2\.0 s building, 2\.5 s testing and timing\.\n$", out)
    install.main([])
    assert re.search(r"This took [\d.]+ s, [\d.]+ s of it for torch to start\.\n$", capsys.readouterr().out)


def test_a_kernel_that_auto_never_takes_is_tried_only_with_all(install, two_kernels, capsys):
    install.main([])
    out = capsys.readouterr().out
    assert out.count("trying ") == 1 and "trying triton_int8_int8" in out
    assert "taken by name only" not in out and "takes it by name only, --all tests it" in out
    install.main(["--all"])
    out = capsys.readouterr().out
    assert out.count("trying ") == 1 and "trying triton_fp8_fp8" in out
    install.main(["--retest"])
    assert capsys.readouterr().out.count("trying ") == 2


def test_retest_forgets_what_was_known(install, one_kernel, kept, capsys):
    kept.save(
        entry("triton_int8_int8", "crashed", "the process ended while this kernel was tried on this card")
    )
    install.main([])
    assert "no   the process ended while this kernel was tried" in capsys.readouterr().out
    install.main(["--retest"])
    out = capsys.readouterr().out
    assert "trying triton_int8_int8" in out and "auto takes triton_int8_int8" in out


def test_a_lost_context_ends_the_trying_with_the_command_to_go_on(install, one_kernel, capsys):
    from comfyui_vc_attention.kernels.validation import ContextLost

    def lost(spec, device):
        raise ContextLost("testing triton_int8_int8 left the GPU unusable for this process")

    one_kernel.validate = lost
    install.main([])
    assert f"unusable for this process. To go on: {install.this_command()}" in capsys.readouterr().out


def test_too_little_memory_is_said_with_the_command_to_try_again(install, one_kernel, capsys):
    one_kernel.validate = lambda spec, device: entry(
        spec.name, "untested", "not enough free GPU memory to test it"
    )
    install.main([])
    assert "not enough free GPU memory to test it. Close other programs, then:" in capsys.readouterr().out


# Dry run


def test_dry_run_shows_and_compiles_what_another_card_would_get(install, pack_root):
    pytest.importorskip("triton")
    out = run(pack_root / "install.py", arguments=("--dry-run", "--arch", "sm_86"), PATH="")
    assert "Kernels that a card, sm_86 would get, compiled here:" in out
    assert "functions, up to" in out and "does not compile" not in out
    assert "auto takes cuda_int8_int8" in out or "CUDA builds bring, was not found" in out


NO_NVRTC = (
    "import pathlib as p; g = p.Path.glob; p.Path.glob = lambda s, n: iter(()) if 'nvrtc' in n else g(s, n)"
)


def test_without_nvrtc_the_triton_kernels_are_left_and_the_way_to_more_is_said(pack_root):
    pytest.importorskip("triton")
    out = run(pack_root / "install.py", NO_NVRTC, ("--dry-run", "--arch", "sm_86"), PATH="")
    reason = "NVRTC, the CUDA compiler library that torch's CUDA builds bring, was not found"
    assert f"  cuda_int8_int8       no   {reason}" in out and f"  nvrtc   {reason}" in out
    assert "  triton_int8_int8     yes  " in out and "auto takes triton_int8_int8." in out
    assert re.search(r"For the CUDA kernels: .* install nvidia-cuda-nvrtc\S*\n$", out)


def test_dry_run_without_a_card_asks_for_one(install, monkeypatch, capsys):
    monkeypatch.setattr(install, "cards_of", lambda torch: ([install.Card("no GPU", "cpu")], "none"))
    install.main(["--dry-run"])
    assert install.this_command("--dry-run --arch sm_120") in capsys.readouterr().out


@pytest.mark.parametrize(
    "given", [["--report", "--all"], ["--report", "--arch", "sm_86"], ["--dry-run", "--retest"]]
)
def test_options_that_exclude_each_other_are_refused(install, given, capsys):
    with pytest.raises(SystemExit):
        install.main(given)
    assert "one at a time" in capsys.readouterr().err


def test_dry_run_on_an_unknown_card_says_why_not(install, monkeypatch):
    lines = install.dry_run_lines(install.card_of_arch("sm_75"))
    assert all("sm_75" in line for line in lines[2:-1]) and lines[-1].endswith("takes none of them.")


def test_what_does_not_compile_is_said(install, monkeypatch):
    from comfyui_vc_attention.kernels import dry_run

    monkeypatch.setattr(dry_run, "compiled", lambda *a: 1 / 0)
    assert install.cost("cuda_x", (9, 0)) == "no   does not compile: division by zero"


@pytest.mark.parametrize(
    ("text", "capability"),
    [("sm_120", (12, 0)), ("sm_90a", (9, 0)), ("8.6", (8, 6)), ("103", (10, 3)), ("sm_120f", (12, 0))],
)
def test_architectures_are_read_as_people_write_them(install, text, capability):
    assert install.card_of_arch(text).capability == capability


def test_an_architecture_that_is_none_is_refused(install):
    with pytest.raises(argparse.ArgumentTypeError, match="must look like sm_120, got 'ampere'"):
        install.card_of_arch("ampere")


def test_runs_from_the_archive_that_users_get(pack_root, tmp_path):
    if shutil.which("git") is None or not (pack_root / ".git").exists():
        pytest.skip("needs git and a git checkout")
    zipped, folder = tmp_path / "pack.zip", tmp_path / "custom nodes" / "vc-attention"
    subprocess.run([sys.executable, str(pack_root / "dev.py"), "archive", str(zipped)], check=True)
    shutil.unpack_archive(zipped, folder)
    out = run(folder / "install.py", "sys.modules['triton'] = None", PATH="")
    assert "triton  not usable" in out and "reference" in out
