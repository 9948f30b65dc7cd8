"""What ComfyUI-Manager runs after installing the pack, with ComfyUI's Python; also by hand: python install.py

Says what this machine has and which kernels can run on it. Standard library and torch only. Downloads
nothing, starts nothing, and always exits 0: an installer that fails would hide a pack that works.
"""

import platform
import re
import sys
import traceback
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACK_NAME = "comfyui_vc_attention"
TOKENS, HEAD_DIM = 32_768, 128  # of the attention call that the table is about: a video model's

# Python puts a script's folder first; there our nodes/ and kernels/ would shadow other people's modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


@dataclass(frozen=True)
class Card:
    """One kind of device that attention could run on."""

    name: str
    device_type: str  # as torch calls it, except "rocm"
    capability: tuple[int, int] | None = None  # (9, 0) for sm_90; None unless NVIDIA
    memory_gib: float | None = None

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
                cards.append(Card(found.name, "rocm", memory_gib=memory))
            else:
                cards.append(Card(found.name, "cuda", (found.major, found.minor), memory))
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
    except ImportError as error:
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


def kernel_rows(torch, card: Card) -> tuple[list[tuple[str, str]], str]:
    """Each kernel, best first, with why it cannot run on this card ("" if it can); and what auto takes."""
    from comfyui_vc_attention.kernels import KERNELS, AttentionProblem, choose_kernel

    shape = (1, 1, TOKENS, HEAD_DIM)
    problem = AttentionProblem(
        q_shape=shape,
        k_shape=shape,
        dtypes=(torch.bfloat16,) * 3,
        last_strides=(1, 1, 1),
        device_type=card.device_type,
        capability=card.capability,
    )
    rows = []
    for spec in KERNELS:
        reason = choose_kernel(problem, spec.name).reason
        rows.append((spec.name, reason.removeprefix(f"{spec.name}: ")))
    automatic = choose_kernel(problem).kernel
    return rows, automatic.name if automatic else ""


def pip_command(package: str) -> str:
    """The command that installs a package into this very Python."""
    python = f'"{sys.executable}"' if " " in sys.executable else sys.executable
    try:
        import pip  # noqa: F401
    except ImportError:  # environments made by uv have none
        return f"uv pip install --python {python} {package}"
    # the portable ComfyUI runs its Python with -s; without it pip may be satisfied by the user's own packages
    isolated = " -s" if "python_embeded" in sys.executable or sys.flags.no_user_site else ""
    return f"{python}{isolated} -m pip install {package}"


def pack_version() -> str:
    """From pyproject.toml, where it is kept."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    return found[1] if found else "(no version in pyproject.toml)"


def print_machine(torch) -> list[Card]:
    cards, reason = cards_of(torch)
    toolkit = torch.version.cuda and f"CUDA {torch.version.cuda}"
    toolkit = toolkit or (torch.version.hip and f"ROCm {torch.version.hip}") or "no CUDA"
    print(f"  python  {platform.python_version()} on {sys.platform} {platform.machine()}")
    print(f"  torch   {torch.__version__}, {toolkit}")
    print(f"  triton  {triton_version()}")
    print(f"  nvrtc   {nvrtc_state()}")
    for i, card in enumerate(cards):
        print(f"  gpu {i}   {card}" + (f": {reason}" if reason else ""))
    return cards


def print_kernels(torch, card: Card) -> None:
    rows, automatic = kernel_rows(torch, card)
    print(f"\nKernels on {card}:" if card.device_type != "cpu" else "\nKernels without a GPU:")
    width = max(len(name) for name, _ in rows)
    for name, reason in rows:
        verdict = f"no   {reason}" if reason else "yes  slowly: for tests" if name == "reference" else "yes"
        print(f"  {name:{width}}  {verdict}")
    if automatic:
        print(f"The node's auto takes {automatic}.")
        return
    print("The node loads and leaves every model as it is: none of the fast kernels can run here.")
    if card.capability and not triton_version()[0].isdigit():
        package = "triton-windows" if sys.platform == "win32" else "triton"
        print(f"To get them, install Triton: {pip_command(package)}")


def main() -> None:
    print(f"VC-Attention {pack_version()}")
    try:
        import torch
    except ImportError as error:
        print(
            f"  torch cannot be imported ({error}). Run this with the Python that runs ComfyUI, which is not"
        )
        print(f"  {sys.executable}")
        return
    name_the_pack()
    for card in dict.fromkeys(print_machine(torch)):  # cards of one kind once
        print_kernels(torch, card)


if __name__ == "__main__":
    # Broad on purpose: whatever goes wrong is shown, and the pack still counts as installed.
    try:
        main()
    except Exception:
        traceback.print_exc()
        print("VC-Attention is installed, but could not examine this machine; please report the lines above.")
    sys.exit(0)
