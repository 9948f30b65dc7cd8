"""Choices of how queries and keys are rounded, and of the sums' promotion. Entries of tool "choices"."""

from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.config import VCConfig, resolve_recipe

from .choice_grids import CAST, INT8, KINDS, PEERS, TENSORS, clips, errors, lengths, parts, peers
from .choices import Choice, Default, Quote
from .methods import DENSE_INT8, DENSE_NVFP4

HARD_K = ("K channels x10", "K channels x50, small Q")


def recipe_of(numerics, **config):
    return resolve_recipe(VCConfig(**config), (numerics,), (9, 0), exact=True)


def rotates(numerics, **config):
    name = "VCConfig().rotate_qk, " + numerics
    return Default(name, True, lambda: recipe_of(numerics, **config).rotate_qk)


def turned(published, *recipes):
    """Grids of recipes with Q and K rotated and not, and of a published one: (name, recipe) each."""
    found, seen = {"other": PEERS[f"{published}_on"], "other_not": PEERS[published]}, {}
    seen |= {f"c_{name}": row for name, row in found.items()}
    for name, recipe in recipes:
        grouped, window = f"{recipe}, means, grouped", f"{recipe}, window of a quarter"
        found |= {name: (f"{recipe}, rotated", grouped), f"{name}_not": f"{grouped}, Q and K not rotated"}
        seen |= {f"c_{name}": (f"{recipe}, rotated", window)}
        seen |= {f"c_{name}_not": f"{window}, Q and K not rotated"}
    return errors(**found), clips(**seen)


ROTATION_8 = Choice(
    "Rotation of Q and K, INT8",
    (rotates("int8_int8"), rotates("int8_fp8")),
    "Does a Hadamard rotation of queries and keys before their rounding to INT8 pay?",
    turned("sage2", ("int8", INT8), ("cast", CAST), ("exp", "int8_fp8")),
    "On. It costs no time in attention; outlier channels of K, captured tensors and clips gain much. Plain "
    "structured tensors and large logits lose by some percent on this draw, which gained on another.",
    "a tenth less error with the rotation on outlier channels of K, surely less on captured tensors, nowhere "
    "surely more; clips nearer to exact with it by three standard errors",
    lambda n: all(
        n.less(each, f"{each}_not", *HARD_K, factor=0.9)
        and n.less(each, f"{each}_not", "captured", factor=0.98)
        and n.keeps(each, f"{each}_not")
        and n.nearer(f"c_{each}", f"c_{each}_not", 3.0)
        for each in ("int8", "cast", "exp")
    ),
    "Part of its recipes; it reports at most 0.3 dB of clips from adding it to 8-bit FlashAttention-4.",
    (("int8", "int8_not"), ("cast", "cast_not"), ("exp", "exp_not"), ("other", "other_not")),
    (("c_int8", "c_int8_not"), ("c_cast", "c_cast_not"), ("c_exp", "c_exp_not"), ("c_other", "c_other_not")),
)


ROTATION_FP8 = Choice(
    "Rotation of Q and K, FP8 (`fp8_fp8`)",
    (rotates("fp8_fp8"),),
    "The same for E4M3 queries and keys, whose exponents hold an outlier channel without a rotation.",
    turned("naive", ("ours", "fp8_fp8 + ExpCast")),
    "On, for captured tensors and clips, by far. It is a trade: outlier channels of K are nearer to exact "
    "without it, with a small Q by far; other made tensors differ by less than draws do. A model with such "
    "channels may want `rotate_qk` off (Python only: no node has it).",
    "a third less error with the rotation on captured tensors, surely more on outlier channels alone; clips "
    "nearer to exact with it by three standard errors, naive FP8's too",
    lambda n: (
        n.less("ours", "ours_not", "captured", factor=0.67)
        and n.less("ours_not", "ours", *HARD_K, factor=0.9)
        and n.keeps("ours", "ours_not", *(each for each in TENSORS if each not in HARD_K))
        and n.nearer("c_ours", "c_ours_not", 3.0)
        and n.nearer("c_other", "c_other_not", 3.0)
    ),
    "At most 0.3 dB of clips from the rotation in 8-bit FlashAttention-4, which the sample model does not "
    "bear out.",
    (("ours", "ours_not"), ("other", "other_not")),
    (("c_ours", "c_ours_not"), ("c_other", "c_other_not"), ("c_ours", "c_other")),
)


ROTATION_4 = Choice(
    "Rotation of Q and K, 4 bits",
    (rotates("nvfp4", precision="4-bit"),),
    "The same for 4-bit queries and keys, after their channels are balanced (N6).",
    turned("sage3", ("ours", "nvfp4")),
    "On, for captured tensors and clips; made tensors differ by less than draws do.",
    "a third less error on captured tensors with it, nowhere surely more; clips of both nearer to exact with "
    "it by three standard errors",
    lambda n: (
        n.less("ours", "ours_not", "captured", factor=0.67)
        and n.keeps("ours", "ours_not")
        and n.nearer("c_other", "c_other_not", 3.0)
        and n.nearer("c_ours", "c_ours_not", 3.0)
    ),
    "At most 0.1 dB of clips from adding it to SageAttention 3, which the sample model does not bear out.",
    (("ours", "ours_not"), ("other", "other_not")),
    (("c_ours", "c_ours_not"), ("c_other", "c_other_not"), ("c_ours", "c_other")),
)


SMOOTH_K = Choice(
    "Keys without their channel mean",
    (Default("VCConfig().smooth_k", True, lambda: VCConfig().smooth_k),),
    "The softmax does not see a constant of K; does its rounding?",
    (
        errors(
            on=("int8_fp8 + ExpCast, K mean taken off", "int8_fp8 + ExpCast, means, grouped"),
            off="int8_fp8 + ExpCast, means, grouped, K mean kept",
        ),
    ),
    "On, as in the paper and in SageAttention: large logits and outlier channels gain, nothing loses much.",
    "a tenth less error at a small Q and at large logits, nowhere one percent more",
    lambda n: n.less("on", "off", HARD_K[1], "logits x4", factor=0.9) and n.less("on", "off", factor=1.01),
    compare=(("on", "off"),),
)


SMOOTH_Q = Choice(
    "Queries without their block's mean, 4 bits",
    (
        Default(
            "resolve_recipe(4-bit).smooth_q", True, lambda: recipe_of("nvfp4", precision="4-bit").smooth_q
        ),
    ),
    "SageAttention 3 rounds queries without the mean of their block and adds its scores exactly (N3). Is it "
    "needed once Q and K are shaped (N6)?",
    (
        errors(
            on=("nvfp4, mean of the block taken off", "nvfp4, means, grouped"),
            off="nvfp4, Q not smoothed, grouped",
        ),
    ),
    "On, for captured tensors, which gain about a twentieth. On made ones the sides changed with the draw: "
    "structured ones gain here, large logits lose a little.",
    "surely less error on captured tensors, nowhere surely more",
    lambda n: n.less("on", "off", "captured", factor=0.98) and n.keeps("on", "off"),
    compare=(("on", "off"),),
)


QK_SCALES = Choice(
    "How many keys and queries share a scale, INT8",
    (
        Default("K_GROUP", 32, lambda: formats.K_GROUP),
        Default("DENSE_INT8.q_group", 1, lambda: DENSE_INT8.q_group),
    ),
    "Would finer or coarser scales of keys and of queries be better?",
    (
        errors(
            k32=("int8_int8, 32 keys, 1 query", "int8_int8, means, grouped"),
            **{f"k{n}": (f"{n} keys", f"int8_int8, K scale per {n} keys, grouped") for n in (8, 16, 64, 128)},
            **{f"q{n}": (f"{n} queries", f"int8_int8, Q scale per {n} rows, grouped") for n in (2, 16)},
        ),
        lengths(
            sorted=("16 keys of like size: cuda_int8_int8_sm90", "cuda_int8_int8_sm90", 65_536),
            plain=("32 keys in tile order: triton_int8_int8", "triton_int8_int8", 65_536),
        ),
    ),
    "32 keys: their scale is multiplied onto scores once for a register's worth of keys, and finer groups "
    "alone take little off. The CUDA kernels of `int8_int8` sort a tile's keys by size and share a scale "
    "among 16 (C3), which takes off more. One query, because every lane has its row's scale at hand.",
    "8 keys take less than a tenth off anywhere; 128 keys and 2 and 16 queries are worse on N(0, 1) and "
    "captured tensors; sorted keys are better than 32 in order",
    lambda n: (
        n.less("k32", "k8", factor=1 / 0.9)
        and all(n.less("k32", each, "N(0, 1)", "captured") for each in ("k128", "q2", "q16"))
        and n.less("sorted", "plain")
    ),
    compare=tuple(("k32", each) for each in ("k8", "k16", "k64", "k128", "q2", "q16")),
)


SHAPING = Choice(
    "Shaping of 4-bit queries and keys",
    (Default("DENSE_NVFP4.shaping", "feedback", lambda: DENSE_NVFP4.shaping),),
    "Balanced channels and errors fed back into later channels (N6): is each needed?",
    (
        errors(
            both=("nvfp4, both", "nvfp4, means, grouped"),
            feedback="nvfp4, feedback, Q and K not balanced, grouped",
            balance="nvfp4, Q and K balanced, no feedback, grouped",
            neither=("neither, not rotated", "nvfp4, Q and K rounded each by itself, grouped"),
            bare=("neither, no means", "nvfp4, Q and K rounded each by itself, no means"),
            **peers("sage3", "sage3_on", "qat"),
        ),
        *(
            parts(
                title,
                **{
                    f"parts_{kind}": (f"neither, {kind}", "nvfp4, Q and K rounded each by itself, grouped"),
                    f"parts_both_{kind}": (f"nvfp4, both, {kind}", "nvfp4, means, grouped"),
                },
            )
            for title, kind in KINDS
        ),
    ),
    "Both: rounding of Q and K is most of the error without them, and no order of keys changes it. Balance "
    "is for outlier channels of K; what else it changes is less than draws differ.",
    "both beat neither on all tensors; without balance outlier channels are a fifth worse and nothing surely "
    "better; without feedback captured and structured tensors are a tenth worse; with neither the "
    "probabilities' part of the error is over twice the values'",
    lambda n: (
        n.less("both", "neither")
        and n.less("both", "feedback", *HARD_K, factor=0.8)
        and n.keeps("both", "feedback")
        and n.less("both", "balance", "structured", "by content", "captured", factor=0.9)
        and all(
            n[f"parts_{kind}", "from probabilities"] > 2 * n[f"parts_{kind}", "from values"]
            for kind in ("structured", "captured")
        )
    ),
    compare=(("both", "feedback"), ("both", "balance"), ("both", "neither"), ("both", "sage3_on")),
)


FOUR_BITS = Choice(
    "Microscales and means at 4 bits",
    (
        Default("DENSE_NVFP4.two_scales", True, lambda: DENSE_NVFP4.two_scales),
        Default("DENSE_NVFP4.means_of_codes", True, lambda: DENSE_NVFP4.means_of_codes),
    ),
    "A group's largest at 6 or at 4, whichever errs less (N2), or always at 6? And should a tile's stored "
    "mean take in the mean error of its codes (N4)?",
    (
        errors(
            ours=("nvfp4, as shipped", "nvfp4, means, grouped"),
            six="nvfp4, largest always at 6, grouped",
            exact="nvfp4, means of exact values, grouped",
        ),
    ),
    "Both: they cost nothing in attention. Means of the codes gain some percent on N(0, 1) and captured "
    "tensors; most structured ones lose a little, by less than draws differ, and gained on another.",
    "two microscales beat one on all tensors; means of the codes are surely better on N(0, 1) and captured "
    "ones, nowhere surely worse",
    lambda n: (
        n.less("ours", "six")
        and n.less("ours", "exact", "N(0, 1)", "captured", factor=0.98)
        and n.keeps("ours", "exact")
    ),
    compare=(("ours", "six"), ("ours", "exact")),
)

SUMMED = {
    "int8": ("cuda_int8_int8_sm90", INT8),
    "fp8": ("cuda_int8_fp8_sm90", CAST),
    "all": ("cuda_fp8_fp8_sm90", "fp8_fp8 + ExpCast"),
}


PROMOTION = Choice(
    "How long sums stay in the tensor core",
    (Default("TILE", 128, lambda: formats.TILE),),
    "Sums of FP8 products are added to fp32 after every tile of 128 keys (F3). Does the error grow with "
    "length, and would 512 keys be faster?",
    (
        lengths(
            **{
                f"{short}_{keys}": (kernel, kernel, keys)
                for short, (kernel, _) in SUMMED.items()
                for keys in (1024, 16_384, 131_072, 400_000)
            },
            **{
                f"{short}_reference{keys}": (f"reference of {recipe}", f"reference {recipe}", keys)
                for keys in (1024, 400_000)
                for short, (_, recipe) in SUMMED.items()
            },
        ),
    ),
    "Every tile: sums of more keys were slower, and the error grows by little with length. The reference, "
    "whose sums are fp32, stands beside.",
    "at the most keys measured at most a tenth more error than at the fewest, and than the reference of the "
    "recipe has there",
    lambda n: all(
        n.less(f"{kind}_400000", f"{kind}_{other}", factor=1.1)
        for other in ("1024", "reference400000")
        for kind in SUMMED
    ),
    compare=tuple((f"{kind}_400000", f"{kind}_1024") for kind in SUMMED),
    quotes=(
        Quote(
            "Gain over the kernel as it is at 75,600 / 32,768 tokens: `int8_fp8` with means, without, "
            "`fp8_fp8` with means, without",
            "tests/bench/NOTES.md",
            "| d. groups of 4 tiles | -13.2 / -20.5% | -10.4 / -19.2% | -12.6 / -15.9% | -8.5 / -11.2% |",
        ),
    ),
)


CHOICES = (
    ROTATION_8,
    ROTATION_FP8,
    ROTATION_4,
    SMOOTH_K,
    SMOOTH_Q,
    QK_SCALES,
    SHAPING,
    FOUR_BITS,
    PROMOTION,
)
