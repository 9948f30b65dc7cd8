"""Every attention method that the evidence compares, by name.

source says what a row is: "ours" runs the pack's own reference stages (the meaning of every kernel),
"variant" is ours with a choice made otherwise, measured only, "recipe" is our reference of somebody's
published recipe (not their code), "package" is their code, "torch" is PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from comfyui_vc_attention.kernels.benchmark_peers import PEERS
from comfyui_vc_attention.kernels.config import Recipe, VCConfig

from .dense import WHOLE, Numerics, outputs
from .samples import Sample
from .stages import run_stages


@dataclass
class Parts:
    """What one method made of some rows. The last three are None where a method shows its output only."""

    out: torch.Tensor  # [1, H, M, D]
    exact_value_out: torch.Tensor | None = None  # its probabilities on exact values
    quantized: torch.Tensor | None = None  # its values [1, H, L, D], in its order
    ordered: torch.Tensor | None = None  # the exact values in that order


@dataclass(frozen=True)
class Method:
    name: str
    source: str
    run: Callable  # (Sample, q rows [1, H, M, D]) -> Parts
    why_not: Callable = lambda sample: None  # a sentence if it cannot run on this sample


def staged(recipe: Recipe, order: str):
    def run(sample: Sample, q):
        rows = None
        if recipe.numerics == "nvfp4":
            q, rows = sample.q, sample.rows(q.shape[2])[1]
        return Parts(*run_stages(q, sample.k, sample.v, recipe, sample.order(order), rows=rows))

    return run


def dense(numerics: Numerics, order: str = "sequence"):
    def run(sample: Sample, q):
        return Parts(*outputs(q, sample.k, sample.v, numerics, sample.order(order), sample.q))

    return run


FP8 = Recipe("int8_fp8", expcast=True)
FP8_EXP = Recipe("int8_fp8", expcast=False)
INT8 = Recipe("int8_int8")
ALL_FP8, ALL_FP8_EXP = Recipe("fp8_fp8", expcast=True), Recipe("fp8_fp8", expcast=False)
NVFP4 = Recipe("nvfp4", smooth_q=True)
RECIPES = {"int8_fp8 + ExpCast": FP8, "int8_fp8": FP8_EXP, "int8_int8": INT8, "fp8_fp8 + ExpCast": ALL_FP8,
           "fp8_fp8": ALL_FP8_EXP, "nvfp4": NVFP4}  # fmt: skip
ORDERS = ("sequence", "cube", "grouped", "uncapped", "warm", "balanced")
BALANCED_TOKENS = 20_000  # balancing is slow: beyond that on plain structured values only

# the same recipes as parameters, so that variants differ from them in one choice
DENSE_FP8 = Numerics(p="expcast", v="e4m3", v_top=224.0, v_scale_of_residual=False, demean=True)
DENSE_INT8 = Numerics(p="u8", v="s8", v_group=128, v_level=True, demean=True, exact_sum=True, exact_mass=True)
INT8_CODE_MASS = replace(DENSE_INT8, exact_sum=False, exact_mass=False)
DENSE_NVFP4 = Numerics(
    qk="nvfp4", q_group=WHOLE, k_group=WHOLE, smooth_q=True, shaping="feedback", p="nvfp4", v="nvfp4",
    two_scales=True, demean=True, exact_sum=True, exact_mass=True, means_of_codes=True,
)  # fmt: skip
NVFP4_ALONE = replace(DENSE_NVFP4, shaping="", rotate_qk=False, means_of_codes=False)
NVFP4_ALONE_PLAIN = replace(NVFP4_ALONE, demean=False, exact_sum=False, exact_mass=False)
NVFP4_AT_6 = replace(DENSE_NVFP4, two_scales=False)


def order_refusal(order):
    """why_not of a method with an order of that name."""

    def why_not(sample):
        if order == "warm" and sample.earlier is None:
            return "no earlier step's values"
        if order == "uncapped" and sample.clusters == VCConfig().clusters:
            return "long enough for every cluster: the same as grouped"
        slow = sample.v.shape[2] > BALANCED_TOKENS and sample.name != "structured"
        return "slow" if order == "balanced" and slow else None

    return why_not


def ours():
    """Each recipe without means, with means in sequence order, and with means in each order."""
    for name, recipe in RECIPES.items():
        yield Method(f"{name}, no means", "ours", staged(replace(recipe, demean=False), "sequence"))
        for order in ORDERS:
            source = "ours" if order in ("sequence", "grouped", "warm") else "variant"
            yield Method(f"{name}, means, {order}", source, staged(recipe, order), order_refusal(order))
        yield Method(
            f"{name}, no means, order kept",
            "variant",
            staged(replace(recipe, demean=False), "grouped"),
        )
        other = replace(recipe, rotate_qk=not recipe.rotate_qk)
        turned = "rotated" if other.rotate_qk else "not rotated"
        yield Method(f"{name}, means, grouped, Q and K {turned}", "ours", staged(other, "grouped"))
    yield Method("int8_fp8 + ExpCast, means, grouped, K mean kept", "ours",
                 staged(replace(FP8, smooth_k=False), "grouped"))  # fmt: skip


def variants():
    """One choice changed at a time, from the grouped recipe."""
    fp8, int8, fp4 = "int8_fp8 + ExpCast", "int8_int8", "nvfp4"
    own_scale = replace(DENSE_FP8, v_scale_of_residual=True, v_top=448.0)
    by_channel = replace(DENSE_INT8, v_group=WHOLE, v_level=False)
    bare = replace(INT8_CODE_MASS, v_group=WHOLE, v_level=False, demean=False)
    rows = [
        (f"{fp8}, means, Hadamard on V", replace(DENSE_FP8, rotate_v=True), "sequence"),
        (f"{fp8}, V scale from the residual", own_scale, "grouped"),
        (f"{int8}, one V scale per channel", by_channel, "grouped"),
        (f"{int8}, one V scale per channel, no means", bare, "sequence"),
        (f"{int8}, V rounded each by itself", replace(DENSE_INT8, v_level=False), "grouped"),
        (f"{int8}, QK exact", replace(DENSE_INT8, qk="exact"), "grouped"),
        (f"{int8}, P and V exact", replace(DENSE_INT8, p="exact", v="exact"), "grouped"),
        (f"{fp4}, Q not smoothed", replace(DENSE_NVFP4, smooth_q=False), "grouped"),
        (f"{fp4}, largest always at 6", NVFP4_AT_6, "grouped"),
        (f"{fp4}, Q and K balanced, no feedback", replace(DENSE_NVFP4, shaping="balance"), "grouped"),
        (f"{fp4}, feedback, Q and K not balanced", replace(DENSE_NVFP4, shaping="unbalanced"), "grouped"),
        (f"{fp4}, means of exact values", replace(DENSE_NVFP4, means_of_codes=False), "grouped"),
        (f"{fp4}, Q and K rounded each by itself", NVFP4_ALONE, "grouped"),
        (f"{fp4}, Q and K rounded each by itself, no means", NVFP4_ALONE_PLAIN, "sequence"),
        (f"{fp4}, mass of the codes", replace(DENSE_NVFP4, exact_sum=False, exact_mass=False), "grouped"),
    ]  # fmt: skip
    rows += [
        (f"{int8}, mass of the codes", INT8_CODE_MASS, order) for order in ("sequence", "cube", "grouped")
    ]
    exact_fp8 = replace(DENSE_FP8, exact_sum=True, exact_mass=True)
    rows.append((f"{fp8}, mass exact", exact_fp8, "grouped"))
    rows.append(("int8_fp8, mass exact", replace(exact_fp8, p="e4m3"), "grouped"))
    for keys in (8, 16, 64, 128):
        rows.append((f"{int8}, K scale per {keys} keys", replace(DENSE_INT8, k_group=keys), "grouped"))
    for tokens in (2, 16):
        rows.append((f"{int8}, Q scale per {tokens} rows", replace(DENSE_INT8, q_group=tokens), "grouped"))
    for name, numerics, order in rows:
        full = name if order == "sequence" and "exact" not in name else f"{name}, {order}"
        yield Method(full, "variant", dense(numerics, order), order_refusal(order))


SAGE1 = Numerics(q_group=128, k_group=64, rotate_qk=False, p="fp16", exact_sum=True, v="fp16")
SAGE2 = Numerics(q_group=2, k_group=32, k_lanes=True, rotate_qk=False, p="e4m3", p_top=448.0, exact_sum=True,
                 v="e4m3")  # fmt: skip
SAGE3 = Numerics(qk="nvfp4", rotate_qk=False, smooth_q=True, p="nvfp4", exact_sum=True, v="nvfp4",
                 global_scale=False)  # fmt: skip
KITCHEN = Numerics(q_group=4, k_group=32, k_lanes=True, p="u8", v="s8")
NAIVE_HEAD = Numerics(
    qk="e4m3", q_group=WHOLE, k_group=WHOLE, smooth_k=False, rotate_qk=False, v_channels=False
)
NAIVE_BLOCK = replace(NAIVE_HEAD, q_group=128, k_group=128, v_group=128)
ATTN_QAT = Numerics(qk="nvfp4", smooth_k=False, rotate_qk=False, p="e4m3", v="e4m3", v_channels=False)


# References of published recipes. Where a paper leaves a detail open the kinder choice is taken.
PUBLISHED = {
    # scales per block of 128 queries and 64 keys, P and V in fp16
    "SageAttention 1": SAGE1,
    # its sm_90 kernel: scales per lane (2 queries of 16, 32 keys of 128), P up to 448, V per channel
    "SageAttention 2": SAGE2,
    "SageAttention 2 + QK Hadamard": replace(SAGE2, rotate_qk=True),
    # Q and K smoothed, E4M3 microscales without a global scale
    "SageAttention 3": SAGE3,
    "SageAttention 3 + QK Hadamard": replace(SAGE3, rotate_qk=True),
    # scales per 4 queries and 32 keys; the K mean in the place of its anchor key
    "comfy-kitchen INT8": KITCHEN,
    "torch FP8, one scale a head": NAIVE_HEAD,
    # "FlashAttention-4 (8-bit)" and "Naive FP8" of the paper
    "naive FP8, one scale per 128 tokens": NAIVE_BLOCK,
    "naive FP8 + QK Hadamard": replace(NAIVE_BLOCK, rotate_qk=True),
    "Attn-QAT, training-free": ATTN_QAT,
}


def recipes():
    for name, numerics in PUBLISHED.items():
        yield Method(name, "recipe", dense(numerics))


def _package(function):
    """A package attends the rows to all keys; Q scales are shared inside whole blocks of rows only."""

    def run(sample, q):
        return Parts(function(q, sample.k, sample.v))

    return run


def _no_sage3(sample):
    if not sample.q.is_cuda:
        return "needs a GPU"
    if torch.cuda.get_device_capability() not in ((12, 0), (10, 0)):
        return "no kernel for this card"
    try:
        import sageattn3  # noqa: F401
    except ImportError:
        return "not installed"
    return None


def _sage3(q, k, v):
    from sageattn3 import sageattn3_blackwell

    return sageattn3_blackwell(q, k.clone(), v)  # it subtracts the mean in place


QUANTIZED = ("SageAttention 1", "SageAttention 2", "comfy-kitchen INT8")


def packages():
    for peer in PEERS:
        if peer.name in QUANTIZED:
            yield Method(f"{peer.name} (package)", "package", _package(peer.attend),
                         lambda sample, peer=peer: peer.why_not(sample.q))  # fmt: skip
    yield Method("SageAttention 3 (package)", "package", _package(_sage3), _no_sage3)


def _sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def all_methods():
    return [
        Method("PyTorch, 16 bit", "torch", _package(_sdpa)),
        *ours(),
        *variants(),
        *recipes(),
        *packages(),
    ]


# the rows that clips are made for and that plots show
MAIN = (
    "int8_int8, means, grouped",
    "int8_fp8, means, grouped",
    "int8_fp8 + ExpCast, means, grouped",
    "nvfp4, means, grouped",
)
