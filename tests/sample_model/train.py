"""Train the sample model on procedural clips: flow matching in ComfyUI's convention for Wan.

    python tests/sample_model train --out build/sample --compile       one H200, about four minutes
    python tests/sample_model train --out build/smoke --smoke          a few small steps on a CPU

x = sigma * noise + (1 - sigma) * clip; the model is given timestep 1000 sigma and learns noise - clip. Writes
wan_sample.safetensors (the averaged weights, bf16), loss.json, report.json with what the classifier sees in
sampled clips, and sheet_*.png and clips.webp to look at.
"""

import argparse
import contextlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from comfyui_vc_attention.nodes.sample_clip import PROMPTS, encode_frames, prompt_embedding

from .classify import count_right
from .clips import draw_clips
from .model import WanVideoModel, initialise, load_model
from .sample import contact_sheet, sample_clips, save_animation

TRAINING_SHIFT = 4.0  # chosen: draws more of the noisy half, where shape and motion are decided
WARM_UP = 100  # steps
AVERAGING = 0.998  # of the weights, per step, once past the start
FILE_NAME = "wan_sample.safetensors"


@dataclass
class Progress:
    """Where training stands: steps done of steps planned, and the loss of every tenth step."""

    steps: int
    losses: list
    seconds: float = 0.0


def learning_rate(step, steps, peak):
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    warm_up = min(WARM_UP, max(1, steps // 10))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))))


class ClipBank:
    """Latents of args.clips drawn clips, kept on the device: drawing a batch anew each step costs more than
    the step. take(step) gives latents [B, 16, T, h, w] and prompt numbers [B]; len(PROMPTS) is no prompt."""

    def __init__(self, args, device, chunk=256):
        self.args, self.device = args, device
        self.prompts = torch.arange(args.clips) % len(PROMPTS)
        parts = []
        for i, prompts in enumerate(self.prompts.split(chunk)):
            seed = args.seed * 1_000_003 + i
            clips = draw_clips(prompts, seed, frames=args.frames, size=args.size, device=device)
            parts.append(encode_frames(clips).to(torch.bfloat16 if device.type == "cuda" else torch.float32))
        self.latents = torch.cat(parts)

    def take(self, step):
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + 500_000_000 + step)
        pick = torch.randint(len(self.prompts), (self.args.batch,), generator=generator)
        dropped = torch.rand(self.args.batch, generator=generator) < self.args.drop_prompt
        numbers = torch.where(dropped, len(PROMPTS), self.prompts[pick])
        return self.latents[pick.to(self.device)].float(), numbers.to(self.device)


def flow_loss(model, latents, context, generator, shift=TRAINING_SHIFT):
    """Mean squared error of the velocity at random sigmas, spread evenly over the batch."""
    batch = len(latents)
    part = (torch.rand(1, generator=generator) + torch.arange(batch) / batch).frac()
    sigma = (shift * part / (1 + (shift - 1) * part)).to(latents.device)
    noise = torch.randn(latents.shape, device=latents.device)
    s = sigma.view(-1, 1, 1, 1, 1)
    velocity = model(s * noise + (1 - s) * latents, 1000.0 * sigma, context)
    return (velocity.float() - (noise - latents)).square().mean()


def train(model, args, device):
    """Train in place; returns the averaged weights and the Progress."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    texts = torch.cat([prompt_embedding(p) for p in (*PROMPTS, "")]).to(device)
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    matrices = [p for p in parameters if p.ndim >= 2 and p.shape[0] > 1]
    vectors = [p for p in parameters if p.ndim < 2 or p.shape[0] == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.99), fused=device.type == "cuda")
    run = torch.compile(model) if args.compile else model
    mixed = device.type == "cuda"
    progress, start = Progress(args.steps, []), None
    drawn = clock(device)
    bank = ClipBank(args, device)
    print(f"{args.clips} clips drawn in {clock(device) - drawn:.1f} s", flush=True)
    step = 0
    while step < progress.steps:
        if step == 20:  # compiled and warm: from here on time counts
            start, start_step = clock(device), step
        if step == 60 and args.seconds:
            per_step = (clock(device) - start) / (step - start_step)
            progress.steps = min(args.steps, step + int(args.seconds / per_step))
            print(f"{1000 * per_step:.1f} ms per step, so {progress.steps} steps", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress.steps, args.rate)
        latents, numbers = bank.take(step)
        with torch.autocast(device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = flow_loss(run, latents, texts[numbers], generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            keep = min(AVERAGING, (1.0 + step) / (10.0 + step))
            torch._foreach_lerp_(average, [p.detach() for p in parameters], 1.0 - keep)
        if step % 10 == 0:
            progress.losses.append(loss.detach())
        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        step += 1
    progress.seconds = clock(device) - start if start else 0.0
    progress.losses = [round(float(x), 5) for x in progress.losses]
    return dict(zip((name for name, _ in model.named_parameters()), average, strict=True)), progress


def clock(device):
    """Seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def save_weights(weights, path, args, progress):
    """Write the shipped file: bf16, and in its metadata how it was made."""
    from safetensors.torch import save_file

    metadata = {
        "title": "VC-Attention sample model",
        "architecture": "Wan 2.1 text-to-video, 256 channels, 2 heads, 6 blocks",
        "license": "Apache-2.0",
        "trained": f"seed {args.seed}, {progress.steps} steps of {args.batch} clips, peak rate {args.rate}",
        "prompts": ", ".join(PROMPTS),
    }
    save_file({name: w.bfloat16().cpu().contiguous() for name, w in weights.items()}, str(path), metadata)


@torch.no_grad()
def report(model, args, device):
    """(classifier counts at several steps and guidances, clips of the last); writes contact sheets too."""
    prompts = list(PROMPTS) * args.report_rounds
    found = {}
    for steps, cfg in args.report_settings:
        start = clock(device)
        clips = sample_clips(model, prompts, batch=32, seed=1000, steps=steps, cfg=cfg)
        shape, colour, both = count_right(clips, prompts)
        name, seconds = f"steps {steps} cfg {cfg:g}", clock(device) - start
        found[name] = {"clips": len(prompts), "shape": shape, "colour": colour, "both": both}
        print(f"{name}: {found[name]} in {seconds:.1f} s", flush=True)
        contact_sheet(clips[: len(PROMPTS)]).save(args.out / f"sheet_{steps}_{cfg:g}.png")
    return found, clips[: len(PROMPTS)]


def parse(argv):
    parser = argparse.ArgumentParser("train", None, __doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="most steps; fewer if --seconds does not allow them")
    parser.add_argument("--seconds", type=float, default=0.0, help="training time to plan for; 0: no limit")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--drop-prompt", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", type=Path, help="weights to go on from")
    parser.add_argument("--smoke", action="store_true", help="small clips, few steps, no report")
    parser.add_argument("--clips", type=int, default=0, help="how many clips to draw; 0: as suits the run")
    parser.add_argument("--log-every", type=int, default=200)
    args = parser.parse_args(argv)
    args.frames, args.size, args.report_rounds = 10, 96, 4
    args.report_settings = ((8, 1.0), (10, 2.0), (20, 3.0))
    if args.smoke:
        args.frames, args.size, args.batch, args.log_every = 3, 48, 4, 10
    args.steps = args.steps or (60 if args.smoke else 8000)
    args.clips = args.clips or (64 if args.smoke else 32768)
    return args


def main(argv):
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    model = initialise(WanVideoModel(), args.seed).to(device)
    if args.resume:
        model.load_state_dict(load_model(args.resume, device).state_dict())
    weights, progress = train(model, args, device)
    save_weights(weights, args.out / FILE_NAME, args, progress)
    (args.out / "loss.json").write_text(json.dumps({"every": 10, "loss": progress.losses}))
    head, tail = progress.losses[:3], progress.losses[-3:]
    before, after = sum(head) / 3, sum(tail) / 3
    print(f"{progress.steps} steps in {progress.seconds:.0f} s; loss {before:.3f} -> {after:.3f}")
    if args.smoke:
        return
    model = load_model(args.out / FILE_NAME, device)  # judge the file, rounded as it is
    summary = {"steps": progress.steps, "seconds": round(progress.seconds, 1)}
    summary["right"], clips = report(model, args, device)
    (args.out / "report.json").write_text(json.dumps(summary, indent=1))
    save_animation(clips, args.out / "clips.webp")
