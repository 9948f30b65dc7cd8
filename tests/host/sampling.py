"""Sample a tiny model through ComfyUI's own code, as its sampler nodes do, and watch its attention."""

from dataclasses import dataclass, field

import torch

CHANNELS = {
    "t2v": 16,
    "i2v": 16,
    "5b": 48,
    "vace": 16,
    "s2v": 16,
    "animate": 16,
    "hunyuan": 16,
    "hunyuan15": 32,
    "h3": 24,
}
TEXT_WIDTH = {"hunyuan": 64, "hunyuan15": 64, "h3": 64}  # of the tiny models; 4096 for Wan
SIZE = (3, 8, 8)  # latent frames, height, width: 48 tokens after 2 x 2 patches
SIZES = {"hunyuan15": (3, 4, 4), "h3": (7, 8, 8)}


def text(kind, length, generator, padded=0):
    """One conditioning as a text encoder node gives it; the last padded tokens are masked."""
    extra = {}
    if kind == "i2v":
        image = torch.randn(1, 257, 1280, generator=generator)
        extra["clip_vision_output"] = type("ClipVision", (), {"penultimate_hidden_states": image})()
    if kind == "s2v":  # a reference picture, whose tokens follow the video's, and sound
        extra["reference_latents"] = [torch.randn(1, 16, 1, 8, 8, generator=generator)]
        extra["audio_embed"] = torch.randn(1, 25, 1024, 12, generator=generator)
    if kind.startswith("hunyuan"):
        extra["pooled_output"] = torch.randn(1, 768, generator=generator)
        extra["guidance"] = 8.0  # 1000 times it is a bf16 number
    if kind == "h3":
        extra["minimax_token_tags"] = torch.ones(length, dtype=torch.long)
    if padded:
        extra["attention_mask"] = (torch.arange(length) < length - padded).long()[None]
    return [[torch.randn(1, length, TEXT_WIDTH.get(kind, 4096), generator=generator), extra]]


def conditioning(kind="t2v", text_tokens=40, seed=1, padded=0):
    """(positive, negative)"""
    generator = torch.Generator().manual_seed(seed)
    lengths = (text_tokens, text_tokens) if isinstance(text_tokens, int) else text_tokens
    return tuple(text(kind, length, generator, padded) for length in lengths)


def empty_latent(kind="t2v", batch=1, size=None):
    frames, height, width = size or SIZES.get(kind, SIZE)
    video = torch.zeros(batch, CHANNELS[kind], frames, height, width)
    if kind != "h3":
        return video
    import comfy.nested_tensor

    audio_frames = round((((frames - 2) // 5) * 17 + 5) / 24 * 40)  # the sound of as many video frames
    return comfy.nested_tensor.NestedTensor((video, torch.zeros(batch, 32, 2, audio_frames)))


def sample(
    model,
    steps=4,
    cfg=5.0,
    sampler="euler",
    scheduler="simple",
    kind="t2v",
    seed=0,
    batch=1,
    size=None,
    padded=0,
    text_tokens=40,
    latent=None,
    callback=None,
    **more,
):
    """The latent after sampling; more goes to comfy.sample.sample (denoise, start_step, last_step, ...)."""
    import comfy.sample

    positive, negative = conditioning(kind, text_tokens, padded=padded)
    image = empty_latent(kind, batch, size) if latent is None else latent
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(image, seed)
        if more.get("disable_noise"):
            noise = noise * 0
        return comfy.sample.sample(
            model, noise, steps, cfg, sampler, scheduler, positive, negative, image,
            seed=seed, disable_pbar=True, callback=callback, **more,
        )  # fmt: skip


def parts(latent):
    """The tensors of a latent: one, or video and audio (MiniMax-H3)."""
    return latent.unbind() if getattr(latent, "is_nested", False) else (latent,)


def equal(a, b) -> bool:
    """Whether two latents are the same, bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


ERRORS: list[float] = []  # of the calls that a test watched and we took
PSNRS: list[float] = []  # that a test asked for


def psnr(a, b) -> float:
    """Peak signal to noise ratio of a against b (of the worse part), in dB; infinite if they are equal."""
    worse = min(part_psnr(x, y) for x, y in zip(parts(a), parts(b), strict=True))
    PSNRS.append(worse)
    return worse


def part_psnr(a, b) -> float:
    error = (a.float() - b.float()).square().mean()
    return float(10 * ((b.max() - b.min()).float().square() / error).log10())


@dataclass
class Spy:
    """An attention override that computes every call as ComfyUI does and writes down what it saw."""

    calls: list = field(default_factory=list)

    def __call__(self, func, q, k, v, heads, *args, **kwargs):
        options = kwargs.get("transformer_options", {})
        self.calls.append(
            {
                "q": tuple(q.shape),
                "k": tuple(k.shape),
                "block": options.get("block_index"),
                "sigma": float(options["sigmas"][0]),
                "conds": list(options["cond_or_uncond"]),
                "low_precision": kwargs.get("low_precision_attention"),
            }
        )
        return func(q, k, v, heads, *args, **kwargs)

    def install(self, model):
        """A clone of model under this spy."""
        spied = model.clone()
        spied.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = self
        return spied


@dataclass
class Seen:
    """One attention call of a watched model."""

    block: int | None
    step_sigma: float
    square: bool
    taken: bool
    error: float  # relative L2 against ComfyUI's own attention on the same tensors
    conditions: int
    grouping: bool | None  # what the run planned for this evaluation
    schedule: tuple[
        float, ...
    ]  # of this sampler call; some samplers do not take the whole one that is asked for


class Watch:
    """Puts itself before our override and asks ComfyUI's attention the same question.

    What was taken is told by whether the host's function was reached, not by our own counters.
    """

    def __init__(self, patched):
        self.calls: list[Seen] = []
        self.model = patched.clone()
        options = self.model.model_options["transformer_options"]
        self._vc_previous = options["optimized_attention_override"]
        options["optimized_attention_override"] = self

    def __call__(self, func, q, k, v, heads, *args, **kwargs):
        reached = []

        def host(*host_args, **host_kwargs):
            reached.append(True)
            return func(*host_args, **host_kwargs)

        expected = func(q, k, v, heads, *args, **kwargs)
        out = self._vc_previous(host, q, k, v, heads, *args, **kwargs)
        options = kwargs["transformer_options"]
        forward = options.get("vc_attention_forward")
        self.calls.append(
            Seen(
                block=options.get("block_index"),
                step_sigma=float(options["sigmas"][0]),
                square=q.shape == k.shape,
                taken=not reached,
                error=float((out.float() - expected.float()).norm() / expected.float().norm()),
                conditions=len(options["cond_or_uncond"]),
                grouping=None if forward is None else forward.plan.grouping,
                schedule=tuple(options["sample_sigmas"].tolist()),
            )
        )
        if not reached:
            ERRORS.append(self.calls[-1].error)
        assert out.shape == expected.shape and out.dtype == expected.dtype
        return out

    @property
    def taken(self):
        return [call for call in self.calls if call.taken]

    @property
    def grouped_sigmas(self):
        """The sigmas at which values were grouped, highest first."""
        return sorted({round(call.step_sigma, 4) for call in self.taken if call.grouping}, reverse=True)


def schedule(model, steps, scheduler="simple"):
    """The sigmas of a whole run."""
    import comfy.samplers

    return comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), scheduler, steps)
