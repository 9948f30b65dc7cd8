"""Keeps q, k and v of chosen attention calls while a model samples. Changes nothing of what is computed."""

import logging
import threading
from dataclasses import dataclass, field

import torch

from .attention_layout import split_heads
from .captures import output_folder, write
from .families import AttentionCall, Family, ForwardNotes
from .model_patch import HostCall, hand_over
from .run_record import spaced
from .run_report import say
from .sampling_hooks import OVERRIDE
from .step_schedule import StepSchedule

KEY = "vc_attention_capture"  # of our wrappers on a model, and of the run in transformer_options


@dataclass(frozen=True)
class CaptureSettings:
    """What the node's widgets ask for."""

    blocks: frozenset[int]
    steps: frozenset[int]
    heads: int
    max_bytes: int
    prefix: str
    node_id: str | None = None


@dataclass
class CaptureRun:
    """What one sampler call has kept so far, on the CPU, never more than max_bytes."""

    settings: CaptureSettings
    family: Family
    schedule: StepSchedule
    step: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: int = 0
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, block: int, q, k, v, row: int) -> None:
        """q: [B, H, Lq, D]; k, v: [B, H, Lk, D]; one row of the batch and a few heads are kept."""
        heads = spaced(q.shape[1], self.settings.heads)
        chosen = [t[row : row + 1, heads][:, : self.settings.heads] for t in (q, k, v)]
        size = sum(t.numel() * t.element_size() for t in chosen)
        with self._lock:
            if self._bytes + size > self.settings.max_bytes:
                self.left_out += 1
                return
            self._bytes += size
            where = f"step{self.step}.block{block}"
            call = sum(name.startswith(f"{where}.") for name in self.tensors) // 3
            for part, tensor in zip("qkv", chosen, strict=True):
                # a copy even on a CPU: the model may write into its own tensors afterwards
                self.tensors[f"{where}.call{call}.{part}"] = tensor.detach().to("cpu", copy=True)

    def metadata(self) -> dict[str, str]:
        return {"format": "vc_attention_capture 1", "family": self.family.name, "layout": "1, H, L, D"}


class CaptureOverride:
    """An attention override that looks, and leaves every call to the one that was there before."""

    def __init__(self, previous=None):
        self._vc_previous = previous  # public to other packs: makes the chain walkable

    @torch.compiler.disable
    def __call__(self, func, q, k, v, *args, **kwargs):
        """ComfyUI's override contract, with tensors."""
        look(q, k, v, args, kwargs)
        if self._vc_previous is not None:
            return self._vc_previous(func, q, k, v, *args, **kwargs)
        return func(q, k, v, *args, **kwargs)

    @torch.compiler.disable
    def container_function(self, q, k, v, *args, **kwargs):
        """The same with single-owner boxes; they are only looked into."""
        look(q.peek(), k.peek(), v.peek(), args, kwargs)
        return hand_over(self._vc_previous, (q, k, v), args, kwargs)


def look(q, k, v, args, kwargs) -> None:
    """Keep the call if it is one that was asked for."""
    host = HostCall.of(args, kwargs)
    run, notes = host.options.get(KEY) or (None, None)
    if notes is None:
        return
    try:
        q, k, v = split_heads(q, k, v, host.heads, host.skip_reshape)
    except ValueError:  # a layout that the families do not have
        return
    layer = run.family.layer(AttentionCall(q.shape, k.shape, v.shape, host.options), notes)
    wanted = not isinstance(layer, str) and layer.position in run.settings.blocks
    if not wanted or run.step not in run.settings.steps:
        return
    chunks = host.options.get("cond_or_uncond") or [0]
    if 0 in chunks and q.shape[0] % len(chunks) == 0:  # the prompted chunk; an unprompted call is left out
        run.keep(layer.position, q, k, v, chunks.index(0) * (q.shape[0] // len(chunks)))


class CaptureHooks:
    """The sampler events of one captured model."""

    def __init__(self, settings: CaptureSettings, family: Family):
        self.settings = settings
        self.family = family

    def outer_sample(self, executor, *args, **kwargs):
        """One sampler call: a file at its end, even if it was interrupted."""
        guider = executor.class_obj
        sigmas = args[3] if len(args) > 3 else kwargs["sigmas"]
        sampling = guider.model_patcher.get_model_object("model_sampling")
        run = CaptureRun(self.settings, self.family, StepSchedule(sigmas.tolist(), sampling.percent_to_sigma))
        options = guider.model_options["transformer_options"]
        options[KEY] = (run, None)
        try:
            return executor(*args, **kwargs)
        finally:
            options.pop(KEY, None)
            save(run)

    def predict_noise(self, executor, *args, **kwargs):
        """One model evaluation: which step it belongs to."""
        run, _ = executor.class_obj.model_options.get("transformer_options", {}).get(KEY) or (None, None)
        if run is not None:
            timestep = args[1] if len(args) > 1 else kwargs["timestep"]
            run.step = run.schedule.step_of(float(timestep.flatten()[0]))
        return executor(*args, **kwargs)

    def apply_model(
        self,
        executor,
        x,
        t,
        c_concat=None,
        c_crossattn=None,
        control=None,
        transformer_options=None,
        **kwargs,
    ):
        """One call of the model: notes of its own."""
        options = transformer_options or {}
        run, _ = options.get(KEY) or (None, None)
        if run is not None:
            text_tokens = c_crossattn.shape[1] if getattr(c_crossattn, "ndim", 0) == 3 else None
            options = {**options, KEY: (run, ForwardNotes(text_tokens))}
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)


def save(run: CaptureRun) -> None:
    """Write what was kept, and say so, or why nothing was."""
    node_id = run.settings.node_id
    left_out = f"; {run.left_out} calls did not fit" if run.left_out else ""
    if not run.tensors:
        say(f"captured nothing: no call of these blocks and steps{left_out}", node_id, logging.WARNING)
        return
    path = write(output_folder(), run.settings.prefix, run.tensors, run.metadata())
    size = sum(t.numel() * t.element_size() for t in run.tensors.values()) / 2**20
    say(f"captured {len(run.tensors) // 3} calls, {size:.1f} MiB, in {path.name}{left_out}", node_id)


def capture_attention(model, settings: CaptureSettings, family: Family):
    """A clone of model whose attention calls are looked at by a new outermost override."""
    from comfy.patcher_extension import WrappersMP

    captured = model.clone()
    options = captured.model_options.setdefault("transformer_options", {})
    options[OVERRIDE] = CaptureOverride(options.get(OVERRIDE))
    hooks = CaptureHooks(settings, family)
    captured.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, hooks.outer_sample)
    captured.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, hooks.predict_noise)
    captured.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, hooks.apply_model)
    return captured
