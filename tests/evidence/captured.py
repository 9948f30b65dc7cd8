"""q, k and v of the trained sample model's self-attention, at chosen steps and blocks of a sampled clip."""

import contextlib

import torch
from comfyui_vc_attention.nodes.sample_clip import LATENT_SHAPE, PROMPTS
from sample_model.model import load_model
from sample_model.sample import WEIGHTS, sample_latents, shifted_sigmas

from .samples import Sample

STEPS, CFG = 10, 2.0
GRID = (LATENT_SHAPE[1], LATENT_SHAPE[2] // 2, LATENT_SHAPE[3] // 2)


class Watched:
    """A sample model that tells a listener about each evaluation: begin(step, branch, steps).

    branch counts the evaluations of one step: 0 with the prompt, 1 without it.
    """

    def __init__(self, model, steps, listener):
        self.model, self.head, self.listener = model, model.head, listener
        self.timesteps = (1000.0 * shifted_sigmas(steps)[:-1]).tolist()
        self.last, self.branch = None, 0

    def __call__(self, x, timestep, context, **options):
        now = min(range(len(self.timesteps)), key=lambda i: abs(self.timesteps[i] - timestep[0].item()))
        self.branch = self.branch + 1 if now == self.last else 0
        self.last = now
        self.listener.begin(now, self.branch, len(self.timesteps))
        return self.model(x, timestep, context, **options)


class Enough(Exception):
    """Every wanted call was kept: the rest of the clip is not worth sampling."""


class Recorder:
    """Exact attention that keeps the q, k, v of the wanted steps and of the step before each.

    Raises Enough at the first step after the last one wanted.
    """

    def __init__(self, wanted_steps):
        self.wanted = {step for s in wanted_steps for step in (s, s - 1)}
        self.calls, self.step, self.branch, self.block = {}, 0, 0, 0

    def begin(self, step, branch, steps):
        if step > max(self.wanted):
            raise Enough
        self.step, self.branch, self.block = step, branch, 0

    def __call__(self, q, k, v):
        if self.branch == 0 and self.step in self.wanted:
            self.calls[self.step, self.block] = tuple(t[:1].detach().bfloat16() for t in (q, k, v))
        self.block += 1
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def captured_samples(
    steps=(1, 4, 9), blocks=(0, 2, 5), weights=WEIGHTS, device="cpu", seed=0, of_steps=STEPS, cfg=CFG
):
    """One Sample [1, H, 1440, 128] for each chosen step and block of one clip.

    GRID tokens: 10 frames of 12 x 12. Step s also holds the values of step s - 1, to warm-start from.
    """
    model, recorder = load_model(weights, device), Recorder(steps)
    watched = Watched(model, of_steps, recorder)
    with contextlib.suppress(Enough):
        sample_latents(watched, [PROMPTS[6]], seed=seed, steps=of_steps, cfg=cfg, attention=recorder)
    found = []
    for step in steps:
        for block in blocks:
            before = recorder.calls.get((step - 1, block))
            name = f"captured, step {step + 1} of {of_steps}, block {block + 1}"
            found.append(
                Sample(name, *recorder.calls[step, block], GRID, None if before is None else before[2])
            )
    return found


@torch.inference_mode()
def captured_long(grid, heads, weights=WEIGHTS, device="cpu", seed=0):
    """q, k, v [1, heads, L, 128] bf16 of a clip as long as grid asks, for timing on trained tensors.

    The model was trained on 10 frames of 12 x 12 tokens; on longer clips its pictures mean nothing, but its
    activations keep their statistics. Heads are gathered over blocks and noise levels.
    """
    model = load_model(weights, device)
    recorder = Recorder(())
    generator = torch.Generator().manual_seed(seed)
    frames, rows, columns = grid
    clip = torch.randn(1, 16, frames, 2 * rows, 2 * columns, generator=generator).to(device)
    context = torch.zeros(1, 8, 4096, device=device)
    parts, had = [], 0
    for step, timestep in enumerate((950.0, 850.0, 700.0, 500.0, 300.0, 100.0, 50.0, 20.0, 10.0, 5.0)):
        recorder.wanted = {step}
        recorder.begin(step, 0, 1)
        model(clip, torch.full((1,), timestep, device=device), context, attention=recorder)
        parts += [call for (s, _), call in recorder.calls.items() if s == step]
        had = sum(part[0].shape[1] for part in parts)
        if had >= heads:
            return tuple(torch.cat([p[i] for p in parts], 1)[:, :heads] for i in range(3))
    raise ValueError(f"the sample model gives {had} heads, got a request for {heads}")
