"""The patch of a WanVideoWrapper model, LongCat-Video among them: that pack has its own models and samplers.

Its attention asks no override. So a patched model carries a handle in its transformer_options, which the
sampler copies deeply once per run: the copy is the run. During a forward whose options hold that run, and
only then, the self-attention of each block is answered here; what is left alone goes to the wrapper's own.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch

from .families import Family, Layer
from .model_patch import AttentionOverride
from .not_active import REASON
from .patch_settings import PatchSettings
from .run_state import Forward, Run, Shared
from .sampling_hooks import FORWARD, show_progress, tell_finished
from .wan_video_schedule import Position, WanVideoSchedule

HANDLE = "vc_attention_wan_video"  # in the model's transformer_options
LAYER = "vc_attention_layer"  # in the options of one call

# Modes of the wrapper that compute plain attention; the others weigh or drop keys.
PLAIN_MODES = {
    *("sdpa", "comfy", "flash_attn_2", "flash_attn_3"),
    *("sageattn", "sageattn_3", "sageattn_compiled", "sageattn_varlen"),
}
# Arguments of the wrapper's self-attention that change nothing for a plain call.
KNOWN_ARGUMENTS = {
    *("seq_lens", "transformer_options", "attention_mode_override", "frame_tokens"),
    *("lynx_ref_scale", "onetoall_ref_scale"),
}


class WanVideo(Family):
    """A model of WanVideoWrapper. Every call that arrives here is self-attention of a block; a continued clip
    asks twice, noise queries with all keys and condition queries with condition keys."""

    def __init__(self, diffusion_model):
        longcat = getattr(diffusion_model, "is_longcat", False)
        self.name = ("LongCat-Video" if longcat else "Wan") + " (WanVideoWrapper)"

    def owns(self, diffusion_model):
        return is_wan_video(diffusion_model)

    def layer(self, call, notes):
        return call.options[LAYER]


def is_wan_video(diffusion_model) -> bool:
    """Whether it is a model of WanVideoWrapper; its module's first part is the folder that the user chose."""
    kind = type(diffusion_model)
    return kind.__qualname__ == "WanModel" and kind.__module__.endswith("wanvideo.modules.model")


def attention_layers(diffusion_model) -> Iterator[tuple[Layer, torch.nn.Module]]:
    """Every self-attention of the model's blocks; compiled blocks hand their attributes through."""
    for index, block in enumerate(diffusion_model.blocks):
        yield Layer("main", index, index), block.self_attn
    places = getattr(diffusion_model, "vace_layers", None) or ()
    for index, block in enumerate(getattr(diffusion_model, "vace_blocks", None) or ()):
        yield Layer("vace", index, places[index] if index < len(places) else index), block.self_attn


class LayerForward(Shared):
    """Stands in for the forward of one self-attention while a patched model's forward runs."""

    def __init__(self, patch: "WanVideoPatch", layer: Layer, attention: torch.nn.Module):
        self.patch = patch
        self.layer = layer
        self.attention = attention

    def install(self) -> None:
        self.usual = self.attention.forward
        self._was_set = "forward" in vars(self.attention)
        self.attention.forward = self

    def remove(self) -> None:
        if vars(self.attention).get("forward") is not self:
            return
        del self.attention.forward
        if self._was_set:
            self.attention.forward = self.usual

    # The wrapper compiles blocks; a traced stand-in would repeat its first step for ever.
    @torch.compiler.disable
    def __call__(self, q, k, v, *args, **kwargs):
        """q: [B, Lq, H, D]; k, v: [B, Lk, H, D]. Returns the projected output [B, Lq, H * D]."""
        usual = partial(self.usual, q, k, v, *args, **kwargs)
        current = self.patch.current
        if current is None:
            return usual()
        reason = unusual(self.attention, k, args, kwargs)
        if reason is not None:
            current.decline(self.layer, reason)
            return usual()
        call = {
            "skip_reshape": True,
            "skip_output_reshape": True,
            "transformer_options": {**current.options, LAYER: self.layer},
        }
        override = self.patch.override
        out = override.take((q.shape[2],), call, lambda: [t.transpose(1, 2) for t in (q, k, v)])
        if out is None:
            with override.watch_usual(call, q.device):
                return usual()
        return self.attention.o(out.transpose(1, 2).flatten(2))


def unusual(attention, k, args, kwargs) -> str | None:
    """Why a call is more than softmax(q k) v and the output projection; None if it is just that."""
    if len(args) > 1:
        return "called with arguments that this node does not know"
    for name, value in kwargs.items():
        if name == "lynx_ref_feature" and getattr(attention, "ref_adapter", None) is None:
            continue
        if name not in KNOWN_ARGUMENTS and value is not None:
            return f"the wrapper's {name}"
    chosen = kwargs.get("attention_mode_override")
    if chosen is not None and "attention_mode_override" in (kwargs.get("transformer_options") or {}):
        return "mode set by WanVideoSetAttentionModeOverride"
    mode = chosen or attention.attention_mode
    if mode not in PLAIN_MODES:
        return f"attention mode {mode}"
    lengths = args[0] if args else kwargs.get("seq_lens")
    if "flash" in mode and lengths is not None and bool((lengths < k.shape[1]).any()):
        return "padded keys"
    return None


class SamplerPass:
    """One way through the steps. The wrapper's loops make several of them in one run."""

    def __init__(self, patch: "WanVideoPatch"):
        settings = patch.override.settings
        self.schedule = WanVideoSchedule(
            settings.grouping_window, settings.start_percent, settings.end_percent
        )
        self.run = Run(patch.override, settings, patch.override.family, self.schedule)
        self.step = -1
        self.closed = False
        self._forwards: Counter[bool] = Counter()  # of this step: unconditional or not
        self._before = 0  # forwards of the step before

    def begin(self, arguments) -> "CurrentForward":
        """A forward of the model begins."""
        position, uncond = Position.of(arguments), bool(arguments.get("is_uncond"))
        if position.step != self.step:
            done = self.run.plan
            self.run.begin_evaluation(position)
            self.run.report.steps = self.schedule.steps
            if done is not None:
                show_progress(self.run, done)
            self.step, self._before = position.step, self._forwards.total()
            self._forwards.clear()
        # context windows and further conditions come in a fixed order
        name = ("forward", self._forwards[uncond])
        self._forwards[uncond] += 1
        return CurrentForward(self.run, uncond, name)

    def end(self, last: bool, failed: bool, device: torch.device) -> None:
        """A forward is over. Nothing says when a run is: the last step has as many as the one before."""
        if failed:
            self.run.store.clear()
        elif last and self._forwards.total() >= self._before > 0:
            self.close(device)

    def close(self, device: torch.device | None = None) -> None:
        """Free what is held, and tell what ran; once."""
        if self.closed:
            return
        self.closed = True
        run = self.run
        run.report.record.close(device)
        run.close()
        run.owner.finished.append(run.report)
        tell_finished(run.report, run.settings.node_id)


class CurrentForward:
    """The forward that runs now, as the override sees it."""

    def __init__(self, run: Run, uncond: bool, name):
        self.forward = Forward(run)
        self.options = {FORWARD: self.forward, "cond_or_uncond": [int(uncond)], "uuids": [name]}

    def decline(self, layer: Layer, reason: str) -> None:
        self.forward.run.owner.count_declined(self.forward, reason, layer.position)


class WanVideoRun:
    """A run of the wrapper's sampler: made by its copy of the options, gone when that is."""

    def __init__(self, patch: "WanVideoPatch"):
        self.patch = patch
        self._passes: list[SamplerPass] = []  # the one that is on
        weakref.finalize(self, close_all, self._passes).atexit = False

    def __deepcopy__(self, memo):
        return WanVideoRun(self.patch)

    def pass_at(self, step: int) -> SamplerPass:
        """The pass that a forward at this step belongs to."""
        if self._passes and (self._passes[0].closed or step < self._passes[0].step):
            close_all(self._passes)
        if not self._passes:
            self._passes.append(SamplerPass(self.patch))
        return self._passes[0]

    @property
    def last_pass(self) -> SamplerPass:
        return self._passes[0]


def close_all(passes: list[SamplerPass]) -> None:
    while passes:
        passes.pop().close()


class WanVideoPatch:
    """What a patched model and its clones carry. Hooks on the model live as long as this does."""

    def __init__(self, diffusion_model, settings: PatchSettings):
        self.override = AttentionOverride(settings, WanVideo(diffusion_model))
        self.current: CurrentForward | None = None  # while a forward of ours runs
        self._loose: WanVideoRun | None = None  # of a sampler that does not copy the options
        self._layers: dict[Layer, LayerForward] = {}
        hooks = ForwardHooks(self)
        handles = (
            diffusion_model.register_forward_pre_hook(hooks.before, with_kwargs=True),
            diffusion_model.register_forward_hook(hooks.after, with_kwargs=True, always_call=True),
        )
        weakref.finalize(self, remove_all, handles).atexit = False

    def __deepcopy__(self, memo):
        return WanVideoRun(self)

    def run_in(self, arguments) -> WanVideoRun | None:
        """The run that a forward's keyword arguments belong to, if it is one of this patch."""
        handle = (arguments.get("transformer_options") or {}).get(HANDLE)
        if handle is self:
            self._loose = handle = self._loose or WanVideoRun(self)
        return handle if isinstance(handle, WanVideoRun) and handle.patch is self else None

    def layers(self, diffusion_model) -> Iterator[LayerForward]:
        """One stand-in per layer, the same object in every forward."""
        for layer, attention in attention_layers(diffusion_model):
            known = self._layers.get(layer)
            if known is None or known.attention is not attention:
                known = self._layers[layer] = LayerForward(self, layer, attention)
            yield known

    def leave(self, diffusion_model) -> None:
        """The forward is over: the layers answer for themselves again."""
        for layer in self.layers(diffusion_model):
            layer.remove()
        self.current = None


class ForwardHooks:
    """Around every forward of the model; forwards without our handle in their options pass untouched."""

    def __init__(self, patch: WanVideoPatch):
        self._patch = weakref.ref(patch)

    @torch.compiler.disable
    def before(self, diffusion_model, args, kwargs):
        patch = self._patch()
        if patch is None:
            return
        if patch.current is not None:  # PyTorch calls no hook after a forward that Ctrl-C ended
            patch.leave(diffusion_model)
        run = patch.run_in(kwargs)
        if run is not None:
            patch.current = run.pass_at(int(kwargs.get("current_step", 0))).begin(kwargs)
            for layer in patch.layers(diffusion_model):
                layer.install()

    @torch.compiler.disable
    def after(self, diffusion_model, args, kwargs, output):
        patch = self._patch()
        run = None if patch is None else patch.run_in(kwargs)
        if run is not None:
            patch.leave(diffusion_model)
            device = torch.device(getattr(diffusion_model, "main_device", "cpu"))
            # a forward that raised has no output
            run.last_pass.end(bool(kwargs.get("last_step")), output is None, device)


def remove_all(handles) -> None:
    for handle in handles:
        handle.remove()


def patch_wan_video(model, settings: PatchSettings):
    """A clone of a WANVIDEOMODEL that carries the patch; an earlier one of ours is replaced."""
    patched = remove_wan_video_patch(model) or model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    options[HANDLE] = WanVideoPatch(patched.model.diffusion_model, settings)
    patched.model_options.pop(REASON, None)
    return patched


def remove_wan_video_patch(model):
    """A clone of a WANVIDEOMODEL without our patch; None without one."""
    if HANDLE not in model.model_options.get("transformer_options", {}):
        return None
    clean = model.clone()
    del clean.model_options["transformer_options"][HANDLE]
    return clean
