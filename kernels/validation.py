"""Try a kernel on a card: build it, test it, time it, and keep the outcome (device_record.py)."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch

from . import triton_builds
from .attend.cuda_build import compile_ahead
from .benchmark import Shape, config_for, make_inputs, median_ms
from .benchmark_peers import PEERS
from .config import VCConfig
from .cuda_builds import builds
from .device_record import FAILED, PASSED, CardRecord, Entry, Speed, known, record_of
from .dispatch import on_device, plain
from .operands import AttentionProblem
from .registry import KERNELS, KernelSpec, choose_kernel, match
from .selftest import CASES, Case, refusal, self_test, steps_of
from .testing import ERROR_LIMITS, relative_l2

UNTESTED = "untested"  # of an entry that is not kept: try again another time
TIMED_TOKENS = (2048, 4096, 8192, 16384, 32768)
TIMED_HEADS = 12  # of Wan 1.3B, the smallest model: more heads favour the quantized kernel
TIMED_SECONDS = 0.05  # for each number, after a first call
TENSORS = 10  # bytes that timing needs, in tensors like q
# what the node's settings can mean to "auto"
NODE_CONFIGS = (
    VCConfig(),
    VCConfig(value_format="int8"),
    VCConfig(expcast="on"),
    VCConfig(expcast="off", value_format="fp8"),
    VCConfig("4-bit"),
)


class ContextLost(RuntimeError):
    """A kernel left the GPU unusable for this process; its entry says so, the process must end."""


def card_record(device: torch.device) -> CardRecord:
    """The record of a device of this machine."""
    if device.type != "cuda":
        return record_of(device.type, None)
    return record_of(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def validate(
    spec: KernelSpec,
    device: torch.device | str,
    advance: Callable[[], None] = lambda: None,
    cases: tuple[Case, ...] = CASES,
    lengths: tuple[int, ...] = TIMED_TOKENS,
    waiting: Callable[[], None] = lambda: None,
) -> Entry:
    """What is known about spec on device afterwards; tried only if nothing was.

    advance() is called steps(cases, lengths) times at most, waiting() after every build, and again and again
    while another process tries the same kernel; what they raise goes to the caller. An entry whose state is
    UNTESTED was not kept: the memory did not suffice. Raises ContextLost after an error that no later call on
    the GPU survives.
    """
    device = torch.device(device)
    record = card_record(device)
    with record.trying(spec.name, waiting) as entry:
        if entry is None:
            entry = _tried(spec, device, record, advance, waiting, cases, lengths)
            if entry.state != UNTESTED:
                record.save(entry)
        else:
            record.remember(entry)  # another process may have written it meanwhile
    return entry


def yet_to_try(problem: AttentionProblem, also: Collection[str] = ()) -> Iterator[KernelSpec]:
    """Untried rows on the card of problem, best first: what the node's auto would take, by any setting.

    A row that fails is followed by the next one that auto would take then: each must be tried before the next
    is asked for. also: names of more rows, of which those are taken that run there.
    """
    asked = set()
    for config in NODE_CONFIGS:
        asked_for = replace(problem, config=config)
        while (spec := choose_kernel(asked_for, untested=True).kernel) and spec.name not in asked:
            if known(problem, spec.name) is None:
                yield spec
            asked.add(spec.name)
    for spec in KERNELS:
        new = (
            spec.name in also and spec.name not in {*asked, "reference"} and known(problem, spec.name) is None
        )
        if new and match(spec, replace(problem, config=config_for(spec))).kernel:
            yield spec


def build_ahead(spec: KernelSpec, device: torch.device, advance: Callable[[], None] = lambda: None) -> None:
    """Compile what the self-test will load, several sources at a time; Triton compiles when it launches."""
    if device.type == "cuda" and torch.version.hip is None:
        found = builds(torch.cuda.get_device_capability(device), spec.name)
        compile_ahead([(build.source, build.arch, build.defines) for build in found], advance)


def steps(cases: tuple[Case, ...] = CASES, lengths: tuple[int, ...] = TIMED_TOKENS) -> int:
    return steps_of(cases) + len(lengths)


def _tried(spec, device, record, advance, waiting, cases, lengths) -> Entry:
    begin, cancelled = time.perf_counter(), []

    def or_cancel(call):
        try:
            call()
        except BaseException as error:
            cancelled.append(error)
            raise

    def advance_or_cancel():
        or_cancel(advance)

    # broad, because every compiler and backend has its own errors; a lost context is raised again
    try:
        build_ahead(spec, device, lambda: or_cancel(waiting))
        built = time.perf_counter()
        threads = triton_builds.threads() if spec.name.startswith("triton") else 1
        checks = self_test(spec, device, cases, advance_or_cancel, threads)
        texts, wrong = [str(check) for check in checks], refusal(checks)
        if wrong:
            return Entry(spec.name, FAILED, f"failed its self-test on this card ({wrong})", texts)
        speeds = time_kernel(spec, device, lengths, advance_or_cancel)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        if error in cancelled:
            raise
        if is_out_of_memory(error):
            return Entry(spec.name, UNTESTED, "not enough free GPU memory to test it")
        entry = Entry(spec.name, FAILED, f"its self-test stopped: {first_line(error)}")
        if is_context_lost(device):
            record.save(entry)
            raise ContextLost(
                f"testing {spec.name} left the GPU unusable for this process. It is off on this card from "
                f"now on; restart to go on without it ({first_line(error)})"
            ) from error
        return entry
    seconds, build_seconds = (round(x - begin, 1) for x in (time.perf_counter(), built))
    return Entry(spec.name, PASSED, "", texts, speeds, least_tokens(speeds), seconds, build_seconds)


def time_kernel(spec, device, lengths, advance, heads: int = TIMED_HEADS) -> list[Speed]:
    """Whole calls beside PyTorch's, shortest first, as far as the memory goes.

    Raises ArithmeticError if an output is off by more than the kernel's numerics allow: the self-test's calls
    are short.
    """
    speeds = []
    for tokens in lengths:
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if free < TENSORS * heads * tokens * 128 * 2:
                break
        try:
            with torch.no_grad(), on_device(device):
                speeds.append(_speed(spec, device, Shape("timing", heads, tokens)))
        except torch.OutOfMemoryError:
            break
        advance()
    return speeds


def _speed(spec, device, shape) -> Speed:
    config = plain(config_for(spec))  # as most steps run
    q, k, v = make_inputs(shape, "gauss", torch.bfloat16, device)
    recipe = match(spec, AttentionProblem.of(q, k, v, config)).recipe
    stages = spec.load()

    def ours():
        return stages.attend(stages.prepare(q, k, v, recipe, softmax_scale=128**-0.5))[0]

    def pytorch():
        return PEERS[0].attend(q, k, v)

    error, limit = relative_l2(ours(), pytorch()), ERROR_LIMITS[recipe.numerics]
    if not error <= limit:
        raise ArithmeticError(f"error {error:.4f} at {shape.tokens:,} tokens, limit {limit:g}")
    kitchen = next(peer for peer in PEERS if peer.name.startswith("comfy-kitchen"))
    return Speed(
        shape.tokens, _median(ours, device), _median(pytorch, device), _peer_ms(kitchen, q, k, v, device)
    )


def least_tokens(speeds: list[Speed]) -> int | None:
    """The shortest timed length from which on we are faster than PyTorch; None if there is none."""
    least = None
    for speed in reversed(speeds):
        if speed.ours >= speed.pytorch:
            break
        least = speed.tokens
    return least


def _median(call, device) -> float:
    call()  # the first one may build
    return round(median_ms(call, device, TIMED_SECONDS), 4)


def _peer_ms(peer, q, k, v, device) -> float | None:
    """None where the peer is not there, or fails: it is none of our business then."""
    try:
        return None if peer.why_not(q) else _median(lambda: peer.attend(q, k, v), device)
    except (RuntimeError, ValueError, ImportError, NotImplementedError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


def is_context_lost(device: torch.device) -> bool:
    """Whether even the simplest work on the GPU fails now."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).item()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False


def first_line(error: BaseException) -> str:
    """What went wrong, on one line: reasons are shown in tables and on nodes."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
