"""When a run begins, steps, and ends: the sampler events that a patched model listens to.

ComfyUI calls, for every run: OUTER_SAMPLE { PREDICT_NOISE { APPLY_MODEL { attention ... } } ON_CLEANUP }.
"""

import logging
from collections.abc import Iterator

from .families import Family
from .patch_settings import PatchSettings
from .report_text import report_text
from .run_report import RunReport, log
from .run_state import Forward, Run, Shared
from .status_events import send_status, show_text
from .step_schedule import StepPlan, StepSchedule

KEY = "vc_attention"  # of our wrappers and callbacks on a model
OVERRIDE = "optimized_attention_override"  # ComfyUI's one slot for attention
RUN = "vc_attention_run"  # in transformer_options during a run
FORWARD = "vc_attention_forward"  # in transformer_options during one call of the model
COMPILED_BEFORE = (
    "a graph that torch.compile made before this node was there (restart ComfyUI to make a new one)"
)


def chain_of(override) -> Iterator[object]:
    """An attention override and those that it remembers as its predecessors."""
    seen = []
    while override is not None and not any(override is other for other in seen):
        seen.append(override)
        yield override
        override = getattr(override, "_vc_previous", None)


class SamplingHooks(Shared):
    """The events of one patched model. Shared by its clones, so what belongs to a run lives in Run."""

    def __init__(self, override, settings: PatchSettings, family: Family):
        self.override = override
        self.settings = settings
        self.family = family
        self._live: list[Run] = []

    def outer_sample(self, executor, *args, **kwargs):
        """One sampler call: a fresh run, freed and reported whatever happens."""
        guider = executor.class_obj
        run = self._begin(guider, args[3] if len(args) > 3 else kwargs["sigmas"])
        options = guider.model_options["transformer_options"]
        options[RUN] = run
        completed = False
        try:
            sampled = executor(*args, **kwargs)
            run.report.record.close(guider.model_patcher.load_device)
            completed = True
            return sampled
        finally:
            options.pop(RUN, None)
            self._live.remove(run)
            run.close()
            run.report.stopped = not completed
            if (
                completed or run.report.received
            ):  # a prompt that failed before its first call says nothing of us
                self._tell(run, guider)

    def predict_noise(self, executor, *args, **kwargs):
        """One model evaluation, for every sampler: the only place that reads sigma to the host."""
        options = executor.class_obj.model_options.get("transformer_options", {})
        run = options.get(RUN)
        if self._owns(run):
            before = run.plan
            timestep = args[1] if len(args) > 1 else kwargs["timestep"]
            plan = run.begin_evaluation(float(timestep.flatten()[0]))
            if before is not None and before.step != plan.step:
                show_progress(run, before)
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
        """One call of the model; several GPUs make theirs on threads, at the same time."""
        options = transformer_options or {}
        run = options.get(RUN)
        if self._owns(run):
            if run.plan is None:  # a sampler of its own, that does not announce evaluations
                run.begin_evaluation(float(options["sigmas"].flatten()[0]))
            text_tokens = c_crossattn.shape[1] if getattr(c_crossattn, "ndim", 0) == 3 else None
            options = {**options, FORWARD: Forward(run, text_tokens)}
        return executor(x, t, c_concat, c_crossattn, control, options, **kwargs)

    def on_cleanup(self, patcher):
        """The host is about to give the model's memory away; ours goes first."""
        for run in self._live:
            run.store.clear()

    def _owns(self, run) -> bool:
        # a second patch further down the graph has its own run, under the same key
        return run is not None and run.owner is self.override

    def _begin(self, guider, sigmas) -> Run:
        sampling = guider.model_patcher.get_model_object("model_sampling")
        schedule = StepSchedule(
            sigmas.tolist(),
            sampling.percent_to_sigma,
            self.settings.grouping_window,
            self.settings.start_percent,
            self.settings.end_percent,
        )
        run = Run(self.override, self.settings, self.family, schedule)
        self._live.append(run)
        return run

    def _tell(self, run: Run, guider) -> None:
        report = run.report
        if not report.received:
            report.overwritten_by = replaced_by(guider, self.override)
        self.override.finished.append(report)
        tell_finished(report, self.settings.node_id)


def show_progress(run: Run, done: StepPlan) -> None:
    """On the node: what ran up to a step that is over."""
    node_id = run.settings.node_id
    show_text(run.report.progress(done.step), node_id)
    send_status(node_id, "step", **run.report.status(), step=done.step + 1, grouped=done.grouping)


def tell_finished(report: RunReport, node_id: str | None) -> None:
    """One log line about a finished run, and the report on the node."""
    summary = report.summary()
    log.log(logging.INFO if report.received else logging.WARNING, "[VC-Attention] %s", summary)
    show_text(summary, node_id)
    send_status(node_id, "ended", **report.status(), report=report_text([report]))


def replaced_by(guider, override) -> str | None:
    """Who keeps attention calls from an override that got none, as far as it can be told."""
    current = guider.model_options.get("transformer_options", {}).get(OVERRIDE)
    if current is not None and not any(link is override for link in chain_of(current)):
        return name_of(current)
    patches = getattr(guider.model_patcher, "object_patches", {})
    forwards = [key for key in patches if "attn" in key and key.endswith(".forward")]
    if forwards:
        return f"{name_of(patches[forwards[0]])} on {forwards[0]}"
    replaced = guider.model_options.get("transformer_options", {}).get("patches_replace", {}).get("dit", {})
    if replaced:
        return name_of(next(iter(replaced.values())))
    # compile nodes drop the guard that would tell a model with an override from one without
    return COMPILED_BEFORE if "torch_compile_kwargs" in guider.model_options else None


def name_of(function) -> str:
    """Module and name of a callable, for people."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
