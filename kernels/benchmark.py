"""Speed and error of every kernel on this machine, beside other attention functions, for a model's shapes.

From the pack's folder: python -m kernels.benchmark --help
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .benchmark_peers import PEERS
from .config import VCConfig
from .dispatch import attend_call, group_tokens, plain, prepare_call, vc_attention
from .operands import AttentionProblem
from .registry import KERNELS, KernelSpec, choose_kernel
from .testing import KINDS, sample_qkv

CLUSTERS = 128
PROBED_HEADS, PROBED_ROWS = 2, 256  # rows whose exact output the error is measured against
CPU_TOKENS, CPU_HEADS = 1024, 2  # without a GPU only small shapes end in sensible time
GROUPS = 5  # of calls that are timed as one on a GPU
REFERENCE_TOKENS = 4096  # longest call that the plain PyTorch reference is timed on


@dataclass(frozen=True)
class Shape:
    """Self-attention of one model and clip size, one batch row."""

    name: str
    heads: int
    tokens: int
    head_dim: int = 128

    @property
    def flops(self) -> float:
        return 4.0 * self.heads * self.tokens**2 * self.head_dim


SHAPES = (
    Shape("small test", 4, 2048),
    Shape("Wan 14B, 832x480, 81 frames", 40, 32_760),
    Shape("Wan 14B, 1280x720, 81 frames", 40, 75_600),
    Shape("Wan 1.3B, 832x480, 81 frames", 12, 32_760),
    Shape("Wan 5B, 1280x704, 121 frames", 24, 27_280),
    Shape("HunyuanVideo, 1280x720, 129 frames", 24, 118_800),
    Shape("HunyuanVideo 1.5, 1280x720, 121 frames", 16, 111_600),
    Shape("MiniMax-H3, 1344x768, 124 frames", 56, 41_822),
    Shape("MiniMax-H3, 1344x768, 362 frames", 56, 113_406),
    Shape("LongCat-Video, 832x480, 93 frames", 32, 37_440),
)


@dataclass(frozen=True)
class Result:
    """One attention function on one shape. Milliseconds are medians; errors are relative L2."""

    name: str
    refusal: str | None = None  # why it was not measured
    milliseconds: float = 0.0  # the whole call, quantization included
    attend_milliseconds: float = 0.0  # ours: without quantization
    grouped_milliseconds: float = 0.0  # ours: the whole call inside the grouping window
    grouping_milliseconds: float = 0.0  # ours: making an order, which several steps share
    error: float = 0.0
    grouped_error: float = 0.0
    peak_bytes: int = 0  # memory that the call needed beyond its inputs


def shape_named(name: str) -> Shape:
    """Raises ValueError that lists the known names."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise ValueError(f"unknown shape {name!r}; choose {', '.join(shape.name for shape in SHAPES)}")


def fitting(shape: Shape, device: torch.device) -> Shape:
    """The shape, cut to what a machine without a GPU can do; its name says so."""
    if device.type == "cuda":
        return shape
    heads, tokens = min(shape.heads, CPU_HEADS), min(shape.tokens, CPU_TOKENS)
    if (heads, tokens) == (shape.heads, shape.tokens):
        return shape
    return replace(
        shape, name=f"{shape.name}, cut to {heads} heads and {tokens:,} tokens", heads=heads, tokens=tokens
    )


def make_inputs(shape: Shape, kind: str, dtype: torch.dtype, device: torch.device):
    """q, k, v [1, H, L, D] of a kind of kernels/testing.py, made head by head to stay small."""
    made = [
        torch.empty(1, shape.heads, shape.tokens, shape.head_dim, dtype=dtype, device=device) for _ in "qkv"
    ]
    for head in range(shape.heads):
        parts = sample_qkv(kind, (1, 1, shape.tokens, shape.head_dim), dtype=dtype, device=device, seed=head)
        for whole, part in zip(made, parts, strict=True):
            whole[:, head : head + 1] = part
    return tuple(made)


class Exact:
    """Exact output in a few rows of a few heads, in float32."""

    def __init__(self, q, k, v):
        heads, rows = (
            slice(None, None, max(1, n // m))
            for n, m in zip(q.shape[1:3], (PROBED_HEADS, PROBED_ROWS), strict=True)
        )
        self._where = (slice(None), heads, rows)
        attention = torch.nn.functional.scaled_dot_product_attention
        self._out = attention(q[self._where].float(), k[:, heads].float(), v[:, heads].float())

    def error(self, out) -> float:
        """Relative L2 of out [1, H, L, D] in those rows."""
        return float((out[self._where].float() - self._out).norm() / self._out.norm())


def median_ms(call: Callable, device: torch.device, seconds: float) -> float:
    """Median time of call() in milliseconds: at least 3 times, for about so many seconds.

    On a GPU calls are queued without a pause, as a sampler queues those of a model: a card that waits for
    Python after each would be timed waiting. The first calls wake it and tell how many to time as one.
    """
    if device.type == "cuda":
        taken = queued_ms(call, (1, 1, 1))
        fit = 1e3 * seconds / max(min(taken), 1e-3)  # calls
        if fit > 3:
            taken = queued_ms(call, (max(1, round(fit / GROUPS)),) * (GROUPS + 1))[1:]
        return statistics.median(taken)
    begin, taken = time.perf_counter(), []
    while len(taken) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def queued_ms(call: Callable, counts: tuple[int, ...]) -> list[float]:
    """Milliseconds of one call() in each of these groups of calls, all of them queued on the GPU at once."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(counts) + 1)]
    marks[0].record()
    for count, mark in zip(counts, marks[1:], strict=True):
        for _ in range(count):
            call()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) / n for n, a, b in zip(counts, marks[:-1], marks[1:], strict=True)]


def peak_of(call: Callable, device: torch.device):
    """(what call returns, bytes allocated beyond what was there before it)."""
    if device.type != "cuda":
        return call(), 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def config_for(spec: KernelSpec) -> VCConfig:
    """The precision that a kernel is for, everything else on auto."""
    return VCConfig("4-bit" if spec.numerics == ("nvfp4",) else "8-bit", clusters=CLUSTERS)


def measure_kernel(spec: KernelSpec, q, k, v, exact: Exact, seconds: float) -> Result:
    """One of our kernels, without and with grouping."""
    config = config_for(spec)
    ungrouped = plain(config)
    choice = choose_kernel(AttentionProblem.of(q, k, v, config), spec.name)
    if choice.kernel is None:
        return Result(spec.name, choice.reason.removeprefix(f"{spec.name}: "))
    if spec.name == "reference" and q.shape[2] > REFERENCE_TOKENS:
        return Result(spec.name, f"slow: measured up to {REFERENCE_TOKENS:,} tokens")
    name, device = f"{spec.name} ({choice.recipe.numerics})", q.device
    grouping = group_tokens(v, CLUSTERS)  # the first call of each function also compiles it
    out, peak = peak_of(lambda: vc_attention(q, k, v, ungrouped, kernel=spec.name), device)
    grouped = vc_attention(q, k, v, config, grouping=grouping, kernel=spec.name)
    prepared = prepare_call(q, k, v, ungrouped, kernel=spec.name)
    return Result(
        name,
        milliseconds=median_ms(lambda: vc_attention(q, k, v, ungrouped, kernel=spec.name), device, seconds),
        attend_milliseconds=median_ms(lambda: attend_call(prepared), device, seconds),
        grouped_milliseconds=median_ms(
            lambda: vc_attention(q, k, v, config, grouping=grouping, kernel=spec.name), device, seconds
        ),
        grouping_milliseconds=median_ms(lambda: group_tokens(v, CLUSTERS, grouping), device, seconds),
        error=exact.error(out),
        grouped_error=exact.error(grouped),
        peak_bytes=peak,
    )


def measure_peer(peer, q, k, v, exact: Exact, seconds: float) -> Result:
    refusal = peer.why_not(q)
    if refusal:
        return Result(peer.name, refusal)
    out, peak = peak_of(lambda: peer.attend(q, k, v), q.device)
    milliseconds = median_ms(lambda: peer.attend(q, k, v), q.device, seconds)
    return Result(peer.name, milliseconds=milliseconds, error=exact.error(out), peak_bytes=peak)


def run_benchmark(
    shape: Shape,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "clustered",
    seconds: float = 1.0,
    inputs: tuple | None = None,
) -> Iterator[Result]:
    """One Result after the other: first the others' functions, then our kernels.

    Stop iterating to cancel. inputs: q, k, v [1, H, L, D] to measure on instead of made ones. A function that
    raises is told as a refusal; out of memory is one, too.
    """
    device = torch.device(device)
    q, k, v = inputs if inputs is not None else make_inputs(shape, kind, dtype, device)
    exact = Exact(q, k, v)
    for peer in PEERS:
        yield guarded(peer.name, lambda peer=peer: measure_peer(peer, q, k, v, exact, seconds))
    for spec in KERNELS:
        yield guarded(spec.name, lambda spec=spec: measure_kernel(spec, q, k, v, exact, seconds))


# of kernels, of packages, of memory; AssertionError is how other packages refuse an input
MEASURING_FAILS = (RuntimeError, ValueError, ImportError, NotImplementedError, AssertionError)


def guarded(name: str, measure: Callable[[], Result]) -> Result:
    """What measure() returns; its error as a refusal, so that one broken function hides no other."""
    try:
        return measure()
    except MEASURING_FAILS as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return Result(name, f"failed: {first[0]}")


def count_of_functions() -> int:
    return len(PEERS) + len(KERNELS)


def table(shape: Shape, results: list[Result]) -> list[str]:
    """The results as lines of text; speed relative to PyTorch."""
    base = next((r.milliseconds for r in results if r.name == "PyTorch" and not r.refusal), 0.0)
    lines = [f"{shape.name}: {shape.heads} heads of {shape.head_dim}, {shape.tokens:,} tokens"]
    measured = [r for r in results if not r.refusal]
    if measured:
        best = min(measured, key=lambda r: r.milliseconds)
        times = f", {base / best.milliseconds:.2f}x PyTorch" if base else ""
        lines.append(f"fastest: {best.name}, {best.milliseconds:.2f} ms{times}, error {best.error:.2%}")
    lines.append(
        f"{'':<34}{'ms':>9}{'speed':>8}{'TFLOP/s':>9}{'error':>8}{'grouped':>17}{'order':>9}{'MiB':>8}"
    )
    for r in results:
        if r.refusal:
            lines.append(f"{r.name:<34}  {r.refusal}")
            continue
        grouped = (
            f"{r.grouped_milliseconds:>9.2f}{r.grouped_error:>8.2%}" if r.grouped_milliseconds else " " * 17
        )
        order = f"{r.grouping_milliseconds:>9.2f}" if r.grouping_milliseconds else " " * 9
        speed = f"{base / r.milliseconds:>7.2f}x" if base else " " * 8
        rate = shape.flops / r.milliseconds / 1e9
        lines.append(
            f"{r.name:<34}{r.milliseconds:>9.2f}{speed}{rate:>9.1f}{r.error:>8.2%}{grouped}{order}"
            f"{r.peak_bytes / 2**20:>8.0f}"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.benchmark",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.RawTextHelpFormatter,
    )
    names = [shape.name for shape in SHAPES]
    told = "".join(f'\n  "{name}"' for name in names)
    parser.add_argument(
        "--shape", default=names[0], choices=names, metavar="NAME", help=f"model and clip size, one of{told}"
    )
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument(
        "--values", default="clustered", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)}"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on each number")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = fitting(shape_named(chosen.shape), device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[chosen.dtype]
    results = []
    with torch.inference_mode():
        for result in run_benchmark(shape, device, dtype, chosen.values, chosen.seconds):
            print(f"... {result.name}", flush=True)
            results.append(result)
    print("\n".join(table(shape, results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
