"""Denoise one clip of the sample model twice, same seed: with the default attention and with VC-Attention."""

import os
import platform
from pathlib import Path

import torch

from .meter import Run, psnr

PACK_ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = PACK_ROOT / "nodes" / "sample_model" / "wan_sample.safetensors"
ENLARGE, LABEL_HEIGHT, FRAME_MS = 4, 24, 120


def make_host():
    """(host, what it is). A real ComfyUI where COMFYUI_PATH points at one, else diffusers."""
    if os.environ.get("COMFYUI_PATH"):
        from .comfyui_host import DESCRIPTION, ComfyUIHost

        return ComfyUIHost(os.environ["COMFYUI_PATH"], PACK_ROOT), DESCRIPTION
    from .diffusers_host import DESCRIPTION, DiffusersHost

    return DiffusersHost(WEIGHTS), DESCRIPTION


def require(kernels, name: str) -> None:
    """Exit with a sentence if a kernel cannot run here. kernels: the pack's module."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probe = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    try:
        choice = kernels.choose_kernel(kernels.AttentionProblem.of(probe, probe, probe), name)
    except ValueError as error:
        raise SystemExit(f"--kernel: {error}") from None
    if choice.kernel is None:
        raise SystemExit(f"{choice.reason}; --kernel chooses another")


def table(default: Run, low_bit: Run, kernel: str) -> str:
    """The result, for people."""
    declined = ", ".join(low_bit.declined)
    lines = [
        f"{'':24}{'default':>12}{'VC-Attention':>16}",
        f"{'self-attention time':24}{default.meter.seconds:>10.2f} s{low_bit.meter.seconds:>14.2f} s",
        f"{'calls taken':24}{'-':>12}{low_bit.taken:>16}",
        f"{'calls declined':24}{'-':>12}{sum(low_bit.declined.values()):>16}  {declined}".rstrip(),
        f"{'PSNR against default':24}{'-':>12}{psnr(low_bit.frames, default.frames):>13.1f} dB",
        "relative L2 of the attention output against float32, mean over the calls of a layer",
    ]
    meter = low_bit.meter
    lines += [
        f"{f'  block {block}':24}{'-':>12}{meter.error_of(block):>16.5f}" for block in sorted(meter.errors)
    ]
    if kernel == "reference":
        lines.append(
            "The reference kernel shows what VC-Attention computes, not how fast: it is plain PyTorch.\n"
            "On an NVIDIA GPU the same command runs the kernel for that card."
        )
    return "\n".join(lines)


def save_side_by_side(runs: dict[str, Run], path: Path) -> None:
    """An animated WebP: each run's clip under its label."""
    from PIL import Image, ImageDraw

    pictures = []
    for clip in zip(*(run.frames for run in runs.values()), strict=True):
        height, width = (ENLARGE * n for n in clip[0].shape[:2])
        picture = Image.new("RGB", (width * len(clip), height + LABEL_HEIGHT), "white")
        for i, (label, frame) in enumerate(zip(runs, clip, strict=True)):
            small = Image.fromarray((frame.float() * 255).round().byte().cpu().numpy())
            picture.paste(small.resize((width, height), Image.Resampling.BICUBIC), (i * width, LABEL_HEIGHT))
            ImageDraw.Draw(picture).text((i * width + 6, 6), label, fill="black")
        pictures.append(picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=FRAME_MS, loop=0, quality=85)


def main(options) -> int:
    """options: what options.py reads from the command line."""
    kernel = options.kernel or ("auto" if torch.cuda.is_available() else "reference")
    if not WEIGHTS.exists():
        raise SystemExit(f"the sample model's weights are missing: {WEIGHTS}")
    host, description = make_host()
    require(host.kernels, kernel)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    print(f"host    {description}\ndevice  {device}, torch {torch.__version__}")
    print(
        f"clip    {options.prompt!r}, {options.steps} steps, seed {options.seed}, kernel {kernel}", flush=True
    )
    runs = {}
    for label, name in (("default attention", None), ("VC-Attention", kernel)):
        print(f"sampling with {label} ...", flush=True)
        runs[label] = host.run(options, name)
    print(f"\n{table(*runs.values(), kernel)}\n")
    save_side_by_side(runs, options.out)
    print(f"wrote {options.out}")
    return 0
