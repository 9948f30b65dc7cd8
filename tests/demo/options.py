"""The demo's command line. Standard library alone: --help answers before there is an environment."""

import argparse
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[2] / "demo_output" / "vc_attention_demo.webp"


def steps(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {count}")
    return count


def options_of(arguments):
    parser = argparse.ArgumentParser(
        prog="python dev.py demo",
        description="Denoise one clip of the sample model twice, same seed: with the default attention and "
        "with VC-Attention. Half a minute on a CPU.",
    )
    parser.add_argument("--prompt", default="a red circle", help="a colour and a shape, as in 'a blue cross'")
    parser.add_argument("--steps", type=steps, default=10, help="denoising steps, default 10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cfg", type=float, default=1.0, help="guidance; 1, the default, runs the prompt alone"
    )
    parser.add_argument("--kernel", help="default: auto on a GPU, reference on a CPU")
    parser.add_argument(
        "--out",
        type=Path,
        default=OUTPUT,
        help=f"animated WebP of both clips side by side, default {OUTPUT.parent.name}/{OUTPUT.name}",
    )
    return parser.parse_args(arguments)
