"""What ComfyUI-Manager runs after installing the pack, with ComfyUI's Python; also by hand:

    python install.py                          build, test and time what the node takes on this card, once
    python install.py --retest                 the same, also what was tested before
    python install.py --all                    every kernel that can run here, also those taken by name only
    python install.py --report                 what is known here, to be shared: without names and paths
    python install.py --dry-run --arch sm_120  what such a card would get, compiled but not run

Standard library and torch only. Downloads nothing, starts nothing, and exits 0 on every machine: an installer
that fails would hide a pack that works.
"""

import argparse
import os
import platform
import re
import sys
import time
import traceback
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACK_NAME = "comfyui_vc_attention"
EXPERIMENTAL = "; experimental: compiled for such cards, never run on one"
TRITON_BELOW = {"2.7": 4, "2.8": 5, "2.9": 6, "2.10": 7, "2.11": 7}  # 3.x, by the minor version of torch
TOKENS = 32_768  # of the attention call that the table is about: a video model's

# Python puts a script's folder first; there our nodes/ and kernels/ would shadow other people's modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


@dataclass(frozen=True)
class Card:
    """One kind of device that attention could run on."""

    name: str
    device_type: str  # as torch calls it, except "rocm"
    capability: tuple[int, int] | None = None  # (9, 0) for sm_90; None unless NVIDIA
    memory_gib: float | None = None
    index: int = field(default=0, compare=False)  # of the first of its kind

    def __str__(self):
        parts = [self.name]
        if self.capability:
            parts.append(f"sm_{self.capability[0]}{self.capability[1]}")
        if self.memory_gib:
            parts.append(f"{self.memory_gib:.0f} GiB")
        return ", ".join(parts)


def cards_of(torch) -> tuple[list[Card], str]:
    """The devices that torch sees; and if that is the CPU alone, why."""
    with warnings.catch_warnings(record=True) as warned:  # torch warns where the driver is too old
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        cards = []
        for i in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(i)
            memory = found.total_memory / 2**30
            if torch.version.hip:
                cards.append(Card(found.name, "rocm", memory_gib=memory, index=i))
            else:
                cards.append(Card(found.name, "cuda", (found.major, found.minor), memory, i))
        return cards, ""
    if torch.backends.mps.is_available():
        return [Card("Apple GPU", "mps")], ""
    if warned:
        reason = str(warned[0].message).splitlines()[0]
    elif torch.version.cuda is None and torch.version.hip is None:
        reason = "this torch is built without CUDA"
    else:
        reason = "torch finds no GPU"
    return [Card("no GPU", "cpu")], reason


def triton_version() -> str:
    try:
        import triton
    except (ImportError, OSError) as error:  # OSError: a library of it does not load
        return f"not usable: {error}"
    return triton.__version__


def name_the_pack() -> None:
    """Make kernels/ importable under the name that the tests use, by path, without running __init__.py."""
    if PACK_NAME not in sys.modules:
        pack = types.ModuleType(PACK_NAME)
        pack.__path__ = [str(ROOT)]
        sys.modules[PACK_NAME] = pack


def nvrtc_state() -> str:
    """NVRTC's version, or why it cannot be used."""
    from comfyui_vc_attention.kernels.attend.cuda_build import nvrtc_version, why_no_build

    return why_no_build() or nvrtc_version()


def problem_on(card: Card, config=None):
    """A video model's attention call on the card."""
    from comfyui_vc_attention.kernels import AttentionProblem, VCConfig

    return AttentionProblem.self_attention(
        TOKENS,
        device_type=card.device_type,
        capability=card.capability,
        config=config or VCConfig(),
        device_name=card.name if card.device_type == "cuda" and card.memory_gib else "",
    )


def kernel_rows(card: Card) -> tuple[list[tuple[str, str]], str]:
    """Each kernel, best first, with why it cannot run on this card ("" if it can); and what auto takes."""
    from comfyui_vc_attention.kernels import KERNELS, choose_kernel
    from comfyui_vc_attention.kernels.benchmark import config_for

    rows = []
    for spec in KERNELS:
        reason = choose_kernel(problem_on(card, config_for(spec)), spec.name).reason
        rows.append((spec.name, reason.removeprefix(f"{spec.name}: ")))
    automatic = choose_kernel(problem_on(card)).kernel
    return rows, automatic.name if automatic else ""


def try_kernels(torch, card: Card, everything: bool, retest: bool) -> tuple[list[str], float, float]:
    """Build, test and time what was not tried on the card yet; what went wrong, and seconds of both.

    Prints each kernel's name before its first launch: whatever happens then, the last line says where.
    """
    from comfyui_vc_attention.kernels import KERNELS
    from comfyui_vc_attention.kernels.validation import (
        UNTESTED,
        ContextLost,
        card_record,
        validate,
        yet_to_try,
    )

    device, lines, building, testing = torch.device("cuda", card.index), [], 0.0, 0.0
    record = card_record(device)
    names = [spec.name for spec in KERNELS]
    also = names if everything else []
    if retest:
        also = also or record.entries(names)
        for name in names:
            record.forget(name)
    for spec in yet_to_try(problem_on(card), also):
        print(f"  trying {spec.name} on {card.name} ...", end="", flush=True)
        try:
            entry = validate(spec, device)
        except ContextLost as error:
            print()
            return [*lines, f"  {error}. To go on: {this_command()}"], building, testing
        print(f" {entry.outcome}", flush=True)
        building, testing = building + entry.build_seconds, testing + entry.seconds - entry.build_seconds
        if entry.state == UNTESTED:
            lines.append(f"  {spec.name}: {entry.reason}. Close other programs, then: {this_command()}")
    return lines, building, testing


def this_python() -> str:
    return f'"{sys.executable}"' if " " in sys.executable else sys.executable


def isolated() -> str:
    """The portable ComfyUI runs its Python with -s; without it the user's own packages would count, too."""
    return " -s" if "python_embeded" in sys.executable or sys.flags.no_user_site else ""


def this_command(options: str = "") -> str:
    """What to type to run this file again, in any folder."""
    script = ROOT / "install.py"
    quoted = f'"{script}"' if " " in str(script) else script
    return f"{this_python()}{isolated()} {quoted} {options}".rstrip()


def pip_command(package: str) -> str:
    """The command that installs a package into this very Python."""
    try:
        import pip  # noqa: F401
    except ImportError:  # environments made by uv have none
        return f"uv pip install --python {this_python()} {package}"
    return f"{this_python()}{isolated()} -m pip install {package}"


def triton_package(torch) -> str:
    """What pip calls the Triton for this torch."""
    if sys.platform != "win32":
        for about in Path(torch.__file__).resolve().parents[1].glob("torch-*.dist-info/METADATA"):
            asked = re.search(r"^Requires-Dist: (triton\b[^;\s]*)", about.read_text(encoding="utf-8"), re.M)
            if asked:
                return f'"{asked[1]}"'
        return "triton"
    # torch asks for one minor version of Triton, pip knows nothing of it on Windows
    minor = TRITON_BELOW.get(".".join(torch.__version__.split(".")[:2]))
    return f'"triton-windows<3.{minor}"' if minor else "triton-windows"


def nvrtc_package(torch) -> str:
    """What pip calls the NVRTC for this torch."""
    return "nvidia-cuda-nvrtc-cu12" if (torch.version.cuda or "").startswith("12") else "nvidia-cuda-nvrtc"


def next_steps(torch, card: Card, failed: bool) -> list[str]:
    """Commands that mend what keeps kernels from running, each with this Python's full path."""
    from comfyui_vc_attention.kernels.attend.cuda_build import driver_version, why_no_build

    if card.device_type == "cpu":
        if torch.version.hip or sys.platform == "darwin":
            return []
        if driver_version() == "none":
            return [
                f"With an NVIDIA card in this computer: install its driver, restart, then: {this_command()}",
                f"What such a card would get: {this_command('--dry-run --arch sm_120')}",
            ]
        if torch.version.cuda is None:
            index = "--index-url https://download.pytorch.org/whl/cu130"
            command = pip_command(f"--force-reinstall torch torchvision torchaudio {index}")
            return [f"For a torch that uses the NVIDIA card: {command}"]
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            why = f"CUDA_VISIBLE_DEVICES is {hidden!r}, which may hide the card"
            return [f"{why}: unset it, then: {this_command()}"]
        return [f"Update the NVIDIA driver (this is {driver_version()}), restart, then: {this_command()}"]
    steps = []
    if card.capability and card.capability >= (8, 0):
        if not triton_version()[0].isdigit():
            steps.append(f"For the Triton kernels: {pip_command(triton_package(torch))}")
        if why_no_build():
            steps.append(f"For the CUDA kernels: {pip_command(nvrtc_package(torch))}")
        if failed:
            steps.append(f"To test again what failed: {this_command('--retest')}")
    return steps


def machine_lines(torch) -> tuple[list[str], list[Card]]:
    """What this machine has; and its cards, of each kind one."""
    from comfyui_vc_attention.kernels.attend.cuda_build import driver_version

    cards, reason = cards_of(torch)
    toolkit = torch.version.cuda and f"CUDA {torch.version.cuda}"
    toolkit = toolkit or (torch.version.hip and f"ROCm {torch.version.hip}") or "no CUDA"
    lines = [
        f"  python  {platform.python_version()} on {sys.platform} {platform.machine()}",
        f"  torch   {torch.__version__}, {toolkit}",
        f"  triton  {triton_version()}",
        f"  nvrtc   {nvrtc_state()}",
        f"  driver  {driver_version()}",
    ]
    lines += [f"  gpu {i}   {card}" + (f": {reason}" if reason else "") for i, card in enumerate(cards)]
    return lines, list(dict.fromkeys(cards))


def kernel_lines(torch, card: Card, details: bool = False) -> list[str]:
    """The table of kernels on a card, what auto takes, and what to do about the rest."""
    from comfyui_vc_attention.kernels.device_record import known

    rows, automatic = kernel_rows(card)
    entries = {name: known(problem_on(card), name) for name, _ in rows}
    failed = any(entry is not None and entry.why_not for entry in entries.values())
    untested = "not tested: the node takes it by name only, --all tests it" if any(entries.values()) else ""
    untested = (untested or "not tested yet") + experimental(card)
    lines = ["", f"Kernels on {card}:" if card.device_type != "cpu" else "Kernels without a GPU:"]
    width = max(len(name) for name, _ in rows)
    for name, reason in rows:
        entry = entries[name]
        if reason:
            verdict = f"no   {reason}"
        elif name == "reference":
            verdict = "yes  slowly: for tests"
        else:
            verdict = f"yes  {entry.summary if entry else untested}"
        lines.append(f"  {name:{width}}  {verdict}")
        if details and entry:
            lines += [f"  {'':{width}}  - {text}" for text in (*entry.checks, *entry.speeds)]
    if automatic:
        lines.append(f"The node's auto takes {automatic}.")
    else:
        lines.append("The node loads and leaves every model as it is: no fast kernel can run here.")
    return lines + ([] if details else next_steps(torch, card, failed))


def experimental(card: Card) -> str:
    """What is said of kernels on a card that nobody has told of a test on."""
    from comfyui_vc_attention.kernels.registry import EXPERIMENTAL_CARDS

    return EXPERIMENTAL if card.capability in EXPERIMENTAL_CARDS else ""


def card_of_arch(text: str) -> Card:
    """sm_120, sm_90a or 12.0. Raises ArgumentTypeError for anything else."""
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"an architecture must look like sm_120, got {text!r}")
    return Card("a card", "cuda", (int(found[1]), int(found[2])))


def dry_run_lines(card: Card) -> list[str]:
    """What the card would get, each kernel compiled for it and nothing run or kept."""
    rows, automatic = kernel_rows(card)
    lines, width = ["", f"Kernels that {card} would get, compiled here:"], max(len(name) for name, _ in rows)
    for name, reason in rows:
        if name != "reference":
            verdict = f"no   {reason}" if reason else cost(name, card.capability) + experimental(card)
            lines.append(f"  {name:{width}}  {verdict}")
    lines.append(f"Without a test on such a card, the node's auto takes {automatic or 'none of them'}.")
    return lines


def cost(kernel: str, capability: tuple[int, int]) -> str:
    """ "yes" and what the kernel costs on such a card, or "no" and what the compiler says."""
    from comfyui_vc_attention.kernels.dry_run import compiled

    begin = time.perf_counter()
    try:
        used = compiled(kernel, capability)
    except Exception as error:  # each compiler has its own
        return f"no   does not compile: {str(error).strip().splitlines()[0]}"
    registers, stack = max(one.registers for one in used), max(one.stack_bytes for one in used)
    most = f"up to {registers} registers and {stack} bytes of stack"
    return f"yes  {len(used)} functions, {most}, {time.perf_counter() - begin:.1f} s"


def arguments_of(given: list[str]):
    parser = argparse.ArgumentParser(
        prog="install.py", description="Builds and tests the kernels of this pack."
    )
    parser.add_argument("--retest", action="store_true", help="also what was tested before")
    parser.add_argument("--all", action="store_true", help="also kernels that the node takes by name only")
    parser.add_argument("--report", action="store_true", help="print what is known, without names and paths")
    parser.add_argument("--dry-run", action="store_true", help="compile and run nothing")
    parser.add_argument("--arch", type=card_of_arch, help="with --dry-run: for such a card, e.g. sm_120")
    chosen = parser.parse_args(given)
    if chosen.report + (chosen.all or chosen.retest) + bool(chosen.dry_run or chosen.arch) > 1:
        parser.error("--report, --dry-run, and --all or --retest do different things: one at a time")
    return chosen


def main(given: list[str]) -> None:
    chosen, begin = arguments_of(given), time.perf_counter()
    name_the_pack()
    from comfyui_vc_attention.nodes.pack_version import pack_version

    print(f"VC-Attention {pack_version()}")
    try:
        import torch
    except ImportError as error:
        print(
            f"  torch cannot be imported ({error}). Run this with the Python that runs ComfyUI, which is not"
        )
        print(f"  {sys.executable}")
        return
    lines, cards = machine_lines(torch)
    ready = time.perf_counter()
    if chosen.report:
        from comfyui_vc_attention.nodes.report_text import without_paths

        lines += [line for card in cards for line in kernel_lines(torch, card, details=True)]
        print(without_paths("\n".join(lines)))
        return
    print("\n".join(lines))
    if chosen.dry_run or chosen.arch:
        targets = [chosen.arch] if chosen.arch else [card for card in cards if card.capability]
        for card in targets:
            print("\n".join([*dry_run_lines(card), *next_steps(torch, card, failed=False)]))
        if not targets:
            print(f"No NVIDIA card is here; to compile for one: {this_command('--dry-run --arch sm_120')}")
        return
    building = testing = 0.0
    for card in cards:
        troubles = []
        if card.device_type == "cuda":
            troubles, built, tested = try_kernels(torch, card, chosen.all, chosen.retest)
            building, testing = building + built, testing + tested
        print("\n".join([*troubles, *kernel_lines(torch, card)]))
    spent = f"This took {time.perf_counter() - begin:.1f} s, {ready - begin:.1f} s of it for torch to start"
    kernels = f", {building:.1f} s building, {testing:.1f} s testing and timing" if building + testing else ""
    print(f"{spent}{kernels}.")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the console cannot show
    # Broad on purpose: whatever goes wrong is shown, and the pack still counts as installed.
    try:
        main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        print("VC-Attention is installed, but could not examine this machine; please report the lines above.")
    sys.exit(0)
