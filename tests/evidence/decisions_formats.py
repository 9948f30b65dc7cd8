"""Choices of how queries and keys are rounded, and of the sums' promotion. Entries of tool "choices"."""

from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.config import VCConfig, resolve_recipe

from .choice_grids import KINDS, clips, errors, parts
from .choices import Choice, Default, Grid, Quote
from .methods import DENSE_INT8, DENSE_NVFP4

HARD_K = ("K channels x10", "K channels x50, small Q")


def recipe_of(numerics, **config):
    return resolve_recipe(VCConfig(**config), (numerics,), (9, 0), exact=True)


def rotates(numerics, **config):
    name = "VCConfig().rotate_qk, " + numerics
    return Default(name, True, lambda: recipe_of(numerics, **config).rotate_qk)


ROTATION_8 = Choice(
    "Rotation of Q and K, INT8",
    (rotates("int8_int8"), rotates("int8_fp8")),
    "Does a Hadamard rotation of queries and keys before their rounding to INT8 pay?",
    (
        errors(
            int8=("int8_int8, rotated", "int8_int8, means, grouped"),
            int8_not=("int8_int8, not rotated", "int8_int8, means, grouped, Q and K not rotated"),
            cast=("int8_fp8 + ExpCast, rotated", "int8_fp8 + ExpCast, means, grouped"),
            cast_not=(
                "int8_fp8 + ExpCast, not rotated",
                "int8_fp8 + ExpCast, means, grouped, Q and K not rotated",
            ),
            exp=("int8_fp8, rotated", "int8_fp8, means, grouped"),
            exp_not=("int8_fp8, not rotated", "int8_fp8, means, grouped, Q and K not rotated"),
            sage=("SageAttention 2 + QK Hadamard, our reference", "SageAttention 2 + QK Hadamard"),
            sage_not=("SageAttention 2, our reference", "SageAttention 2"),
        ),
        clips(
            c_int8=("int8_int8, rotated", "int8_int8, window of a quarter"),
            c_int8_not=("int8_int8, not rotated", "int8_int8, window of a quarter, Q and K not rotated"),
            c_cast=("int8_fp8 + ExpCast, rotated", "int8_fp8 + ExpCast, window of a quarter"),
            c_cast_not=(
                "int8_fp8 + ExpCast, not rotated",
                "int8_fp8 + ExpCast, window of a quarter, Q and K not rotated",
            ),
            c_sage=("SageAttention 2 + QK Hadamard, our reference", "SageAttention 2 + QK Hadamard"),
            c_sage_not=("SageAttention 2, our reference", "SageAttention 2"),
        ),
    ),
    "On. It costs no time in attention; outlier channels of K and captured tensors gain, nothing loses much.",
    "less error with the rotation on outlier channels of K and on captured tensors, and nowhere one percent "
    "more",
    lambda n: all(
        n.less(a, f"{a}_not", *HARD_K, "captured") and n.less(a, f"{a}_not", factor=1.01)
        for a in ("int8", "cast", "exp")
    ),
    "Part of its recipes; it reports at most 0.3 dB of clips from adding it to 8-bit FlashAttention-4.",
    (("int8", "int8_not"), ("cast", "cast_not"), ("exp", "exp_not"), ("sage", "sage_not")),
    (("c_int8", "c_int8_not"), ("c_cast", "c_cast_not"), ("c_sage", "c_sage_not")),
)


ROTATION_FP8 = Choice(
    "Rotation of Q and K, FP8 (`fp8_fp8`)",
    (rotates("fp8_fp8"),),
    "The same for E4M3 queries and keys, whose exponents hold an outlier channel without a rotation.",
    (
        errors(
            on=("fp8_fp8 + ExpCast, rotated", "fp8_fp8 + ExpCast, means, grouped"),
            off=("fp8_fp8 + ExpCast, not rotated", "fp8_fp8 + ExpCast, means, grouped, Q and K not rotated"),
            naive_on=("naive FP8 + QK Hadamard, our reference", "naive FP8 + QK Hadamard"),
            naive=("naive FP8, our reference", "naive FP8, one scale per 128 tokens"),
        ),
        clips(
            clip_ours=("fp8_fp8 + ExpCast, rotated", "fp8_fp8 + ExpCast, window of a quarter"),
            clip_ours_not=(
                "fp8_fp8 + ExpCast, not rotated",
                "fp8_fp8 + ExpCast, window of a quarter, Q and K not rotated",
            ),
            clip_on=("naive FP8 + QK Hadamard, our reference", "naive FP8 + QK Hadamard"),
            clip=("naive FP8, our reference", "naive FP8, one scale per 128 tokens"),
        ),
    ),
    "On, for captured tensors and clips. It is a trade: outlier channels of K, attention by content and "
    "large logits are nearer to exact without it, a small Q by far. A model with such channels may want "
    "`rotate_qk` off.",
    "less error with the rotation on structured and captured tensors, less without on outlier channels, by "
    "content and at large logits; naive FP8's clips nearer to exact with it by two standard errors",
    lambda n: (
        n.less("on", "off", "structured", "captured")
        and n.less("off", "on", *HARD_K, "by content", "logits x4")
        and n.above("clip_on", "clip")
    ),
    "At most 0.3 dB of clips from the rotation in 8-bit FlashAttention-4, which the sample model does not "
    "bear out.",
    (("on", "off"), ("naive_on", "naive")),
    (("clip_ours", "clip_ours_not"), ("clip_on", "clip"), ("clip_ours", "clip_on")),
)


ROTATION_4 = Choice(
    "Rotation of Q and K, 4 bits",
    (rotates("nvfp4", precision="4-bit"),),
    "The same for 4-bit queries and keys, after their channels are balanced (N6).",
    (
        errors(
            on=("nvfp4, rotated", "nvfp4, means, grouped"),
            off=("nvfp4, not rotated", "nvfp4, means, grouped, Q and K not rotated"),
            sage_on=("SageAttention 3 + QK Hadamard, our reference", "SageAttention 3 + QK Hadamard"),
            sage=("SageAttention 3, our reference", "SageAttention 3"),
        ),
        clips(
            clip_on=("nvfp4, as the node runs it", "nvfp4, window of a quarter"),
            clip_off=("nvfp4, not rotated", "nvfp4, window of a quarter, Q and K not rotated"),
            clip_sage_on=("SageAttention 3 + QK Hadamard, our reference", "SageAttention 3 + QK Hadamard"),
            clip_sage=("SageAttention 3, our reference", "SageAttention 3"),
        ),
    ),
    "On, for captured tensors, outlier channels and large logits; some other made tensors lose a little.",
    "a third less error on captured tensors with it, nowhere five percent more, clips of both nearer to "
    "exact with it by two standard errors",
    lambda n: (
        n.less("on", "off", "captured", factor=0.67)
        and n.less("on", "off", factor=1.05)
        and n.above("clip_on", "clip_off")
        and n.above("clip_sage_on", "clip_sage")
    ),
    "At most 0.1 dB of clips from adding it to SageAttention 3, which the sample model does not bear out.",
    (("on", "off"), ("sage_on", "sage")),
    (("clip_on", "clip_off"), ("clip_sage_on", "clip_sage"), ("clip_on", "clip_sage_on")),
)


SMOOTH_K = Choice(
    "Keys without their channel mean",
    (Default("VCConfig().smooth_k", True, lambda: VCConfig().smooth_k),),
    "The softmax does not see a constant of K; does its rounding?",
    (
        errors(
            on=("int8_fp8 + ExpCast, K mean taken off", "int8_fp8 + ExpCast, means, grouped"),
            off=("int8_fp8 + ExpCast, K mean kept", "int8_fp8 + ExpCast, means, grouped, K mean kept"),
        ),
    ),
    "On, as in the paper and in SageAttention: large logits and outlier channels gain, nothing loses much.",
    "less error on N(0, 1), outlier channels and large logits, and nowhere one percent more",
    lambda n: n.less("on", "off", "N(0, 1)", *HARD_K, "logits x4") and n.less("on", "off", factor=1.01),
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
            off=("nvfp4, kept", "nvfp4, Q not smoothed, grouped"),
        ),
    ),
    "On, for captured tensors, outlier channels and large logits; what is nearer without it is little so.",
    "less error on captured tensors, outlier channels and large logits, and nowhere five percent more",
    lambda n: n.less("on", "off", *HARD_K, "logits x4", "captured") and n.less("on", "off", factor=1.05),
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
            k8=("8 keys", "int8_int8, K scale per 8 keys, grouped"),
            k16=("16 keys", "int8_int8, K scale per 16 keys, grouped"),
            k64=("64 keys", "int8_int8, K scale per 64 keys, grouped"),
            k128=("128 keys", "int8_int8, K scale per 128 keys, grouped"),
            q2=("2 queries", "int8_int8, Q scale per 2 rows, grouped"),
            q16=("16 queries", "int8_int8, Q scale per 16 rows, grouped"),
        ),
        Grid(
            "length",
            "Length",
            {
                name: (label, {"kernel": kernel, "keys": 65_536, "heads": 2, "layout": "contiguous"})
                for name, label, kernel in (
                    ("sorted", "16 keys of like size: cuda_int8_int8_sm90", "cuda_int8_int8_sm90"),
                    ("plain", "32 keys in tile order: triton_int8_int8", "triton_int8_int8"),
                )
            },
            {"error": "error", "error grouped": "error grouped"},
        ),
    ),
    "32 keys: their scale is multiplied onto scores once for a register's worth of keys, and finer groups "
    "alone take little off. The CUDA kernels of `int8_int8` sort a tile's keys by size and share a scale "
    "among 16 (C3), which takes off more. One query, because every lane has its row's scale at hand.",
    "8 keys take less than a tenth off anywhere, 128 keys and 16 queries are worse on N(0, 1) and captured "
    "tensors, sorted keys better than 32 in order",
    lambda n: (
        n.less("k32", "k8", factor=1 / 0.9)
        and all(n.less("k32", each, "N(0, 1)", "captured") for each in ("k128", "q2", "q16"))
        and n.less("sorted", "plain")
    ),
    compare=(("k32", "k8"), ("k32", "k16"), ("k32", "k64"), ("k32", "k128"), ("k32", "q2"), ("k32", "q16")),
)


SHAPING = Choice(
    "Shaping of 4-bit queries and keys",
    (Default("DENSE_NVFP4.shaping", "feedback", lambda: DENSE_NVFP4.shaping),),
    "Balanced channels and errors fed back into later channels (N6): is each needed?",
    (
        errors(
            both=("nvfp4, both", "nvfp4, means, grouped"),
            feedback=("feedback only", "nvfp4, feedback, Q and K not balanced, grouped"),
            balance=("balance only", "nvfp4, Q and K balanced, no feedback, grouped"),
            neither=("neither, not rotated", "nvfp4, Q and K rounded each by itself, grouped"),
            bare=("neither, no means", "nvfp4, Q and K rounded each by itself, no means"),
            sage=("SageAttention 3, our reference", "SageAttention 3"),
            sage_on=("SageAttention 3 + QK Hadamard, our reference", "SageAttention 3 + QK Hadamard"),
            qat=("Attn-QAT, training-free, our reference", "Attn-QAT, training-free"),
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
    "is for outlier channels of K and costs some on plain made tensors.",
    "both beat neither on all tensors; without balance outlier channels are worse and nothing six percent "
    "better; without feedback captured and structured tensors are worse; with neither the probabilities' "
    "part of the error is over twice the values'",
    lambda n: (
        n.less("both", "neither")
        and n.less("both", "feedback", *HARD_K)
        and n.less("both", "feedback", factor=1.06)
        and n.less("both", "balance", "structured", "by content", "captured")
        and all(
            n[f"parts_{kind}", "from probabilities"] > 2 * n[f"parts_{kind}", "from values"]
            for kind in ("structured", "captured")
        )
    ),
    compare=(("both", "feedback"), ("both", "balance"), ("both", "neither"), ("both", "sage_on")),
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
            six=("largest always at 6", "nvfp4, largest always at 6, grouped"),
            exact=("means of exact values", "nvfp4, means of exact values, grouped"),
        ),
    ),
    "Both: they cost nothing in attention. Means of the codes lose a little on some tensors, listed above.",
    "two microscales beat one on all tensors; means of the codes are better on N(0, 1) and captured tensors "
    "and nowhere two percent worse",
    lambda n: (
        n.less("ours", "six")
        and n.less("ours", "exact", "N(0, 1)", "captured")
        and n.less("ours", "exact", factor=1.02)
    ),
    compare=(("ours", "six"), ("ours", "exact")),
)

PROMOTION = Choice(
    "How long sums stay in the tensor core",
    (Default("TILE", 128, lambda: formats.TILE),),
    "Sums of FP8 products are added to fp32 after every tile of 128 keys (F3). Does the error grow with "
    "length, and would 512 keys be faster?",
    (
        Grid(
            "length",
            "Length",
            {
                f"{short}_{keys}": (
                    f"{kernel}, {keys:,} keys",
                    {"kernel": kernel, "keys": keys, "heads": 2, "layout": "contiguous"},
                )
                for short, kernel in (
                    ("int8", "cuda_int8_int8_sm90"),
                    ("fp8", "cuda_int8_fp8_sm90"),
                    ("all", "cuda_fp8_fp8_sm90"),
                )
                for keys in (1024, 16_384, 131_072, 400_000)
            }
            | {
                f"{short}_reference{keys}": (
                    f"reference of {recipe}, {keys:,} keys",
                    {"kernel": f"reference {recipe}", "keys": keys},
                )
                for keys in (1024, 400_000)
                for short, recipe in (
                    ("int8", "int8_int8"),
                    ("fp8", "int8_fp8 + ExpCast"),
                    ("all", "fp8_fp8 + ExpCast"),
                )
            },
            {"error": "error", "error grouped": "error grouped"},
        ),
    ),
    "Every tile: sums of more keys were slower, and the error grows by little with length. The reference, "
    "whose sums are fp32, stands beside.",
    "at the most keys measured at most a tenth more error than at the fewest, and than the reference of the "
    "recipe has there",
    lambda n: (
        all(n.less(f"{kind}_400000", f"{kind}_1024", factor=1.1) for kind in ("int8", "fp8", "all"))
        and all(
            n.less(f"{kind}_400000", f"{kind}_reference400000", factor=1.1) for kind in ("int8", "fp8", "all")
        )
    ),
    compare=tuple((f"{kind}_400000", f"{kind}_1024") for kind in ("int8", "fp8", "all")),
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
