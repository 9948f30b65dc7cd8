"""Choices of how probabilities and values are rounded and summed. Entries of tool "choices"."""

from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.config import EXPCAST_CARDS, VCConfig

from .choice_grids import CAST, KINDS, SPEED, clips, errors, parts
from .choices import Choice, Default, Grid
from .methods import DENSE_FP8, DENSE_INT8, DENSE_NVFP4

SHAPES = (
    "Wan2.2-A14B 720p, N(0, 1)",
    "Wan2.2-A14B 720p, structured",
    "Wan2.2-A14B 720p, captured",
    "LongCat-Video 480p, N(0, 1)",
)


SHARES = {
    "none": ("int8_fp8, no means", "int8_fp8, no means"),
    "grouped": ("int8_fp8, grouped", "int8_fp8, means, grouped"),
    "cast": ("int8_fp8 + ExpCast, no means", "int8_fp8 + ExpCast, no means"),
    "int8": ("int8_int8, no means", "int8_int8, no means"),
    "all": ("fp8_fp8 + ExpCast, no means", "fp8_fp8 + ExpCast, no means"),
    "four": ("nvfp4, no means", "nvfp4, no means"),
    "sage": ("SageAttention 2, our reference", "SageAttention 2"),
    "sage_on": ("SageAttention 2 + QK Hadamard", "SageAttention 2 + QK Hadamard"),
    "kitchen": ("comfy-kitchen INT8, our reference", "comfy-kitchen INT8"),
    "naive": ("naive FP8, our reference", "naive FP8, one scale per 128 tokens"),
    "naive_on": ("naive FP8 + QK Hadamard", "naive FP8 + QK Hadamard"),
    "sage3_on": ("SageAttention 3 + QK Hadamard", "SageAttention 3 + QK Hadamard"),
}


V_SCALES = Choice(
    "Scales of INT8 values",
    (Default("DENSE_INT8.v_group", formats.TILE, lambda: DENSE_INT8.v_group),),
    "One scale per channel for all keys, or one per channel and tile of 128?",
    (
        errors(
            tile=("int8_int8, per tile", "int8_int8, means, grouped"),
            channel=("int8_int8, per channel", "int8_int8, one V scale per channel, grouped"),
            bare=("per channel, no means", "int8_int8, one V scale per channel, no means"),
            kitchen=("comfy-kitchen INT8, our reference", "comfy-kitchen INT8"),
            package=("comfy-kitchen INT8, the package", "comfy-kitchen INT8 (package)"),
        ),
    ),
    "Per tile: an outlier token spoils its own tile only.",
    "less than half the error on outlier tokens, nowhere one percent more than one scale per channel, and "
    "less than comfy-kitchen on outlier tokens and captured tensors",
    lambda n: (
        n.less("tile", "channel", "outlier tokens", factor=0.5)
        and n.less("tile", "channel", factor=1.01)
        and n.less("tile", "kitchen", "outlier tokens", "captured")
    ),
    compare=(("tile", "channel"), ("tile", "kitchen")),
)


V_ROUNDING = Choice(
    "Rounding of INT8 values",
    (Default("DENSE_INT8.v_level", True, lambda: DENSE_INT8.v_level),),
    "Each value to the nearest code, or so that what a tile's rounding misses sums to little (I1)?",
    (
        errors(
            together=("int8_int8, sums to little", "int8_int8, means, grouped"),
            alone=("int8_int8, each to the nearest", "int8_int8, V rounded each by itself, grouped"),
        ),
    ),
    "Together: it costs nothing in attention and helps where a row takes something from many keys of a tile.",
    "less error on N(0, 1) and captured tensors, nowhere one percent more",
    lambda n: n.less("together", "alone", "N(0, 1)", "captured") and n.less("together", "alone", factor=1.01),
    compare=(("together", "alone"),),
)


ROW_SUM = Choice(
    "Which sum of a row's probabilities restores means, INT8 and 4 bits",
    (
        Default(
            "DENSE_INT8.exact_mass, exact_sum", True, lambda: DENSE_INT8.exact_mass and DENSE_INT8.exact_sum
        ),
        Default(
            "DENSE_NVFP4.exact_mass, exact_sum",
            True,
            lambda: DENSE_NVFP4.exact_mass and DENSE_NVFP4.exact_sum,
        ),
    ),
    "A row is normalized, and the tile means come back, by the sum of its probabilities (Eq. 6): of those "
    "before rounding, or of the rounded ones? A probability far under its tile's largest rounds to nothing.",
    (
        errors(
            before=("int8_int8, before rounding, grouped", "int8_int8, means, grouped"),
            after=("int8_int8, after rounding, grouped", "int8_int8, mass of the codes, grouped"),
            before_cube=("int8_int8, before, cube order", "int8_int8, means, cube"),
            after_cube=("int8_int8, after, cube order", "int8_int8, mass of the codes, cube"),
            before_row=("int8_int8, before, token order", "int8_int8, means, sequence"),
            after_row=("int8_int8, after, token order", "int8_int8, mass of the codes"),
            four=("nvfp4, before rounding, grouped", "nvfp4, means, grouped"),
            four_after=("nvfp4, after rounding, grouped", "nvfp4, mass of the codes, grouped"),
            kitchen=("comfy-kitchen INT8, our reference", "comfy-kitchen INT8"),
            package=("comfy-kitchen INT8, the package", "comfy-kitchen INT8 (package)"),
        ),
        clips(
            clip=(
                "int8_int8, before rounding, grouped at every step",
                "int8_int8, means, grouped, every step",
            ),
            clip_after=(
                "int8_int8, after rounding, grouped at every step",
                "int8_int8, means, grouped, mass of the codes, every step",
            ),
            clip_kitchen=("comfy-kitchen INT8, our reference", "comfy-kitchen INT8"),
            clip_package=("comfy-kitchen INT8, the package", "comfy-kitchen INT8 (package)"),
        ),
    ),
    "Before rounding, where means are restored: what rounding takes from a tile then comes back as its mean "
    "(I3, N4). With means off it is the rounded sum: numerator and sum must lose alike.",
    "less error before rounding: of `int8_int8` on all tensors, of `nvfp4` on structured and captured ones "
    "and nowhere one percent more",
    lambda n: (
        n.less("before", "after")
        and n.less("four", "four_after", "structured", "by content", "captured")
        and n.less("four", "four_after", factor=1.01)
    ),
    "Eq. 6 has one sum for both; `int8_int8` and `nvfp4` take it to the letter.",
    (
        ("before", "after"),
        ("before_cube", "after_cube"),
        ("before_row", "after_row"),
        ("four", "four_after"),
        ("before", "kitchen"),
    ),
    (("clip", "clip_after"), ("clip_after", "clip_package")),
)


ROW_SUM_FP8 = Choice(
    "Which sum of a row's probabilities restores means, FP8",
    (Default("DENSE_FP8.exact_mass", False, lambda: DENSE_FP8.exact_mass or DENSE_FP8.exact_sum),),
    "Would FP8 probabilities gain from the exact sum?",
    (
        errors(
            cast=("int8_fp8 + ExpCast, sum of the codes", "int8_fp8 + ExpCast, means, grouped"),
            cast_exact=("int8_fp8 + ExpCast, exact sum", "int8_fp8 + ExpCast, mass exact, grouped"),
            exp=("int8_fp8, sum of the codes", "int8_fp8, means, grouped"),
            exp_exact=("int8_fp8, exact sum", "int8_fp8, mass exact, grouped"),
        ),
    ),
    "Of the codes (F3): the exact sum needs the exponential that ExpCast does without, and a common factor "
    "of ExpCast's codes cancels. It loses on structured tensors, where the exact sum would take over a "
    "quarter off, and wins on captured.",
    "with ExpCast the codes' sum is better on captured tensors, the exact one over a quarter better on "
    "structured; without, the two differ by under three percent",
    lambda n: (
        n.less("cast", "cast_exact", "captured")
        and n.less("cast_exact", "cast", "structured", factor=0.75)
        and n.less("exp", "exp_exact", factor=1.03)
        and n.less("exp_exact", "exp", factor=1.03)
    ),
    compare=(("cast", "cast_exact"), ("exp", "exp_exact")),
)


HADAMARD_V = Choice(
    "Hadamard rotation of V",
    (Default("DENSE_FP8.rotate_v", False, lambda: DENSE_FP8.rotate_v),),
    "Does a rotation of values help as it helps Q and K?",
    (
        errors(
            turned=("int8_fp8 + ExpCast, V rotated, token order", "int8_fp8 + ExpCast, means, Hadamard on V"),
            means=("int8_fp8 + ExpCast, token order", "int8_fp8 + ExpCast, means, sequence"),
            grouped=("int8_fp8 + ExpCast, grouped", "int8_fp8 + ExpCast, means, grouped"),
        ),
        Grid(
            "fidelity",
            "Token orders",
            {
                name: (label, {"order": order})
                for name, label, order in (
                    ("value_turned", "V rotated", "Hadamard on V"),
                    ("value_grouped", "grouped", "grouped"),
                )
            },
            {"error of V over token order's": "over sequence"},
        ),
        clips(
            clip_turned=("V rotated, every step", "int8_fp8 + ExpCast, means, Hadamard on V, every step"),
            clip_cube=("cube order, every step", "int8_fp8 + ExpCast, means, cube, every step"),
            clip_grouped=("grouped, every step", "int8_fp8 + ExpCast, means, grouped, every step"),
        ),
    ),
    "Off: a rotation keeps a token's length, so an outlier token stays one, and V's error stays as it was. "
    "Structured tensors end a little nearer to exact with it all the same, captured ones a little farther.",
    "it changes V's error by less than one percent, and the output's by less than five: down on structured, "
    "up on captured tensors",
    lambda n: (
        abs(n["value_turned", "error of V over token order's"] - 1) < 0.01
        and n.less("turned", "means", factor=1.05)
        and n.less("means", "turned", factor=1.05)
        and n.less("turned", "means", "structured")
        and n.less("means", "turned", "captured")
    ),
    "Its Table 1: a rotation changes V's error by 0.2%.",
    (("turned", "means"), ("turned", "grouped")),
    (("clip_turned", "clip_grouped"), ("clip_turned", "clip_cube")),
)


V_SCALE_SOURCE = Choice(
    "Scale of FP8 values: of V or of what is left without means",
    (Default("DENSE_FP8.v_scale_of_residual", False, lambda: DENSE_FP8.v_scale_of_residual),),
    "The residual is smaller than V: is a scale from it worth a second pass over V (F1)?",
    (
        errors(
            v=("int8_fp8 + ExpCast, of V", "int8_fp8 + ExpCast, means, grouped"),
            residual=(
                "int8_fp8 + ExpCast, of the residual",
                "int8_fp8 + ExpCast, V scale from the residual, grouped",
            ),
        ),
    ),
    "Of V, in one pass: E4M3's relative precision hardly depends on the scale.",
    "a scale of the residual takes less than two percent off anywhere",
    lambda n: n.less("v", "residual", factor=1.02),
    compare=(("v", "residual"),),
)


EXPCAST = Choice(
    "ExpCast, per card",
    (Default("EXPCAST_CARDS", ((9, 0), (10, 0), (10, 3)), lambda: EXPCAST_CARDS),),
    "Probabilities by ExpCast (Eq. 7), or by an exponential and a cast: what does the time cost in error?",
    (
        Grid(
            "speed",
            "The paper's shapes",
            {
                f"{name}{i}": (f"{label}; {tensors}", {"kernel": kernel, "tensors": tensors})
                for i, tensors in enumerate(SHAPES)
                for name, label, kernel in (
                    ("cast", CAST, "cuda_int8_fp8_sm90"),
                    ("exp", "int8_fp8, exponential", "cuda_int8_fp8_sm90, expcast off"),
                    ("int8", "int8_int8, what `expcast off` takes", "cuda_int8_int8_sm90"),
                    ("all", "fp8_fp8 + ExpCast", "cuda_fp8_fp8_sm90"),
                    ("all_exp", "fp8_fp8, exponential", "cuda_fp8_fp8_sm90, expcast off"),
                )
            },
            SPEED,
        ),
        errors(
            e_cast=("int8_fp8 + ExpCast, grouped", "int8_fp8 + ExpCast, means, grouped"),
            e_exp=("int8_fp8, grouped", "int8_fp8, means, grouped"),
            e_cast_none=("int8_fp8 + ExpCast, no means", "int8_fp8 + ExpCast, no means"),
            e_exp_none=("int8_fp8, no means", "int8_fp8, no means"),
        ),
        Grid(
            "fidelity",
            "Probability error",
            {
                name: (tensors, {"tensors": tensors})
                for name, tensors in (
                    ("p_gauss", "gauss"),
                    ("p_structured", "structured"),
                    ("p_content", "structured, attention by content"),
                    ("p_logits", "structured, logits x4"),
                    ("p_captured", "captured, step 2 of 10, block 1"),
                    ("p_late", "captured, step 2 of 10, block 6"),
                )
            },
            {
                "ExpCast, mean": "ExpCast mean",
                "its largest": "largest",
                "largest over Eq. 15's bound": "largest - (0.0364 + tail)",
                "exponential and cast, mean": "exp and cast mean",
            },
        ),
        clips(
            c_cast=("int8_fp8 + ExpCast, as the node runs it", "int8_fp8 + ExpCast, window of a quarter"),
            c_exp=("int8_fp8, as the node runs it", "int8_fp8, window of a quarter"),
            c_cast_none=("int8_fp8 + ExpCast, no means", "int8_fp8 + ExpCast, no means"),
            c_exp_none=("int8_fp8, no means", "int8_fp8, no means"),
        ),
    ),
    "On where it buys time: measured on sm_90, by the paper's account on sm_100 and sm_103, which nobody "
    "has timed here. Error is the price, most on structured attention; `expcast off` is nearer to exact.",
    "with ExpCast the kernel takes at least a tenth less time than with an exponential and than "
    "`int8_int8`, its error is larger on structured tensors, and no row passes the bound of Eq. 15",
    lambda n: (
        all(
            n[f"cast{i}", "grouped, ms"] < 0.9 * n[f"{other}{i}", "grouped, ms"]
            for i in range(len(SHAPES))
            for other in ("exp", "int8")
        )
        and n.less("e_exp", "e_cast", "structured")
        and all(n[name, "largest over Eq. 15's bound"] < 0 for name in n.labels if name.startswith("p_"))
    ),
    "Total variation of a row 1.6% on average, 1.1% by exponential and cast; clips lose 0.7 to 2.1 dB by "
    "ExpCast.",
    (("e_cast", "e_exp"), ("e_cast_none", "e_exp_none")),
    (("c_cast", "c_exp"), ("c_cast_none", "c_exp_none")),
)


VALUE_SHARE = Choice(
    "How much of the error is the values' (Eq. 2)",
    (Default("VCConfig().demean", True, lambda: VCConfig().demean),),
    "The paper starts from values being most of the error. Are they here?",
    tuple(
        parts(
            title,
            **{f"{name}{kind}": (f"{label}, {kind}", method) for name, (label, method) in SHARES.items()},
        )
        for title, kind in KINDS
    ),
    "Means are taken off in every recipe. Values are the larger part where Q and K are INT8, V FP8 and P "
    "has an exponential, though less than the paper's share (inferred: sharp attention makes scores count "
    "for more than there). They are the smaller part where ExpCast makes P on structured tensors, where "
    "V is INT8 and where Q and K are E4M3: there finer scales would pay for Q and K.",
    "without means values are over half of `int8_fp8`'s squared error on both kinds, and grouping lowers "
    "their share; under half with ExpCast on structured tensors, at INT8 and in naive FP8, rotated or not; "
    "nowhere as much as the paper's",
    lambda n: (
        all(
            n[f"none{kind}", "values' share"] > 0.5
            and n[f"grouped{kind}", "values' share"] < n[f"none{kind}", "values' share"]
            and all(n[f"{name}{kind}", "values' share"] < 0.5 for name in ("int8", "naive", "naive_on"))
            for _, kind in KINDS
        )
        and n["caststructured", "values' share"] < 0.5
        and all(cell < 0.82 for (_, heading), cell in n.cells.items() if heading == "values' share")
    ),
    "82% of the output error on Wan2.2, with key smoothing, block scales and a rotation of Q and K.",
)

CHOICES = (
    V_SCALES,
    V_ROUNDING,
    ROW_SUM,
    ROW_SUM_FP8,
    HADAMARD_V,
    V_SCALE_SOURCE,
    EXPCAST,
    VALUE_SHARE,
)
