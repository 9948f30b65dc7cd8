"""Choices of recipe and kernel. Entries of tool "choices"."""

from dataclasses import replace

from comfyui_vc_attention.kernels.config import VCConfig
from comfyui_vc_attention.kernels.operands import AttentionProblem
from comfyui_vc_attention.kernels.registry import KERNELS, choose_kernel
from comfyui_vc_attention.nodes.patch_settings import DEFAULT_MIN_TOKENS

from .choice_grids import CAST, INT8, PEERS, clips, errors, lengths, peers, speeds
from .choices import Choice, Default

SIXTEEN = "PyTorch, 16 bit"
OURS = {
    "int8": INT8,
    "exp": "int8_fp8",
    "cast": CAST,
    "all8": "fp8_fp8",
    "all8_cast": "fp8_fp8 + ExpCast",
    "four": "nvfp4",
}
PACKAGES = {"c_whole1": "SageAttention 1 (package)", "c_whole2": "SageAttention 2 (package)"}
EIGHT_BITS = ("sage1", "sage2", "sage2_on", "kitchen", "package", "torch8", "naive", "naive_on")


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
        errors(
            sixteen=SIXTEEN,
            **{name: f"{recipe}, means, grouped" for name, recipe in OURS.items()},
            **PEERS,
        ),
        clips(
            c_sixteen=SIXTEEN,
            **{f"c_{name}": f"{recipe}, window of a quarter" for name, recipe in OURS.items()},
            **peers(*PEERS, prefix="c_"),
            **PACKAGES,
        ),
        speeds(
            **{
                f"s_{name}{size}": (OURS[name], f"cuda_{OURS[name].partition(' ')[0]}_sm90", tokens)
                for size, tokens in (("", 75_600), ("_32k", 32_768))
                for name in ("cast", "int8", "all8_cast")
            },
        ),
        speeds(
            {"whole call, over cuDNN": "call over cuDNN", "taking turns": "in turns over cuDNN"},
            **{
                f"k{n}": ("comfy-kitchen INT8, the package", "comfy-kitchen INT8", n)
                for n in (75_600, 32_768)
            },
        ),
    ),
    "Speed first on sm_90: `int8_fp8` + ExpCast, which errs less than `fp8_fp8` at about its speed. It errs "
    "more than comfy-kitchen and SageAttention 1 on captured tensors, though its clips are surely no farther "
    "from exact ones, and more than SageAttention 2 on structured ones, by about half; a whole call takes "
    "less than half of comfy-kitchen's time. `int8_int8` is for fidelity (`expcast off`) and where an "
    "exponential is no bottleneck; of N(0, 1) SageAttention 1, whose P and V are fp16, errs less. By SSIM "
    "and GMSD comfy-kitchen's clips are level with `auto`'s. On sm_100 Triton's INT8 takes older products "
    "and sm_103 has none: `fp8_fp8`, not timed there.",
    "on captured and structured tensors `int8_int8` errs less than every published 8-bit recipe, and its "
    "clips are nearer than theirs by three standard errors; `int8_int8`'s kernel takes over a fifth more "
    "time than the ExpCast kernel, `fp8_fp8`'s at least nine tenths of it with more error on every kind of "
    "tensors; what is said of comfy-kitchen and SageAttention",
    lambda n: (
        all(n.less("int8", each, "structured", "captured") for each in EIGHT_BITS)
        and all(n.nearer("c_int8", each, 3.0) for each in (*(f"c_{each}" for each in EIGHT_BITS), *PACKAGES))
        and n["s_cast", "grouped, ms"] * 1.2 < n["s_int8", "grouped, ms"]
        and n.less("cast", "all8_cast")
        and all(
            n[f"s_all8_cast{size}", "grouped, ms"] > 0.9 * n[f"s_cast{size}", "grouped, ms"]
            for size in ("", "_32k")
        )
        and n.less("package", "cast", "captured")
        and n.less("sage1", "cast", "captured")
        and not any(n.nearer(each, "c_cast") for each in ("c_package", "c_sage1", "c_whole1"))
        and n.less("sage2", "cast", "structured", factor=0.9)
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
        ("c_int8", "c_whole1"),
        ("c_int8", "c_package"),
        ("c_cast", "c_whole1"),
        ("c_cast", "c_whole2"),
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
        lengths(**{f"e_{name}": (name, name, 65_536) for name in TIMED}),
    ),
    "Yes, on sm_90. The rows for other cards were timed on none of those: `cuda_int8_int8` stands before "
    "`triton_int8_int8` for its smaller error, though Triton's is faster on this card, where it has wgmma.",
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
        speeds(
            {"whole call, over cuDNN": "call over cuDNN", "grouped": "call grouped over cuDNN"},
            **{f"{name}_{n}": (name, name, n) for name in BREAK_EVEN for n in (4096, 8192, 16_384)},
        ),
    ),
    "About where an H200's recipes pass cuDNN: ExpCast's of sm_90 is about even at 4,096, without the "
    "order's own time, `int8_int8` of sm_90 at 8,192, "
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
