"""The one table of kernels, best first, and the one way to choose from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import formats
from .config import Recipe, resolve_recipe
from .device_record import known
from .operands import AttentionProblem

FAST_F16_SUMS = ((8, 9), (12, 0), (12, 1))  # cards whose E4M3 products with f16 sums are one instruction
MMA_FP8_CARDS = ((9, 0), *FAST_F16_SUMS)  # of cuda_int8_fp8_sm89; sm_90 to test it
EXPERIMENTAL_CARDS = ((10, 0), (10, 3))  # kernels compile for these, and nobody has told of a test on one
NO_INT8 = "sm_103 has no INT8 tensor cores; use triton_fp8_fp8"


class Stages(NamedTuple):
    """The functions of one kernel; signatures in prepare/reference.py and attend/reference.py."""

    prepare: Callable
    attend: Callable


@dataclass(frozen=True)
class KernelSpec:
    """One way to run VC-Attention: what it computes, how it is loaded, when it applies."""

    name: str  # the node's menu entry, the test id, the log word
    numerics: tuple[str, ...]  # recipes it can compute, preferred first
    load: Callable[[], Stages]  # imports its backend
    why_not: Callable[[AttentionProblem], str | None]  # None: this kernel can run the problem
    automatic: Callable[[AttentionProblem], bool] = lambda problem: True  # may "auto" take it


@dataclass(frozen=True)
class Choice:
    """The kernel that runs a problem and the recipe it will compute; or None and the reason, a sentence."""

    kernel: KernelSpec | None
    reason: str
    recipe: Recipe | None = None


def _load_cuda_int8_fp8_sm90():
    from .attend.cuda_int8_fp8_sm90 import attend
    from .prepare.cuda_sm90 import prepare

    return Stages(prepare, attend)


def _load_cuda_int8_int8_sm90():
    from .attend.cuda_int8_int8_sm90 import attend
    from .prepare.cuda_sm90 import prepare

    return Stages(prepare, attend)


def _load_cuda_fp8_fp8_sm90():
    from .attend.cuda_fp8_fp8_sm90 import attend
    from .prepare.cuda_sm90 import prepare

    return Stages(prepare, attend)


def _load_cuda_nvfp4_sm120():
    from .attend.cuda_nvfp4_sm120 import attend
    from .prepare.cuda_nvfp4 import prepare

    return Stages(prepare, attend)


def _load_cuda_int8_int8():
    from .attend.cuda_int8_int8 import attend
    from .prepare.cuda_mma import prepare

    return Stages(prepare, attend)


def _load_cuda_int8_fp8_sm89():
    from .attend.cuda_int8_fp8_sm89 import attend
    from .prepare.cuda_mma import prepare

    return Stages(prepare, attend)


def _load_triton_int8_fp8():
    from .attend.triton_int8_fp8 import attend
    from .prepare.triton_int8_fp8 import prepare

    return Stages(prepare, attend)


def _load_triton_int8_int8():
    from .attend.triton_int8_int8 import attend
    from .prepare.triton_int8_int8 import prepare

    return Stages(prepare, attend)


def _load_triton_fp8_fp8():
    from .attend.triton_fp8_fp8 import attend
    from .prepare.triton_fp8_fp8 import prepare

    return Stages(prepare, attend)


def _load_reference():
    from .attend.reference import attend
    from .prepare.reference import prepare

    return Stages(prepare, attend)


def _in_words(device_type: str) -> str:
    return {"cpu": "a CPU", "rocm": "an AMD GPU", "mps": "an Apple GPU"}.get(device_type, device_type)


def _card_refuses(problem: AttentionProblem, fits: bool, needs: str) -> str | None:
    """fits: whether the NVIDIA card of problem does; needs: which cards do."""
    if problem.device_type != "cuda":
        return f"needs an NVIDIA GPU, got {_in_words(problem.device_type)}"
    if not fits:
        return f"needs {needs}, got sm_{problem.capability[0]}{problem.capability[1]}"
    return None


def _at_least(problem: AttentionProblem, lowest: tuple[int, int]) -> bool:
    return problem.capability is not None and problem.capability >= lowest


def _cuda_refuses(problem: AttentionProblem, fits: bool, needs: str) -> str | None:
    """What the CUDA C++ rows have in common; fits and needs as _card_refuses."""
    refusal = _card_refuses(problem, fits, needs)
    if refusal is None and problem.head_dim != 128:
        refusal = f"needs head_dim 128, got {problem.head_dim}"
    from .attend.cuda_build import MOST_HEADS, why_no_build

    heads = problem.q_shape[0] * problem.q_shape[1]
    if refusal is None and heads > MOST_HEADS:
        refusal = f"takes at most {MOST_HEADS:,} heads of all batches, got {heads:,}"
    return refusal or why_no_build()


def _hopper_refuses(problem: AttentionProblem) -> str | None:
    return _cuda_refuses(problem, problem.capability == (9, 0), "sm_90 (H100, H200)")


def _mma_refuses(problem: AttentionProblem) -> str | None:
    if problem.capability == (10, 3):
        return NO_INT8
    return _cuda_refuses(problem, _at_least(problem, (8, 0)), "sm_80 or newer")


def _mma_fp8_refuses(problem: AttentionProblem) -> str | None:
    return _cuda_refuses(problem, problem.capability in MMA_FP8_CARDS, "sm_89, sm_90 or sm_120")


def _has_fast_f16_sums(problem):
    # elsewhere the product is expanded into two of 16 bits: sm_90 runs it to test it
    return problem.capability in FAST_F16_SUMS


def _nvfp4_refuses(problem: AttentionProblem) -> str | None:
    from .prepare.cuda_nvfp4 import NATIVE

    needs = "4-bit tensor cores of sm_120 (RTX 50, RTX PRO Blackwell)"
    return _cuda_refuses(problem, problem.capability in NATIVE, needs)


def _triton_missing() -> str | None:
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of it does not load
        return f"needs Triton ({error})"
    return None


def _triton_refuses(problem: AttentionProblem, lowest: tuple[int, int]) -> str | None:
    needs = f"sm_{lowest[0]}{lowest[1]} or newer"
    refusal = _card_refuses(problem, _at_least(problem, lowest), needs)
    if refusal is None and problem.head_dim not in formats.HEAD_DIMS:
        refusal = f"needs head_dim 64 or 128, got {problem.head_dim}"
    return refusal or _triton_missing()


def _triton_int8_fp8_refuses(problem):
    return NO_INT8 if problem.capability == (10, 3) else _triton_refuses(problem, (8, 9))


def _triton_fp8_fp8_refuses(problem):
    return _triton_refuses(problem, (8, 9))


def _triton_int8_int8_refuses(problem):
    return NO_INT8 if problem.capability == (10, 3) else _triton_refuses(problem, (8, 0))


def _not_on_blackwell_datacenter(problem):
    # Triton compiles an int8 dot to mma.sync there, and E4M3 to the tensor cores' own instructions; not timed
    return problem.capability not in ((10, 0), (10, 3))


def _reference_refuses(problem):
    return None


# Best first: "auto" takes the first row whose recipe fits the config and that can run the problem.
# Among rows that fit one config the nearer numerics come first: INT8 scores before E4M3 ones, which err more
# (tests/evidence, "Output error"), though cuda_fp8_fp8_sm90 is no slower ("Speed over length"). Of one recipe
# CUDA C++ comes first: on sm_90 it is faster ("Speed over length"). On other cards that is chosen, none was
# timed: cuda_int8_int8 errs less than triton_int8_int8 ("Length"); cuda_int8_fp8_sm89 sums in f16, which its
# cards do faster by their data sheets.
KERNELS = (
    KernelSpec("cuda_int8_fp8_sm90", ("int8_fp8",), _load_cuda_int8_fp8_sm90, _hopper_refuses),
    KernelSpec("cuda_int8_int8_sm90", ("int8_int8",), _load_cuda_int8_int8_sm90, _hopper_refuses),
    KernelSpec("cuda_nvfp4_sm120", ("nvfp4",), _load_cuda_nvfp4_sm120, _nvfp4_refuses),
    KernelSpec(
        "cuda_int8_int8", ("int8_int8",), _load_cuda_int8_int8, _mma_refuses, _not_on_blackwell_datacenter
    ),
    KernelSpec(
        "cuda_int8_fp8_sm89",
        ("int8_fp8",),
        _load_cuda_int8_fp8_sm89,
        _mma_fp8_refuses,
        _has_fast_f16_sums,
    ),
    KernelSpec(
        "triton_int8_fp8",
        ("int8_fp8",),
        _load_triton_int8_fp8,
        _triton_int8_fp8_refuses,
        _not_on_blackwell_datacenter,
    ),
    KernelSpec("cuda_fp8_fp8_sm90", ("fp8_fp8",), _load_cuda_fp8_fp8_sm90, _hopper_refuses),
    KernelSpec("triton_fp8_fp8", ("fp8_fp8",), _load_triton_fp8_fp8, _triton_fp8_fp8_refuses),
    KernelSpec("triton_int8_int8", ("int8_int8",), _load_triton_int8_int8, _triton_int8_int8_refuses),
    KernelSpec(
        "reference",
        ("int8_int8", "int8_fp8", "fp8_fp8", "nvfp4"),
        _load_reference,
        _reference_refuses,
        automatic=lambda problem: False,
    ),
)


def kernel_named(name: str) -> KernelSpec:
    """The row called name. Raises ValueError that lists the known names."""
    for spec in KERNELS:
        if spec.name == name:
            return spec
    raise ValueError(f"unknown kernel {name!r}; choose auto, {', '.join(spec.name for spec in KERNELS)}")


def choose_kernel(problem: AttentionProblem, name: str = "auto", *, untested: bool = False) -> Choice:
    """The kernel that runs problem: the row called name, or for "auto" the first row that can.

    Returns Choice(None, reason) when none can; "auto" never takes "reference". What the record of the card
    says counts: no kernel that failed there, and for "auto" none that is slower than PyTorch, nor, once the
    card has a record, an untested one; untested=True lets those pass, to find out which to test.
    Raises ValueError for an unknown name.
    """
    if name != "auto":
        choice = match(kernel_named(name), problem, exact=True)
        entry = known(problem, name) if choice.kernel else None
        return Choice(None, f"{name}: {entry.why_not}") if entry and entry.why_not else choice
    refusals, beside_the_point = [], []
    for spec in KERNELS:
        if not spec.automatic(problem):
            continue
        choice = match(spec, problem, exact=False)
        refusal = _record_refuses(spec, problem, untested) if choice.kernel else None
        if choice.kernel and not refusal:
            return choice
        fits = resolve_recipe(problem.config, spec.numerics, problem.capability, exact=False) is not None
        told = refusals if fits else beside_the_point
        told.append(f"{spec.name}: {refusal}" if refusal else choice.reason)
    hint = "" if problem.device_type == "cuda" else "; kernel reference runs anywhere, slowly"
    return Choice(None, joined(refusals or beside_the_point) + hint)


def _record_refuses(spec: KernelSpec, problem: AttentionProblem, untested: bool) -> str | None:
    """Why "auto" must not take a kernel on this card; a card without any record refuses nothing."""
    entry = known(problem, spec.name)
    if entry is not None:
        return entry.why_not_auto
    if untested or not any(known(problem, other.name) for other in KERNELS):
        return None
    return "not tested on this card yet, `python install.py --all` does it"


def joined(refusals: list[str]) -> str:
    """Refusals "<kernel>: <why>" as one sentence, kernels that refuse alike named together."""
    kernels: dict[str, list[str]] = {}
    for refusal in refusals:
        name, _, why = refusal.partition(": ")
        kernels.setdefault(why, []).append(name)
    if len(kernels) == 1 and len(refusals) > 1:
        why = next(iter(kernels))
        return f"every kernel {why}" if why.startswith(("needs ", "takes ")) else f"every kernel: {why}"
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in kernels.items())


def match(spec: KernelSpec, problem: AttentionProblem, exact: bool = True) -> Choice:
    """Whether one kernel runs problem, whatever the record says. exact: it was asked for by name."""
    refusal = _general_refusal(problem) or spec.why_not(problem)
    if refusal:
        return Choice(None, f"{spec.name}: {refusal}")
    config = problem.config
    recipe = resolve_recipe(config, spec.numerics, problem.capability, exact)
    if recipe is None:
        asked = f"{config.precision}, expcast {config.expcast}, value_format {config.value_format}"
        return Choice(None, f"{spec.name}: computes {' or '.join(spec.numerics)}, asked for {asked}")
    return Choice(spec, "", recipe)


def _general_refusal(problem: AttentionProblem) -> str | None:
    """What no kernel takes."""
    if any(dtype not in formats.FLOAT_DTYPES for dtype in problem.dtypes):
        got = ", ".join(str(dtype).removeprefix("torch.") for dtype in problem.dtypes)
        return f"takes bf16, fp16 and fp32, got {got}"
    if problem.head_dim & (problem.head_dim - 1) or not 16 <= problem.head_dim <= 128:
        return f"needs head_dim 16, 32, 64 or 128, got {problem.head_dim}"
    return None


def load_grouping(v: torch.Tensor, clusters: int = 128) -> Callable:
    """The fastest group_tokens for values v [B, H, Lk, D]; signature in group/reference.py."""
    if v.device.type == "cuda" and torch.version.hip is None:
        if _cuda_grouping_fits(v, clusters):
            from .group.cuda_kmeans import group_tokens

            return group_tokens
        if _triton_missing() is None:
            from .group.triton_kmeans import group_tokens

            return group_tokens
    from .group.reference import group_tokens

    return group_tokens


def _cuda_grouping_fits(v, clusters):
    from .attend.cuda_build import why_no_build
    from .group.cuda_kmeans import shared_bytes, why_not

    card = torch.cuda.get_device_properties(v.device)
    # bf16 products need sm_80; 256 clusters need 116 KB, and consumer cards have 99
    able = (card.major, card.minor) >= (8, 0) and shared_bytes(clusters) <= card.shared_memory_per_block_optin
    return able and not (why_not(v) or why_no_build())
