"""Choices of recipe and kernel. Entries of tool "choices"."""

from dataclasses import replace

from comfyui_vc_attention.kernels.config import VCConfig
from comfyui_vc_attention.kernels.operands import AttentionProblem
from comfyui_vc_attention.kernels.registry import KERNELS, choose_kernel
from comfyui_vc_attention.nodes.patch_settings import DEFAULT_MIN_TOKENS

from .choice_grids import CAST, INT8, PEERS, SAGE2_ON, SIXTEEN, clips, errors, speeds
from .choices import Choice, Default, Grid

OURS = {
    "int8": ("int8_int8, grouped", "int8_int8, means, grouped"),
    "exp": ("int8_fp8, grouped", "int8_fp8, means, grouped"),
    "cast": ("int8_fp8 + ExpCast, grouped", "int8_fp8 + ExpCast, means, grouped"),
    "all8": ("fp8_fp8, grouped", "fp8_fp8, means, grouped"),
    "all8_cast": ("fp8_fp8 + ExpCast, grouped", "fp8_fp8 + ExpCast, means, grouped"),
    "four": ("nvfp4, grouped", "nvfp4, means, grouped"),
}


OUR_CLIPS = {
    name: (
        label.replace("grouped", "as the node runs it"),
        method.replace("means, grouped", "window of a quarter"),
    )
    for name, (label, method) in OURS.items()
}


def automatic(capability, **config):
    problem = AttentionProblem.self_attention(75_600, heads=2, device_type="cuda", capability=capability)
    chosen = choose_kernel(replace(problem, config=VCConfig(**config))).recipe
    return chosen.numerics + " + ExpCast" * chosen.expcast


RECIPE = Choice(
    "The recipe that `auto` takes",
    (
        Default("auto on sm_90", CAST, lambda: automatic((9, 0))),
        Default("auto on sm_90, expcast off", INT8, lambda: automatic((9, 0), expcast="off")),
        Default(
            "auto on sm_80, sm_89, sm_120",
            (INT8,) * 3,
            lambda: tuple(automatic(each) for each in ((8, 0), (8, 9), (12, 0))),
        ),
        Default(
            "auto on sm_100, sm_103",
            ("fp8_fp8 + ExpCast",) * 2,
            lambda: (automatic((10, 0)), automatic((10, 3))),
        ),
    ),
    "Speed or fidelity, and what do others have?",
    (
        errors(**SIXTEEN, **OURS, **PEERS, **SAGE2_ON),
        clips(**{f"c_{name}": row for name, row in (SIXTEEN | OUR_CLIPS | PEERS | SAGE2_ON).items()}),
        speeds(
            s_cast=("int8_fp8 + ExpCast", "cuda_int8_fp8_sm90", 75_600),
            s_int8=("int8_int8", "cuda_int8_int8_sm90", 75_600),
            s_all8=("fp8_fp8 + ExpCast", "cuda_fp8_fp8_sm90", 75_600),
            s_cast_32k=("int8_fp8 + ExpCast", "cuda_int8_fp8_sm90", 32_768),
            s_int8_32k=("int8_int8", "cuda_int8_int8_sm90", 32_768),
            s_all8_32k=("fp8_fp8 + ExpCast", "cuda_fp8_fp8_sm90", 32_768),
        ),
        Grid(
            "speed",
            "Speed over length",
            {
                f"k{n}": (
                    f"comfy-kitchen INT8, the package, {n:,} tokens",
                    {"kernel": "comfy-kitchen INT8", "tokens": n, "heads": 40},
                )
                for n in (75_600, 32_768)
            },
            {"whole call, over cuDNN": "call over cuDNN", "taking turns": "in turns over cuDNN"},
        ),
    ),
    "Speed first on sm_90: `int8_fp8` + ExpCast, which errs less than `fp8_fp8` at about its speed. It errs "
    "more than comfy-kitchen and SageAttention 1 on captured tensors; a whole call takes less than half of "
    "comfy-kitchen's time. `int8_int8` is for fidelity (`expcast off`) and where an exponential is no "
    "bottleneck; of N(0, 1) SageAttention 1, whose P and V are fp16, errs less. On sm_100 Triton's INT8 is "
    "slow and sm_103 has none: `fp8_fp8`, not timed here.",
    "on captured and structured tensors `int8_int8` errs less than every published 8-bit recipe, and its "
    "mean PSNR is the highest of them; `int8_int8`'s kernel takes over a fifth more time than the ExpCast "
    "kernel, `fp8_fp8`'s at least nine tenths of it with more error on every kind of tensors; what is said "
    "of comfy-kitchen and SageAttention 1",
    lambda n: (
        all(
            n.less("int8", each, "structured", "captured")
            for each in ("sage1", "sage2", "sage2_on", "kitchen", "package", "torch8", "naive", "naive_on")
        )
        and all(
            n["c_int8", "PSNR, dB"] > n[f"c_{each}", "PSNR, dB"]
            for each in ("sage1", "sage2", "sage2_on", "kitchen", "package")
        )
        and n["s_cast", "grouped, ms"] * 1.2 < n["s_int8", "grouped, ms"]
        and n.less("cast", "all8_cast")
        and all(
            n[f"s_all8{size}", "grouped, ms"] > 0.9 * n[f"s_cast{size}", "grouped, ms"]
            for size in ("", "_32k")
        )
        and n.less("package", "cast", "captured")
        and n.less("sage1", "cast", "captured")
        and n.less("sage1", "int8", "N(0, 1)")
        and n["s_cast", "whole call grouped, over cuDNN"] > 2 * n["k75600", "whole call, over cuDNN"]
    ),
    "Its kernels have ExpCast on data-centre cards; at 8 bits V-Smooth alone is nearest to exact there too.",
    (
        ("int8", "sage1"),
        ("int8", "package"),
        ("cast", "sage2_on"),
        ("cast", "package"),
        ("all8_cast", "naive_on"),
        ("four", "sage3"),
        ("four", "sage3_on"),
    ),
    nearer=(
        ("c_int8", "c_sage1"),
        ("c_int8", "c_package"),
        ("c_cast", "c_sage1"),
        ("c_cast", "c_sage2_on"),
        ("c_cast", "c_package"),
        ("c_all8_cast", "c_naive_on"),
        ("c_four", "c_sage3_on"),
    ),
)


TIMED = [spec.name for spec in KERNELS if spec.name not in ("reference", "cuda_nvfp4_sm120")]


KERNEL_ORDER = Choice(
    "The order of kernels",
    (
        Default(
            "first of KERNELS by recipe on sm_90",
            ("cuda_int8_fp8_sm90", "cuda_int8_int8_sm90", "cuda_fp8_fp8_sm90"),
            lambda: tuple(
                dict((spec.numerics[0], spec.name) for spec in reversed(KERNELS))[numerics]
                for numerics in ("int8_fp8", "int8_int8", "fp8_fp8")
            ),
        ),
    ),
    "Is the kernel that `auto` takes first the fastest of its recipe?",
    (
        speeds(**{name: (name, name, 75_600) for name in TIMED}),
        Grid(
            "length",
            "Length",
            {
                f"e_{name}": (
                    f"{name}, 65,536 keys",
                    {"kernel": name, "keys": 65_536, "heads": 2, "layout": "contiguous"},
                )
                for name in TIMED
            },
            {"error": "error", "error grouped": "error grouped"},
        ),
    ),
    "Yes, on sm_90. The rows for other cards were timed on none of those: `cuda_int8_int8` stands before "
    "`triton_int8_int8` for its smaller error; what they take on this card is beside.",
    "of one recipe the first has the least time grouped, and `cuda_int8_int8` less error than "
    "`triton_int8_int8`",
    lambda n: (
        all(
            n[first, "grouped, ms"] <= n[name, "grouped, ms"]
            for numerics, first in (
                ("int8_fp8", "cuda_int8_fp8_sm90"),
                ("int8_int8", "cuda_int8_int8_sm90"),
                ("fp8_fp8", "cuda_fp8_fp8_sm90"),
            )
            for name in TIMED
            if numerics in name
        )
        and n.less("e_cuda_int8_int8", "e_triton_int8_int8")
    ),
)


BREAK_EVEN = ("cuda_int8_fp8_sm90", "cuda_int8_int8_sm90", "triton_int8_fp8", "triton_int8_int8")


MIN_TOKENS = Choice(
    "Tokens from which the node takes attention over",
    (Default("DEFAULT_MIN_TOKENS", 8192, lambda: DEFAULT_MIN_TOKENS),),
    "Where nobody has measured the card: from how many tokens is a whole call faster than cuDNN?",
    (
        Grid(
            "speed",
            "Speed over length",
            {
                f"{name}_{n}": (f"{name}, {n:,} tokens", {"kernel": name, "tokens": n, "heads": 40})
                for name in BREAK_EVEN
                for n in (4096, 8192, 16_384)
            },
            {"whole call, over cuDNN": "call over cuDNN", "grouped": "call grouped over cuDNN"},
        ),
    ),
    "About where an H200's recipes pass cuDNN: ExpCast's of sm_90 before, `int8_int8` of sm_90 about there, "
    "Triton's `int8_int8` only later, if at all. `python install.py --all` measures a card and takes its "
    "own number.",
    "at 8,192 tokens the ExpCast kernels win, that of sm_90 at 4,096 too; `int8_int8` of sm_90 is at most a "
    "tenth slower than cuDNN at 8,192, slower at 4,096 and faster at 16,384; Triton's is slower at all three",
    lambda n: (
        n["cuda_int8_fp8_sm90_8192", "grouped"] > 1
        and n["triton_int8_fp8_8192", "grouped"] > 1
        and n["cuda_int8_int8_sm90_8192", "grouped"] > 0.9
        and n["cuda_int8_int8_sm90_4096", "grouped"] < 1 < n["cuda_int8_int8_sm90_16384", "grouped"]
        and n["cuda_int8_fp8_sm90_4096", "grouped"] > 1
        and all(n[f"triton_int8_int8_{tokens}", "grouped"] < 1 for tokens in (4096, 8192, 16_384))
    ),
)

CHOICES = (RECIPE, KERNEL_ORDER, MIN_TOKENS)
