"""Choices of which recipes group, in which steps, and what the others do. Entries of tool "choices"."""

from types import SimpleNamespace

from comfyui_vc_attention.kernels.config import VCConfig, resolve_demean
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.run_state import Run
from comfyui_vc_attention.nodes.step_schedule import EDGE, StepPlan

from .choice_grids import CAST, INT8, PEERS, clips, errors, schedules
from .choices import Choice, Default, Grid, Quote
from .clip_attention import REUSE, WINDOW

REAL = ("by content", "captured")


def grouping(recipe, claim, holds, decided, extra):
    """Whether one recipe gains from grouping. extra: rows of published recipes beside."""
    rows = errors(
        none=(f"{recipe}, no means", f"{recipe}, no means"),
        row=(f"{recipe}, means of token order", f"{recipe}, means, sequence"),
        grouped=(f"{recipe}, grouped", f"{recipe}, means, grouped"),
        kept=(f"{recipe}, grouped order, no means", f"{recipe}, no means, order kept"),
        **{name: PEERS[name] for name in extra},
    )
    shown = clips(
        c_grouped=(f"{recipe}, grouped in the first quarter", f"{recipe}, window of a quarter"),
        c_none=(f"{recipe}, no means", f"{recipe}, no means"),
        **{f"c_{name}": PEERS[name] for name in extra},
    )
    default = Default("VCConfig().demean", True, lambda: VCConfig().demean)
    return Choice(
        f"Grouping, `{recipe}`",
        (default,),
        f"Is `{recipe}` nearer to exact attention with grouped values?",
        (rows, shown),
        decided,
        claim,
        holds,
        "Over the baseline of the same formats V-Smooth adds 1.1 to 2.8 dB to clips at 8 bits, 0.5 to 3.6 "
        "at 4.",
        (("grouped", "none"), ("grouped", "row"), ("kept", "none"), *(("grouped", name) for name in extra)),
        tuple(("c_grouped", f"c_{name}") for name in ("none", *extra)),
    )


GROUPING = (
    grouping(
        CAST,
        "less error than without means by content, on captured tensors and large logits; more on structured "
        "ones, and there more by the order alone, without means, too",
        lambda n: (
            n.less("grouped", "none", *REAL, "logits x4")
            and n.less("none", "grouped", "structured")
            and n.less("none", "kept", "structured")
        ),
        "On, though structured attention, which stays near a token, has more error with it: it comes with "
        "the order, means or none, and ExpCast's part of the error is the larger one there.",
        ("sage2", "naive_on"),
    ),
    grouping(
        "int8_fp8",
        "less error than without means, structured, by content and captured, nowhere three percent more",
        lambda n: n.less("grouped", "none", "structured", *REAL) and n.less("grouped", "none", factor=1.03),
        "On: without ExpCast's error nearly all tensors gain.",
        ("sage2", "naive_on"),
    ),
    grouping(
        INT8,
        "less error than without means, structured, by content and captured, nowhere three percent more; "
        "than with means of token order by content and captured, nowhere three percent more",
        lambda n: (
            n.less("grouped", "none", "structured", *REAL)
            and n.less("grouped", "none", factor=1.03)
            and n.less("grouped", "row", *REAL)
            and n.less("grouped", "row", factor=1.03)
        ),
        "On. Much of the gain is the means', whatever the order; the order adds to it where contents recur.",
        ("sage1", "kitchen", "package"),
    ),
    grouping(
        "fp8_fp8 + ExpCast",
        "less error than without means by content and captured, nowhere a tenth more",
        lambda n: n.less("grouped", "none", *REAL) and n.less("grouped", "none", factor=1.1),
        "On, for captured tensors and attention by content. E4M3 scores are the larger part of the error, "
        "so it gains little, and some made tensors lose.",
        ("naive", "naive_on", "torch8"),
    ),
    grouping(
        "fp8_fp8",
        "less error than without means by content and captured, nowhere a tenth more",
        lambda n: n.less("grouped", "none", *REAL) and n.less("grouped", "none", factor=1.1),
        "On, as with ExpCast.",
        ("naive", "naive_on", "torch8"),
    ),
    grouping(
        "nvfp4",
        "less error on all tensors than without means and than with means of token order",
        lambda n: n.less("grouped", "none") and n.less("grouped", "row"),
        "On.",
        ("sage3", "sage3_on", "qat"),
    ),
)


NOTES = "tests/bench/NOTES.md"


MEANS_COST = (
    Quote(
        "With means, `int8_int8`", NOTES, "| `int8_int8`, means, order | 75,600 | 140.3 | 834 | 1.48 (208.3)"
    ),
    Quote("Without means", NOTES, "| `int8_int8`, plain | 75,600 | 133.0 | 880 | 1.57 (208.3)"),
)


def outside(value_format, demean, recipe, other, claim, holds, decided, quotes=()):
    with_, without = ("no step, means in token order", "no step, no means")
    rows = {
        "shipped": ("first quarter, as shipped", "first quarter"),
        "other": (f"then {other}", f"first quarter, then {other}"),
    }
    if recipe != "nvfp4":
        rows |= {
            "all_means": ("means of token order, every step", with_),
            "bare": ("no means at all", without),
        }
    names = (recipe, "int8_fp8") if recipe == CAST else (recipe,)
    cells = {}
    for i, name in enumerate(names):
        cells[f"row{i}"] = (f"{name}, means of token order", f"{name}, means, sequence")
        cells[f"none{i}"] = (f"{name}, no means", f"{name}, no means")
    return Choice(
        f"Means after the grouping window, `{recipe}`",
        (
            Default(
                f'resolve_demean(None, "{value_format}")', demean, lambda: resolve_demean(None, value_format)
            ),
        ),
        "After the window keys have token order. Are means of 128 consecutive keys worth their time there?",
        (schedules(recipe, **rows), errors(**cells)),
        decided,
        claim,
        holds,
        "None there.",
        tuple((f"row{i}", f"none{i}") for i in range(len(names))),
        quotes=quotes,
    )


OUTSIDE = (
    outside(
        "int8",
        True,
        INT8,
        "no means",
        "less error with them on structured, by content and captured tensors; clips of the same seeds "
        "farther from exact without, by two standard errors",
        lambda n: n.less("row0", "none0", "structured", *REAL) and n.loses("other"),
        "Kept: clips lose by leaving them out. They cost what the quotes say.",
        MEANS_COST,
    ),
    outside(
        "fp8",
        False,
        CAST,
        "means in token order",
        "with them no clip is nearer by three standard errors, and no error of `int8_fp8`, with ExpCast or "
        "without, a tenth less",
        lambda n: (
            not n.gains("other")
            and n.less("none0", "row0", factor=1 / 0.9)
            and n.less("none1", "row1", factor=1 / 0.9)
        ),
        "None, as in the paper: FP8 values gain little in token order.",
    ),
    outside(
        "nvfp4",
        True,
        "nvfp4",
        "no means",
        "less error with them by content and captured, nowhere one percent more; without them no clip is "
        "nearer by three standard errors",
        lambda n: (
            n.less("row0", "none0", *REAL) and n.less("row0", "none0", factor=1.01) and not n.gains("other")
        ),
        "Kept, for attention by content and captured tensors.",
    ),
)


SETTINGS = PatchSettings(VCConfig())


def keeps_orders():
    """Whether a run still has its orders in a step after the window."""
    plan = StepPlan(9, 0.5, active=True, grouping=False)
    schedule = SimpleNamespace(plan=lambda position: plan, steps=10, few_steps=False)
    run, cleared = Run(None, SETTINGS, SimpleNamespace(name="any"), schedule), []
    run.store = SimpleNamespace(clear=lambda: cleared.append(True))
    run.begin_evaluation(0.5)
    return not cleared


KEPT = Choice(
    "The order after the window",
    (Default("Run keeps orders after the window", False, keeps_orders),),
    "The paper's later steps keep the last order. Here it is given up, with its memory. Is that a loss?",
    (
        schedules(
            CAST,
            cast=("given up, as shipped", "first quarter"),
            cast_kept=("kept, no means", "first quarter, order kept, then no means"),
            cast_means=("kept, with means", "first quarter, order and means kept"),
        ),
        schedules(
            INT8,
            int8=("given up, as shipped", "first quarter"),
            int8_kept=("kept, no means", "first quarter, order kept, then no means"),
            int8_means=("kept, with means", "first quarter, order and means kept"),
        ),
        errors(
            e_cast=("int8_fp8 + ExpCast, token order, no means", "int8_fp8 + ExpCast, no means"),
            e_cast_kept=(
                "int8_fp8 + ExpCast, order kept, no means",
                "int8_fp8 + ExpCast, no means, order kept",
            ),
            e_int8=("int8_int8, token order, means", "int8_int8, means, sequence"),
            e_int8_kept=("int8_int8, order kept, no means", "int8_int8, no means, order kept"),
        ),
    ),
    "Given up: an order is memory of every layer, and later steps are no nearer to exact with it.",
    "no clips with the order kept are nearer by three standard errors",
    lambda n: not any(n.gains(each) for each in ("cast_kept", "cast_means", "int8_kept", "int8_means")),
    "Later steps run the plain kernel on the permutation that the window left.",
    (("e_cast", "e_cast_kept"), ("e_int8", "e_int8_kept")),
)


OTHERS = {
    "all": "every step",
    "uniform": "uniform quarter",
    "reuse1": "first quarter, reuse 1",
    "reuse2": "first quarter, reuse 2",
    "reuse8": "first quarter, reuse 8",
    "all1": "every step, reuse 1",
    "all8": "every step, reuse 8",
}


WINDOWS = Choice(
    "Which steps group, and how long an order is used",
    (
        Default("PatchSettings.grouping_window", 0.25, lambda: SETTINGS.grouping_window),
        Default("PatchSettings.regroup_every", 4, lambda: SETTINGS.regroup_every),
        Default("clip_attention.WINDOW, REUSE", (0.25, 4), lambda: (WINDOW, REUSE)),
    ),
    "The first quarter, a quarter spread evenly, or every step? One order for 1, 2, 4 or 8 steps?",
    (
        *(
            schedules(
                recipe,
                **{f"{short}_first": ("first quarter, as shipped", "first quarter")},
                **{f"{short}_{name}": (policy, policy) for name, policy in OTHERS.items()},
                **{f"{short}_none": (ungrouped, ungrouped)},
            )
            for short, recipe, ungrouped in (
                ("cast", CAST, "no step, no means"),
                ("int8", INT8, "no step, means in token order"),
            )
        ),
        schedules(
            "nvfp4",
            four_first=("first quarter, as shipped", "first quarter"),
            four_all=("every step", "every step"),
            four_uniform=("uniform quarter", "uniform quarter"),
        ),
        Grid(
            "speed",
            "Schedules",
            {
                name: (label, {"steps that group": label.partition(", reuse")[0], "reuse": reuse})
                for name, label, reuse in (
                    ("t_none", "no step", 4),
                    ("t_first", "first quarter", 4),
                    ("t_first1", "first quarter, reuse 1", 1),
                    ("t_first8", "first quarter, reuse 8", 8),
                    ("t_uniform", "uniform quarter", 4),
                    ("t_all", "every step", 4),
                )
            },
            {
                "orders a block": "orders a block",
                "int8_fp8 + ExpCast, s of attention": "cuda_int8_fp8_sm90",
                "int8_int8, s of attention": "cuda_int8_int8_sm90",
            },
        ),
    ),
    "The paper's: first quarter, four steps. No other is surely nearer here; grouping everywhere keeps "
    "orders for the whole clip and, at INT8, takes more time.",
    "no other schedule of the 8-bit recipes, without grouping or with, has clips nearer to exact by three "
    "standard errors, the first "
    "quarter takes at most two percent more attention than no grouping, and every step more at INT8",
    lambda n: (
        not any(n.gains(f"{short}_{name}") for short in ("cast", "int8") for name in (*OTHERS, "none"))
        and n["t_first", "int8_fp8 + ExpCast, s of attention"]
        < 1.02 * n["t_none", "int8_fp8 + ExpCast, s of attention"]
        and n["t_first", "int8_int8, s of attention"] < 1.02 * n["t_none", "int8_int8, s of attention"]
        and n["t_first", "int8_int8, s of attention"] < n["t_all", "int8_int8, s of attention"]
    ),
    "First quarter 26.4 dB, uniform quarter 23.8, every step 26.9: what matters there is where grouping "
    "sits.",
)


HYBRID = Choice(
    "8 bits at the ends of a 4-bit run",
    (Default("EDGE", 0.2, lambda: EDGE),),
    "Are clips nearer to exact when the first and the last fifth of the steps run at 8 bits?",
    (
        clips(
            four=("nvfp4 throughout", "nvfp4, window of a quarter"),
            ends=("int8_int8 in the first and last fifth", "nvfp4, int8_int8 in the first and last fifth"),
            none=("nvfp4, no means", "nvfp4, no means"),
            eight=("int8_int8 throughout", "int8_int8, window of a quarter"),
            **{name: PEERS[name] for name in ("sage3", "sage3_on", "qat")},
        ),
    ),
    "On. The share is chosen: no other was measured.",
    "clips nearer to exact with 8 bits at the ends by two standard errors, and 4 bits nearer than "
    "SageAttention 3 with rotated Q and K",
    lambda n: n.above("ends", "four") and n.above("four", "sage3_on"),
    nearer=(("ends", "four"), ("ends", "eight"), ("four", "sage3_on")),
)

CHOICES = (
    *GROUPING,
    *OUTSIDE,
    KEPT,
    WINDOWS,
    HYBRID,
)
