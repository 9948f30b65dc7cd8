"""Choices of which recipes group, in which steps, and what the others do. Entries of tool "choices"."""

from types import SimpleNamespace

from comfyui_vc_attention.kernels.config import VCConfig, resolve_demean
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.run_state import Run
from comfyui_vc_attention.nodes.step_schedule import EDGE, StepPlan

from .choice_grids import CAST, INT8, clips, errors, peers, schedules
from .choices import Choice, Default, Grid, Quote
from .clip_attention import REUSE, WINDOW
from .methods import RECIPES


def grouping(recipe, decided, *others):
    """Whether one recipe gains from grouping. others: published recipes beside."""
    # after the window INT8 values and 4-bit ones have means in token order, whether a step grouped or not
    kept = resolve_demean(None, RECIPES[recipe].value_format)
    means = "means in token order" if kept else "no means"
    return Choice(
        f"Grouping, `{recipe}`",
        (Default("VCConfig().demean", True, lambda: VCConfig().demean),),
        f"Is `{recipe}` nearer to exact attention with grouped values?",
        (
            errors(
                none=f"{recipe}, no means",
                row=f"{recipe}, means, sequence",
                grouped=f"{recipe}, means, grouped",
                kept=f"{recipe}, no means, order kept",
                **peers(*others),
            ),
            clips(
                c_grouped=(f"{recipe}, grouped in the first quarter", f"{recipe}, window of a quarter"),
                c_none=(f"{recipe}, no step grouped, {means}", f"{recipe}, no step grouped"),
                **peers(*others, prefix="c_"),
            ),
        ),
        decided,
        "surely less error on captured tensors than without means and than with means of token order, on no "
        "tensors surely more than either; clips no farther by two standard errors",
        lambda n: (
            all(
                n.less("grouped", each, "captured", factor=0.98) and n.keeps("grouped", each)
                for each in ("none", "row")
            )
            and not n.nearer("c_none", "c_grouped")
        ),
        "Over the baseline of the same formats V-Smooth adds 1.1 to 2.8 dB to clips at 8 bits, 0.5 to 3.6 "
        "at 4.",
        (("grouped", "none"), ("grouped", "row"), ("kept", "none"), *(("grouped", name) for name in others)),
        tuple(("c_grouped", f"c_{name}") for name in ("none", *others)),
    )


GROUPING = (
    grouping(
        CAST,
        "On, for captured tensors and attention by content. Structured attention, which stays near a token, "
        "gains on this draw and lost on another, by the order alone already: ExpCast's part of the error is "
        "the larger one there. Clips gain a little, not surely.",
        "sage2",
        "naive_on",
    ),
    grouping(
        "int8_fp8",
        "On: nearly all tensors gain, captured ones most. Clips, which group in few steps, do not show it.",
        "sage2",
        "naive_on",
    ),
    grouping(
        INT8,
        "On, for captured tensors. Much of the gain is the means', whatever the order: over means of token "
        "order structured tensors lose by less than draws differ, and clips show no difference. The order "
        "without means would be far worse on structured tensors (I3).",
        "sage1",
        "kitchen",
        "package",
    ),
    grouping(
        "fp8_fp8 + ExpCast",
        "On: no tensors lose, captured ones gain a little, for E4M3 scores are the larger part of the error. "
        "Clips do not show it.",
        "naive",
        "naive_on",
        "torch8",
    ),
    grouping("fp8_fp8", "On, as with ExpCast.", "naive", "naive_on", "torch8"),
    grouping("nvfp4", "On: all tensors gain.", "sage3", "sage3_on", "qat"),
)


NOTES = "tests/bench/NOTES.md"


MEANS_COST = (
    Quote(
        "With means, `int8_int8`", NOTES, "| `int8_int8`, means, order | 75,600 | 140.3 | 834 | 1.48 (208.3)"
    ),
    Quote("Without means", NOTES, "| `int8_int8`, plain | 75,600 | 133.0 | 880 | 1.57 (208.3)"),
)


def outside(value_format, demean, recipe, other, claim, holds, decided, quotes=()):
    rows = {"shipped": "first quarter", "other": f"first quarter, then {other}"}
    if recipe != "nvfp4":
        rows |= {"all_means": "no step, means in token order", "bare": "no step, no means"}
    names = (recipe, "int8_fp8") if recipe == CAST else (recipe,)
    cells = {}
    for i, name in enumerate(names):
        cells |= {f"row{i}": f"{name}, means, sequence", f"none{i}": f"{name}, no means"}
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
        "surely less error with them on structured, by content and captured tensors, on none surely more; "
        "clips nearer with them by three standard errors",
        lambda n: (
            n.less("row0", "none0", "structured", "by content", "captured", factor=0.9)
            and n.keeps("row0", "none0")
            and n.nearer("shipped", "other", 3.0)
        ),
        "Kept: clips lose much by leaving them out. They cost what the quotes say.",
        MEANS_COST,
    ),
    outside(
        "fp8",
        False,
        CAST,
        "means in token order",
        "with them clips are not nearer by two standard errors, and no error of `int8_fp8`, with ExpCast or "
        "without, is a tenth less",
        lambda n: (
            not n.nearer("other", "shipped")
            and n.less("none0", "row0", factor=1 / 0.9)
            and n.less("none1", "row1", factor=1 / 0.9)
        ),
        "None, as in the paper: FP8 values gain little in token order, captured ones about a twentieth. By "
        "an exponential it loses on sm_90, where the kernel without means is the slower one: there leaving "
        "them out stays only because one rule holds for FP8, and `auto` never takes it.",
    ),
    outside(
        "nvfp4",
        True,
        "nvfp4",
        "no means",
        "surely less error with them on N(0, 1), by content and on captured tensors, on none surely more; "
        "clips without them not nearer by two standard errors",
        lambda n: (
            n.less("row0", "none0", "N(0, 1)", "captured", factor=0.98)
            and n.less("row0", "none0", "by content", factor=0.9)
            and n.keeps("row0", "none0")
            and not n.nearer("other", "shipped")
        ),
        "Kept, for N(0, 1), attention by content and captured tensors; structured ones and a small Q lose a "
        "little, less than draws differ.",
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
        *(
            schedules(
                recipe,
                **{short: "first quarter"},
                **{f"{short}_kept": "first quarter, order kept, then no means"},
                **{f"{short}_means": "first quarter, order and means kept"},
            )
            for short, recipe in (("cast", CAST), ("int8", INT8))
        ),
        errors(
            e_cast="int8_fp8 + ExpCast, no means",
            e_cast_kept="int8_fp8 + ExpCast, no means, order kept",
            e_int8="int8_int8, means, sequence",
            e_int8_kept="int8_int8, no means, order kept",
        ),
    ),
    "Given up: an order is memory of every layer, and clips are not surely nearer to exact with it. By "
    "content, with ExpCast, the order alone would take about a quarter off the error of later steps.",
    "clips with the order kept, with means or without, are not nearer by three standard errors",
    lambda n: (
        not any(
            n.nearer(f"{recipe}_{how}", recipe, 3.0)
            for recipe in ("cast", "int8")
            for how in ("kept", "means")
        )
    ),
    "Later steps run the plain kernel on the permutation that the window left.",
    (("e_cast_kept", "e_cast"), ("e_int8_kept", "e_int8")),
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


TIMES = ("int8_fp8 + ExpCast, s of attention", "int8_int8, s of attention")


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
                **{f"{short}_{name}": policy for name, policy in OTHERS.items()},
                **{f"{short}_first": "first quarter", f"{short}_none": ungrouped},
            )
            for short, recipe, ungrouped in (
                ("cast", CAST, "no step, no means"),
                ("int8", INT8, "no step, means in token order"),
            )
        ),
        schedules(
            "nvfp4",
            four_first="first quarter",
            four_all="every step",
            four_uniform="uniform quarter",
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
                TIMES[0]: "cuda_int8_fp8_sm90",
                TIMES[1]: "cuda_int8_int8_sm90",
            },
        ),
    ),
    "The paper's: first quarter, four steps. With ExpCast no other is surely nearer, and every step takes "
    "more time. `int8_int8` grouped at every step has clips that are nearer by over two standard errors of "
    "PSNR, half of them by about a decibel or more, for no time; the means of SSIM and GMSD are further "
    "because two clips instead of one end in another picture. What it costs is the memory of an order of "
    "every layer all through a clip: the README says 1 where the smallest error is asked for. At 4 bits "
    "every step is surely nearer, by all three measures: there tooltips, help and README say 1. The default "
    "is that of 8 bits, since one share holds for both.",
    "with ExpCast clips of no other schedule are nearer by three standard errors (there are eight, with no "
    "grouping), and every step takes a percent more attention; with `int8_int8` every step is nearer by two, "
    "yet not by SSIM and GMSD, for at most a percent more, but nothing gains a decibel, and no grouping is "
    "not nearer by two; the first quarter takes at most two percent more than no grouping; at 4 bits every "
    "step is nearer by three, by SSIM and GMSD, too",
    lambda n: (
        not any(n.nearer(f"cast_{name}", "cast_first", 3.0) for name in (*OTHERS, "none"))
        and n["t_all", TIMES[0]] > 1.01 * n["t_first", TIMES[0]]
        and n.nearer("int8_all", "int8_first")
        and n["int8_all", "SSIM"] < n["int8_first", "SSIM"]
        and n["int8_all", "GMSD"] > n["int8_first", "GMSD"]
        and n["t_all", TIMES[1]] < 1.01 * n["t_first", TIMES[1]]
        and all(n.gain(f"int8_{name}", "int8_first")[0] < 1 for name in (*OTHERS, "none"))
        and not n.nearer("int8_none", "int8_first")
        and all(n["t_first", each] < 1.02 * n["t_none", each] for each in TIMES)
        and n.nearer("four_all", "four_first", 3.0)
        and n["four_all", "SSIM"] > n["four_first", "SSIM"]
        and n["four_all", "GMSD"] < n["four_first", "GMSD"]
    ),
    "First quarter 26.4 dB, uniform quarter 23.8, every step 26.9: what matters there is where grouping "
    "sits.",
    quotes=(
        Quote(
            "`nvfp4` between 8-bit ends as the node runs it, 32 clips of 09a3134: PSNR, SSIM, GMSD, dB over "
            "the first quarter and its standard error",
            "tests/bench/NOTES.md",
            "| every step | 45.16 | 0.9959 | 0.0060 | +3.87 | 0.84 |",
        ),
    ),
)


HYBRID = Choice(
    "8 bits at the ends of a 4-bit run",
    (Default("EDGE", 0.2, lambda: EDGE),),
    "Are clips nearer to exact when the first and the last fifth of the steps run at 8 bits?",
    (
        clips(
            four=("nvfp4 throughout", "nvfp4, window of a quarter"),
            ends="nvfp4, int8_int8 in the first and last fifth",
            none=("nvfp4, no step grouped, means in token order", "nvfp4, no step grouped"),
            eight=("int8_int8 throughout", "int8_int8, window of a quarter"),
            **peers("sage3", "sage3_on", "qat"),
        ),
    ),
    "On. The share is chosen: no other was measured, nor what it costs in time on a card with 4 bits.",
    "clips nearer to exact with 8 bits at the ends by two standard errors, and 4 bits nearer than "
    "SageAttention 3 with rotated Q and K",
    lambda n: n.nearer("four", "sage3_on") and n.nearer("ends", "four"),
    nearer=(("ends", "four"), ("ends", "eight"), ("four", "sage3_on")),
)

CHOICES = (
    *GROUPING,
    *OUTSIDE,
    KEPT,
    WINDOWS,
    HYBRID,
)
