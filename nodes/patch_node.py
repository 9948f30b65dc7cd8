"""The node "VC-Attention Patch": MODEL in, MODEL out."""

from dataclasses import replace

import torch
from comfy_api.latest import io

from ..kernels import KERNELS, AttentionProblem, VCConfig
from ..kernels.operands import card_fields
from .families import family_of
from .first_use import choose_tested, with_measured_tokens
from .model_patch import patch_attention, remove_patch
from .not_active import with_reason
from .patch_settings import DEFAULT_MIN_TOKENS, PatchSettings, parse_blocks
from .run_report import say
from .status_events import send_status

PRECISIONS = ["auto", "8-bit", "4-bit", "off"]
KERNEL_NAMES = ["auto", *(spec.name for spec in KERNELS)]  # on every machine, so that workflows travel
OFF = "precision is off"
WAY_OUT = "With precision and kernel at auto, the model would pass through unchanged"


class VCAttentionPatch(io.ComfyNode):
    """Runs the video self-attention of a model on VC-Attention kernels."""

    @classmethod
    def define_schema(cls):
        """Ids and order are fixed for good: saved workflows store values by place. Only append."""
        return io.Schema(
            node_id="VCAttentionPatch",
            display_name="VC-Attention Patch",
            category="model/patch",
            description="Faster self-attention for video models, at 8 or 4 bits, close to full precision. "
            "Put it between the model loader and the sampler. Unknown models pass through unchanged. Longest "
            "call measured: 400,000 tokens on an H200.",
            search_aliases=["sage", "attention", "fp8", "nvfp4", "speed"],
            inputs=[
                io.Model.Input("model", tooltip="The loaded video model."),
                *main_inputs(),
                *advanced_inputs(),
                io.Model.Input(
                    "model_2", optional=True, tooltip="Wan 2.2: the second expert, patched alike."
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL"), io.Model.Output(display_name="MODEL 2")],
            hidden=[io.Hidden.unique_id],
            # equal nodes would share one cached model, which knows one node's id to report to
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model, model_2=None, **widgets):
        if widgets.get("precision") == "off":
            return io.NodeOutput(*(m and unpatched(m, OFF) for m in (model, model_2)))
        settings = settings_of(cls, **widgets)
        return io.NodeOutput(*(m and patch_model(m, settings) for m in (model, model_2)))


def settings_of(
    node,
    precision="auto",
    expcast="auto",
    grouping_window=0.25,
    value_format="auto",
    regroup_every=4,
    clusters=128,
    start_percent=0.0,
    end_percent=1.0,
    exact_blocks="",
    min_tokens=0,
    kernel="auto",
) -> PatchSettings:
    """What the widgets of a patch node ask for. Raises ValueError for combinations without a meaning."""
    return PatchSettings(
        config=VCConfig("4-bit" if precision == "4-bit" else "8-bit", expcast, value_format, clusters),
        kernel=kernel,
        grouping_window=grouping_window,
        regroup_every=regroup_every,
        start_percent=start_percent,
        end_percent=end_percent,
        exact_blocks=parse_blocks(exact_blocks),
        min_tokens=min_tokens,
        node_id=node.hidden.unique_id if node.hidden is not None else None,
        precision=precision,
    )


def main_inputs():
    return [
        io.Combo.Input(
            "precision",
            options=PRECISIONS,
            default="auto",
            tooltip="auto: 8-bit where this card can, else nothing. 4-bit: NVFP4 (RTX 50), coarser; the "
            "first and last steps, and all of a few-step schedule, stay at 8 bits; set grouping_window to 1 "
            "with it. off: removes this patch and restores what was there.",
        ),
        io.Combo.Input(
            "expcast",
            options=["auto", "on", "off"],
            default="auto",
            tooltip="Writes FP8 probabilities straight from the scores: a little coarser, faster on an H200 "
            "and, by the paper, on B200 and B300. auto: on for H100, H200, B200 and B300.",
        ),
        io.Float.Input(
            "grouping_window",
            default=0.25,
            min=0.0,
            max=1.0,
            step=0.05,
            tooltip="Share of the denoising, from the start, in which similar values are grouped, for a "
            "little time and memory. Clips grouped throughout were measured nearer to exact than with "
            "0.25: hardly with ExpCast, a little with INT8 values, clearly at 4 bits, where 1 is the better "
            "choice. 0 turns grouping off.",
        ),
    ]


def advanced_inputs():
    return [
        io.Combo.Input(
            "value_format",
            options=["auto", "fp8", "int8"],
            default="auto",
            optional=True,
            advanced=True,
            tooltip="How values are stored. int8: smallest error. fp8: fastest on an H200. auto: what suits "
            "the card.",
        ),
        io.Int.Input(
            "regroup_every",
            default=4,
            min=1,
            max=100,
            optional=True,
            advanced=True,
            tooltip="Steps that share one grouping. Clips with 1, 2, 4 and 8 were about equally exact.",
        ),
        io.Int.Input(
            "clusters",
            default=128,
            min=1,
            max=256,
            optional=True,
            advanced=True,
            tooltip="Value groups per head, fewer for few tokens. Of 4 to 256, 128 left least to quantize.",
        ),
        percent_input(
            "start_percent", 0.0, "Denoising before this point keeps the usual attention; 0: none."
        ),
        percent_input("end_percent", 1.0, "Denoising after this point keeps the usual attention; 1: none."),
        io.String.Input(
            "exact_blocks",
            default="",
            optional=True,
            advanced=True,
            tooltip="Blocks that keep the usual attention, like 0,1,38-39. Empty: none.",
        ),
        io.Int.Input(
            "min_tokens",
            default=0,
            min=0,
            max=1_000_000,
            optional=True,
            advanced=True,
            tooltip="Shorter calls keep the usual attention. 0: as measured on this card, "
            f"{DEFAULT_MIN_TOKENS:,} where it was not.",
        ),
        io.Combo.Input(
            "kernel",
            options=KERNEL_NAMES,
            default="auto",
            optional=True,
            advanced=True,
            tooltip="auto: the best kernel for this card. A name: that kernel or an error. "
            "reference is slow and for tests.",
        ),
    ]


def percent_input(name, default, tooltip):
    return io.Float.Input(
        name, default=default, min=0.0, max=1.0, step=0.01, optional=True, advanced=True, tooltip=tooltip
    )


def patch_model(model, settings: PatchSettings):
    """A patched clone; an unpatched one, with one line, if the model is unknown or nothing can run.

    Raises ValueError if the user asked for a precision or a kernel that cannot run here.
    """
    diffusion_model = model.model.diffusion_model
    family = family_of(diffusion_model)
    if family is None:
        reason = f"{type(diffusion_model).__name__} is not a model this node knows"
        say(f"{reason}; it passes through unchanged", settings.node_id)
        return unpatched(model, reason)
    problem = expected_problem(model, settings.config)
    ready = ready_settings(problem, torch.device(model.load_device), settings)
    if isinstance(ready, str):
        return unpatched(model, ready)
    return patch_attention(model, ready, family)


def unpatched(model, reason: str):
    """A clone without our patch that knows why."""
    return with_reason(remove_patch(model) or model.clone(), reason)


def ready_settings(problem, device: torch.device, settings: PatchSettings):
    """The settings with what is known of this card; if nothing can run here the reason, told in one line.

    Raises ValueError if nothing can run and the user asked for a precision or a kernel by name.
    """
    choice = choose_tested(problem, device, settings)
    if choice.kernel is None:
        if settings.by_name:
            raise ValueError(f"VC-Attention cannot run here: {choice.reason}. {WAY_OUT}")
        say(f"not active, output is unchanged: {choice.reason}", settings.node_id)
        return choice.reason
    if settings.hybrid:
        edge = choose_tested(replace(problem, config=settings.edge_config), device, settings)
        if edge.kernel is None:
            say(f"the first and last steps keep the usual attention: {edge.reason}", settings.node_id)
    send_status(
        settings.node_id,
        "ready",
        kernel=choice.kernel.name,
        numerics=choice.recipe.numerics,
        precision=settings.config.precision,
    )
    return with_measured_tokens(settings, problem, choice)


def expected_problem(model, config: VCConfig) -> AttentionProblem:
    """The attention that this model will ask for, before there are tensors."""
    return problem_on(torch.device(model.load_device), model.model.get_dtype_inference(), config)


def problem_on(device: torch.device, dtype: torch.dtype, config: VCConfig) -> AttentionProblem:
    """The attention of a video model on this device."""
    return AttentionProblem.self_attention(DEFAULT_MIN_TOKENS, dtype, config=config, **card_fields(device))
