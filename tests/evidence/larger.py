"""Tool "larger": train a model of 34 million parameters as the sample model is trained, to capture from.

The weights stay out of the repository; the command makes them again. `fidelity --weights FILE` then measures
its captures beside the sample model's.
"""

from pathlib import Path

import torch
from sample_model.model import WanVideoModel, initialise
from sample_model.train import FILE_NAME, parse, save_weights, train

DIM, FFN_DIM, LAYERS = 512, 1536, 8  # 4 heads of 128; chosen, more would see too few clips in the time
SECONDS, RATE = 240.0, 5e-4  # chosen: about as long as a stage; the wider model wants a lower rate


def run(device, out: Path, weights: Path | None = None, smoke=False, seconds=SECONDS):
    """Train for so many seconds, compilation aside, and write <weights>/wan_sample.safetensors; weights: a
    folder, by default out/larger."""
    folder = weights or out / "larger"
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--out", str(folder), "--rate", str(RATE), "--seconds", str(seconds)]
    args = parse([*options, "--smoke"] if smoke else [*options, "--clips", "16384"])
    args.compile = device.type == "cuda"
    model = WanVideoModel(256, 512, 1) if smoke else WanVideoModel(DIM, FFN_DIM, LAYERS)
    model = initialise(model, args.seed).to(device)
    with torch.enable_grad():
        trained, progress = train(model, args, device)
    save_weights(trained, folder / FILE_NAME, args, progress)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{size / 1e6:.1f} million parameters, {progress.steps} steps, loss {progress.losses[-1]}", flush=True
    )
    return folder / FILE_NAME
