"""Choices of how probabilities and values are rounded and summed. Entries of tool "choices"."""

from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.config import EXPCAST_CARDS, VCConfig

from .choice_grids import CAST, KINDS, SPEED, clips, errors, orders, parts, peers
from .choices import Choice, Default, Grid
from .methods import DENSE_FP8, DENSE_INT8, DENSE_NVFP4

SHAPES = (
    "Wan2.2-A14B 720p, N(0, 1)",
    "Wan2.2-A14B 720p, structured",
    "Wan2.2-A14B 720p, captured",
    "LongCat-Video 480p, N(0, 1)",
)


SHARES = {
    "none": "int8_fp8, no means",
    "grouped": "int8_fp8, means, grouped",
    "cast": "int8_fp8 + ExpCast, no means",
    "int8": "int8_int8, no means",
    "all": "fp8_fp8 + ExpCast, no means",
    "four": "nvfp4, no means",
    **peers("sage2", "sage2_on", "kitchen", "naive", "naive_on", "sage3_on"),
}


V_SCALES = Choice(
    "Scales of INT8 values",
    (Default("DENSE_INT8.v_group", formats.TILE, lambda: DENSE_INT8.v_group),),
    "One scale per channel for all keys, or one per channel and tile of 128?",
    (
        errors(
            tile=("int8_int8, per tile", "int8_int8, means, grouped"),
            channel="int8_int8, one V scale per channel, grouped",
            bare="int8_int8, one V scale per channel, no means",
            **peers("kitchen", "package"),
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
            alone="int8_int8, V rounded each by itself, grouped",
        ),
    ),
    "Together: it costs nothing in attention and helps where a row takes something from many keys of a tile; "
    "elsewhere it changes next to nothing.",
    "surely less error on N(0, 1), nowhere one percent more",
    lambda n: (
        n.less("together", "alone", "N(0, 1)", factor=0.98) and n.less("together", "alone", factor=1.01)
    ),
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
            **{
                f"{when}_{short}": (f"int8_int8, {when} rounding, {order}", f"int8_int8, {row}")
                for order, short, means, codes in (
                    ("grouped", "grouped", "means, grouped", "mass of the codes, grouped"),
                    ("cube order", "cube", "means, cube", "mass of the codes, cube"),
                    ("token order", "row", "means, sequence", "mass of the codes"),
                )
                for when, row in (("before", means), ("after", codes))
            },
            four=("nvfp4, before rounding, grouped", "nvfp4, means, grouped"),
            four_after=("nvfp4, after rounding, grouped", "nvfp4, mass of the codes, grouped"),
            **peers("kitchen", "package"),
        ),
        clips(
            clip=("int8_int8, before rounding, every step", "int8_int8, means, grouped, every step"),
            clip_after=(
                "int8_int8, after rounding, every step",
                "int8_int8, means, grouped, mass of the codes, every step",
            ),
            **peers("kitchen", "package", prefix="clip_"),
        ),
    ),
    "Before rounding, where means are restored: what rounding takes from a tile then comes back as its mean "
    "(I3, N4); at 4 bits large logits lose a little. With means off it is the rounded sum: numerator and sum "
    "must lose alike.",
    "of `int8_int8`, grouped, a third less error before rounding on structured tensors, surely less on "
    "captured ones, nowhere more, and clips nearer by three standard errors; of `nvfp4` surely less on N(0, "
    "1), structured and captured tensors, nowhere surely more",
    lambda n: (
        n.less("before_grouped", "after_grouped", "structured", factor=0.67)
        and n.less("before_grouped", "after_grouped", "captured", factor=0.98)
        and n.less("before_grouped", "after_grouped")
        and n.nearer("clip", "clip_after", 3.0)
        and n.less("four", "four_after", "N(0, 1)", "captured", factor=0.98)
        and n.less("four", "four_after", "structured", "by content", factor=0.9)
        and n.keeps("four", "four_after")
    ),
    "Eq. 6 has one sum for both; `int8_int8` and `nvfp4` take it to the letter.",
    (
        *((f"before_{order}", f"after_{order}") for order in ("grouped", "cube", "row")),
        ("four", "four_after"),
        ("before_grouped", "kitchen"),
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
    "Of the codes (F3): a common factor of ExpCast's codes cancels, and captured tensors are nearer with it. "
    "Structured ones lose, surely: the exact sum would take about a fifth off. But it needs the exponential "
    "that ExpCast does without, and who pays for that errs less with an exponential and a cast.",
    "with ExpCast the codes' sum is surely better on captured tensors, the exact one on structured ones; "
    "probabilities by an exponential are better than both on all tensors, and there the sums differ by under "
    "three percent",
    lambda n: (
        n.less("cast", "cast_exact", "captured", factor=0.98)
        and n.less("cast_exact", "cast", "structured", "by content", factor=0.9)
        and n.less("exp", "cast_exact")
        and n.less("exp", "exp_exact", factor=1.03)
        and n.less("exp_exact", "exp", factor=1.03)
    ),
    compare=(("cast", "cast_exact"), ("exp", "exp_exact"), ("exp", "cast_exact")),
)


HADAMARD_V = Choice(
    "Hadamard rotation of V",
    (Default("DENSE_FP8.rotate_v", False, lambda: DENSE_FP8.rotate_v),),
    "Does a rotation of values help as it helps Q and K?",
    (
        errors(
            turned="int8_fp8 + ExpCast, means, Hadamard on V",
            means="int8_fp8 + ExpCast, means, sequence",
            grouped="int8_fp8 + ExpCast, means, grouped",
        ),
        orders(
            "Token orders",
            value_turned=("V rotated", "Hadamard on V"),
            value_grouped=("grouped", "grouped"),
        ),
        clips(
            clip_turned="int8_fp8 + ExpCast, means, Hadamard on V, every step",
            clip_cube="int8_fp8 + ExpCast, means, cube, every step",
            clip_grouped="int8_fp8 + ExpCast, means, grouped, every step",
        ),
    ),
    "Off: a rotation keeps a token's length, so an outlier token stays one, and V's error stays as it was, "
    "as does nearly the output's. Grouping, which it does not go with, takes more off.",
    "it changes V's error by less than one percent, the output's by less than five; grouped tensors surely "
    "err less where captured, and grouped clips are nearer by two standard errors",
    lambda n: (
        abs(n["value_turned", "error of V over token order's"] - 1) < 0.01
        and n.less("turned", "means", factor=1.05)
        and n.less("means", "turned", factor=1.05)
        and n.less("grouped", "turned", "captured", factor=0.98)
        and n.nearer("clip_grouped", "clip_turned")
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
            residual="int8_fp8 + ExpCast, V scale from the residual, grouped",
        ),
    ),
    "Of V, in one pass: E4M3's relative precision hardly depends on the scale. Made tensors change a little "
    "either way, by less than draws differ.",
    "a scale of the residual takes nothing off N(0, 1) and captured tensors but half a percent, off others "
    "less than five",
    lambda n: (
        n.less("v", "residual", "N(0, 1)", "captured", factor=1.005) and n.less("v", "residual", factor=1.05)
    ),
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
            e_cast="int8_fp8 + ExpCast, means, grouped",
            e_exp="int8_fp8, means, grouped",
            e_cast_none="int8_fp8 + ExpCast, no means",
            e_exp_none="int8_fp8, no means",
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
            c_cast="int8_fp8 + ExpCast, window of a quarter",
            c_exp="int8_fp8, window of a quarter",
            c_cast_none="int8_fp8 + ExpCast, no step grouped",
            c_exp_none="int8_fp8, no step grouped",
        ),
    ),
    "On where it buys time: measured on sm_90, by the paper's account on sm_100 and sm_103, which nobody "
    "has timed here. Error is the price, most on structured attention; `expcast off` is nearer to exact.",
    "with ExpCast the kernel takes at least a tenth less time than with an exponential and than "
    "`int8_int8`, its error is surely larger on structured tensors, clips lose less than two decibels by it, "
    "and no row passes the bound of Eq. 15",
    lambda n: (
        all(
            n[f"cast{i}", "grouped, ms"] < 0.9 * n[f"{other}{i}", "grouped, ms"]
            for i in range(len(SHAPES))
            for other in ("exp", "int8")
        )
        and n.less("e_exp", "e_cast", "structured", factor=0.9)
        and n.gain("c_exp", "c_cast")[0] < 2
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
            **{f"{name}{kind}": (f"{method}, {kind}", method) for name, method in SHARES.items()},
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
