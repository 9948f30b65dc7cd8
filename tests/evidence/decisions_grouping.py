"""Choices of how tokens are grouped: number, steps and kinds of groups. Entries of tool "choices"."""

import ast
from pathlib import Path

import torch
from comfyui_vc_attention import kernels
from comfyui_vc_attention.kernels import group_tokens
from comfyui_vc_attention.kernels.config import VCConfig
from comfyui_vc_attention.kernels.formats import TILE
from comfyui_vc_attention.kernels.group.labels import labels_from_order

from .choice_grids import CAST, INT8, clips, errors, orders, schedules
from .choices import Choice, Default, Grid, Quote
from .clips import ALL_CLUSTERS, CLIP_TOKENS

LONG, SHORT = "structured", "captured, step 5 of 10, block 1"


def constant(module, name):
    """A number of a module of kernels/group, read from its text: not every machine can import them all."""
    text = (Path(kernels.__file__).parent / "group" / f"{module}.py").read_text(encoding="utf-8")
    return next(
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and node.targets[0].id == name
    )


def steps(module, name, value):
    return Default(f"{module}.{name}", value, lambda: constant(module, name))


def sweep(**rows):
    """Rows of the sweep: name=(label, tensors, clusters, steps)."""
    made = {
        name: (label, {"tensors": tensors, "clusters": clusters, "cold steps": how})
        for name, (label, tensors, clusters, how) in rows.items()
    }
    removed = {
        "energy removed": "energy removed",
        "error of V over token order's": "E4M3 value MSE over sequence",
    }
    return Grid("fidelity", "Clusters and Lloyd steps", made, removed)


def order_times(**rows):
    """name=(label, what, clusters, Lloyd steps)."""
    made = {
        name: (label, {"what": what, "clusters": clusters, "Lloyd steps": how})
        for name, (label, what, clusters, how) in rows.items()
    }
    return Grid("speed", "Order time", made, {"ms": "ms"})


REMOVED = "energy removed"


COUNTS = (8, 16, 32, 64, 128, 256)


CLUSTERS = Choice(
    "Groups of similar values per head",
    (
        Default("VCConfig().clusters", 128, lambda: VCConfig().clusters),
        Default("VCConfig().clusters_for(75600)", 128, lambda: VCConfig().clusters_for(75_600)),
        Default("VCConfig().clusters_for(1440)", 8, lambda: VCConfig().clusters_for(CLIP_TOKENS)),
    ),
    "How many groups should k-means make of a head's values, of long clips and of few tokens?",
    (
        sweep(
            **{f"long{n}": (f"structured, 591 tiles, {n} groups", LONG, n, 10) for n in COUNTS},
            **{f"short{n}": (f"one capture, 12 tiles, {n} groups", SHORT, n, 10) for n in (4, *COUNTS)},
        ),
        order_times(
            **{f"ms{n}": (f"a new order, {n} groups", "k-means", n, "as shipped") for n in (64, 128, 256)}
        ),
        errors(
            few=("int8_int8, captured: 8 groups", "int8_int8, means, grouped"),
            many=("int8_int8, 128 groups", "int8_int8, means, uncapped"),
            cast_few=("int8_fp8 + ExpCast, captured: 8 groups", "int8_fp8 + ExpCast, means, grouped"),
            cast_many=("int8_fp8 + ExpCast, 128 groups", "int8_fp8 + ExpCast, means, uncapped"),
        ),
        *(
            schedules(
                recipe,
                **{f"{short}8": ("every step, 8 groups", "every step")},
                **{f"{short}128": ("every step, 128 groups", f"every step, {ALL_CLUSTERS} clusters")},
            )
            for short, recipe in (("cast", CAST), ("int", INT8))
        ),
    ),
    "128, halved until there are at most two groups for three tiles: a tile with pieces of many groups has "
    "no mean of its own. 64 take less time and remove less.",
    "of the numbers tried 128 remove the most on structured tensors, and take less time than 256 and more "
    "than 64; on captured tensors 8, which the rule gives, remove the most and leave surely less error than "
    "128; of `int8_int8` clips are nearer with them by two standard errors",
    lambda n: (
        max(COUNTS, key=lambda c: n[f"long{c}", REMOVED]) == 128
        and n["ms64", "ms"] < n["ms128", "ms"] < n["ms256", "ms"]
        and max((4, *COUNTS), key=lambda c: n[f"short{c}", REMOVED]) == 8
        and n.less("few", "many", "captured", factor=0.98)
        and n.less("cast_few", "cast_many", "captured", factor=0.98)
        and n.nearer("int8", "int128")
    ),
    "It gives no number of groups.",
    (("few", "many"), ("cast_few", "cast_many")),
    (("cast8", "cast128"), ("int8", "int128")),
)


LLOYD = Choice(
    "Steps of k-means",
    (
        steps("cuda_kmeans", "COLD_ITERATIONS", 4),
        steps("cuda_kmeans", "WARM_ITERATIONS", 1),
        steps("triton_kmeans", "COLD_ITERATIONS", 5),
        steps("triton_kmeans", "WARM_ITERATIONS", 2),
        steps("reference", "COLD_ITERATIONS", 10),
        steps("reference", "WARM_ITERATIONS", 2),
    ),
    "How many Lloyd steps from nothing, and from the last order's centroids (warm)? The CUDA grouping's see "
    "a sample of the tokens, the reference's all of them.",
    (
        sweep(
            **{
                f"cold{n}": (f"CUDA, {n} from nothing", LONG, 128, f"as shipped here, cold {n}")
                for n in (1, 2, 4, 10)
            },
            **{f"warm{n}": (f"CUDA, {n} warm", LONG, 128, f"as shipped here, warm {n}") for n in (1, 2, 4)},
            **{f"whole{n}": (f"reference, {n} from nothing", LONG, 128, n) for n in (1, 2, 4, 6, 10)},
            **{f"whole_warm{n}": (f"reference, {n} warm", LONG, 128, f"warm, {n}") for n in (1, 2, 4)},
            **{
                f"short_cold{n}": (
                    f"one capture, CUDA, {n} from nothing",
                    SHORT,
                    128,
                    f"as shipped here, cold {n}",
                )
                for n in (1, 2, 4, 10)
            },
            **{
                f"short_warm{n}": (f"one capture, CUDA, {n} warm", SHORT, 128, f"as shipped here, warm {n}")
                for n in (1, 2, 4)
            },
        ),
        order_times(
            **{f"ms{n}": (f"CUDA, {n} from nothing", "k-means", 128, n) for n in (1, 2, 4, 10)},
            **{f"ms_warm{n}": (f"CUDA, {n} warm", "k-means, warm", 128, n) for n in (1, 2, 4)},
        ),
    ),
    "CUDA: four from nothing, one warm, for the time. Over a clip warm orders fall a little behind new ones "
    "(the quotes). The reference has more, because it need not be fast; Triton's numbers are chosen, not "
    "swept.",
    "on structured values four steps from nothing remove at least 99 parts of 100 of what ten do, one warm "
    "step of what four do, and both take under two thirds of their time",
    lambda n: (
        n["cold4", REMOVED] > 0.99 * n["cold10", REMOVED]
        and n["warm1", REMOVED] > 0.99 * n["warm4", REMOVED]
        and n["ms4", "ms"] < 0.67 * n["ms10", "ms"]
        and n["ms_warm1", "ms"] < 0.67 * n["ms_warm4", "ms"]
    ),
    "It gives no number of steps; warm starts halve the time there.",
    quotes=tuple(
        Quote(label, "tests/bench/NOTES.md", text)
        for label, text in (
            (
                "Energy removed on five kinds of values, drifting",
                "| after 8 warm starts of 1 step on drifting values | 0.200 | 0.219 | 0.194 | 0.199 | 0.153 "
                "|",
            ),
            ("The same", "| of 2 steps | 0.199 | 0.219 | 0.194 | 0.199 | 0.154 |"),
            (
                "The same",
                "| new, 10 cold steps, on the last values | 0.203 | 0.221 | 0.194 | 0.199 | 0.158 |",
            ),
        )
    ),
)


def sizes_differ():
    """Whether group_tokens leaves groups as k-means makes them, not cut to tiles."""
    values = torch.randn(1, 1, 1000, 64, generator=torch.Generator().manual_seed(0))
    sizes = labels_from_order(group_tokens(values, 4).order).flatten().long().bincount()
    return any(size % TILE for size in sizes.tolist()[:-1])


ORDER = Choice(
    "How keys are ordered for their tiles",
    (Default("group_tokens: sizes of groups differ", True, sizes_differ),),
    "Token order, cubes of the clip, k-means, or k-means whose groups fill tiles exactly?",
    (
        orders(
            "Token orders",
            REMOVED,
            "paper's ratio",
            o_row=("token order", "sequence"),
            o_cube=("cube", "cube"),
            o_means=("k-means", "grouped"),
            o_warm=("k-means, warm", "warm"),
            o_full=("balanced k-means", "balanced"),
        ),
        orders(
            "Captured token orders",
            REMOVED,
            s_row=("captured, token order", "sequence"),
            s_cube=("captured, cube", "cube"),
            s_means=("captured, k-means", "grouped"),
            s_full=("captured, balanced", "balanced"),
        ),
        errors(
            **{
                short + name: f"{recipe}, means, {order}"
                for short, recipe in (("", INT8), ("cast_", CAST))
                for name, order in (("means", "grouped"), ("cube", "cube"), ("full", "balanced"))
            },
        ),
        order_times(
            ms=("k-means", "k-means", 128, "as shipped"),
            ms_full=(
                "balanced, in PyTorch",
                "balanced k-means, in PyTorch, 40 times that of one head",
                591,
                None,
            ),
        ),
        clips(
            **{
                f"c_{short}{name}": f"{recipe}, means, {order}, every step"
                for short, recipe in (("", INT8), ("cast_", CAST))
                for name, order in (("means", "grouped"), ("cube", "cube"))
            },
        ),
    ),
    "Plain k-means, as in the paper. With INT8 queries and keys balanced groups leave a little less error on "
    "captured and structured tensors, but nobody has made them fast. A cube costs the gather alone and "
    "removes little; with `int8_int8` structured tensors are as well served by it.",
    "k-means removes over twice what cubes do on structured values and errs surely less on captured "
    "tensors, surely more on none; balanced groups remove more and err less on structured and captured "
    "tensors, for over a hundred times the time as they are written",
    lambda n: (
        n["o_means", REMOVED] > 2 * n["o_cube", REMOVED]
        and n["o_full", REMOVED] > n["o_means", REMOVED]
        and n["ms_full", "ms"] > 100 * n["ms", "ms"]
        and all(
            n.less(f"{kind}means", f"{kind}cube", "captured", factor=0.98)
            and n.keeps(f"{kind}means", f"{kind}cube")
            and n.less(f"{kind}full", f"{kind}means", "structured", "captured")
            for kind in ("", "cast_")
        )
    ),
    "Balanced groups take 8.5% more of V's error, for 85% of the attention's time.",
    (("means", "cube"), ("means", "full"), ("cast_means", "cast_cube"), ("cast_means", "cast_full")),
    (("c_means", "c_cube"), ("c_cast_means", "c_cast_cube")),
)


CHOICES = (CLUSTERS, LLOYD, ORDER)
