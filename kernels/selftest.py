"""Does a kernel compute attention on this very card? Small calls against PyTorch's attention in float64.

A build that is fine elsewhere can be wrong on one card, driver or compiler: noise on a whole model is how
users learn of it. So a kernel is tried where it will run, in the shapes that break kernels: tails, unequal
lengths, masked keys that hold NaN, long sums, tile means, and rows that lie past 2^31 elements.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from .config import VCConfig
from .dispatch import key_list, on_device
from .operands import AttentionProblem
from .registry import KernelSpec, load_grouping, match
from .testing import ERROR_LIMITS, exact_attention, sample_qkv

ROWS = 128  # the error is that of the worst block of so many query rows: one wrong block is seen
CLUSTERS = 128  # as the node: then the test builds what the node runs
LSE_LIMIT = 0.05  # natural log; E4M3 scores come out of a 14-bit accumulator on Hopper
WIDE_STEP, WIDE_ROWS = 2**23, 270  # elements between rows: rows from 256 on lie past 2^31
WIDE_BYTES = 5 * 10**9  # free memory that the wide case needs: a buffer of 4.6 GB, and its call


@dataclass(frozen=True)
class Case:
    """One call: how q, k and v are made, and what is asked of the kernel."""

    name: str
    shape: tuple[int, int, int, int]  # B, H, Lq, D
    keys: int
    kind: str = "gauss"
    means: bool = True  # tile means, in a grouped order
    dtype: torch.dtype = torch.bfloat16
    expcast: str = "auto"
    masked: int = 0  # keys that do not exist, and hold NaN
    offset: float = 0.0  # added to v
    lse: bool = False
    share: float = 1.0  # of the numerics' limit

    @property
    def build(self):
        """Cases that agree in this are run by the same builds of a kernel."""
        return self.means, self.dtype, self.expcast, self.masked > 0, self.lse, self.shape[-1]


CASES = (
    Case("plain", (1, 2, 600, 128), 1000, means=False),
    # half the limit: the reference has a third of it here, a missing tile mean costs 0.3
    Case("means", (1, 2, 600, 128), 1000, "clustered", share=0.5),
    Case("outliers", (1, 2, 130, 128), 1000, "outlier_tokens"),
    Case("one key", (1, 1, 1, 128), 1),
    Case("tail of one", (2, 1, 1, 128), 129, "clustered"),
    Case("short tails", (1, 3, 65, 128), 127, "clustered", means=False),
    Case("whole tiles", (1, 1, 128, 128), 256, "clustered"),
    # what the node asks for least often shares one case: every combination would be a build of its own
    Case("masked keys", (2, 2, 193, 128), 777, "clustered", masked=300, lse=True),
    Case("long sums", (1, 1, 64, 128), 66_000, means=False, offset=0.5),
    Case("fp16", (1, 2, 257, 128), 383, "clustered", dtype=torch.float16),
    Case("expcast on", (1, 2, 257, 128), 383, "clustered", expcast="on"),
    Case("expcast off", (1, 2, 257, 128), 383, "clustered", expcast="off"),
    Case("head dim 64", (1, 2, 200, 64), 500, "clustered"),
)


@dataclass(frozen=True)
class Check:
    """What one case gave. error: relative L2 of the worst 128 rows, inf if something is not finite."""

    name: str
    error: float = 0.0
    limit: float = 0.0
    note: str = ""  # why it was not run

    @property
    def passed(self) -> bool:
        return bool(self.note) or self.error <= self.limit

    def __str__(self):
        if self.note:
            return f"{self.name}: not tested, {self.note}"
        return f"{self.name}: error {self.error:.4f}, limit {self.limit:g}"


def self_test(
    spec: KernelSpec,
    device: torch.device | str,
    cases: tuple[Case, ...] = CASES,
    advance: Callable[[], None] = lambda: None,
    threads: int = 1,
) -> list[Check]:
    """Every case that the kernel takes, then the wide one; advance() is called after each.

    threads: how many cases may run at once. Only the first case of every build does, since all that takes
    long is compiling. What the kernel raises (build errors, out of memory) goes to the caller, with nothing
    left running.
    """
    device = torch.device(device)

    def checks_of(case):
        with torch.no_grad(), on_device(device):  # both hold for one thread
            return list(run_case(spec, case, device))

    found = {}
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            firsts = {case.build: case for case in reversed(cases)}.values()
            running = {pool.submit(checks_of, case): case for case in firsts}
            try:
                for done in as_completed(running):
                    found[running[done]] = done.result()
                    advance()
            finally:
                for one in running:
                    one.cancel()
    for case in cases:
        if case not in found:
            found[case] = checks_of(case)
            advance()
    with torch.no_grad(), on_device(device):
        wide = run_wide(spec, device)
    advance()
    return [*(check for case in cases for check in found[case]), wide]


def steps_of(cases: tuple[Case, ...] = CASES) -> int:
    """How often self_test calls advance."""
    return len(cases) + 1


def refusal(checks: list[Check]) -> str:
    """Which checks failed, as a sentence; "" if none did."""
    return "; ".join(str(check) for check in checks if not check.passed)


def run_case(spec: KernelSpec, case: Case, device: torch.device) -> Iterator[Check]:
    """The check of a case (two with a log-sum-exp); none if the kernel does not compute such calls."""
    q, k, v = sample_qkv(case.kind, case.shape, case.keys, case.dtype, device)
    v += case.offset
    config = config_of(spec, case)
    choice = config and match(spec, AttentionProblem.of(q, k, v, config))
    if not choice or choice.kernel is None:
        return
    key_mask = None
    if case.masked:
        key_mask = torch.ones(case.shape[0], case.keys, dtype=torch.bool, device=device)
        key_mask[:, 5 : 5 + case.masked] = False
    expected, expected_lse = exact_attention(q, k, v, key_mask=key_mask)
    if key_mask is not None:
        for x in (k, v):
            x.masked_fill_(~key_mask[:, None, :, None], math.nan)
    out, lse = call(spec, choice.recipe, q, k, v, key_mask, case.means, case.lse)
    yield Check(case.name, worst_error(out, expected), case.share * ERROR_LIMITS[choice.recipe.numerics])
    if case.lse:
        worst = float((lse.double() - expected_lse).abs().mean())
        limit = LSE_LIMIT * (4 if choice.recipe.numerics == "nvfp4" else 1)
        yield Check(f"{case.name}, log-sum-exp", worst if math.isfinite(worst) else math.inf, limit)


def config_of(spec: KernelSpec, case: Case) -> VCConfig | None:
    """The config of a case for a kernel; None if the case asks for what its numerics have not."""
    if spec.numerics == ("nvfp4",):
        config = VCConfig("4-bit", clusters=CLUSTERS)
    else:
        config = VCConfig(clusters=CLUSTERS)
    if case.expcast != "auto":
        if not any(numerics.endswith("fp8") for numerics in spec.numerics):
            return None
        config = replace(config, expcast=case.expcast, value_format="fp8")
    return replace(config, demean=case.means)


def call(spec, recipe, q, k, v, key_mask=None, grouped=False, want_lse=False):
    """(out, lse) of one call through the stages of spec, in memory that was full of NaN.

    Raises ArithmeticError if the grouping is no permutation: everything after it would be wrong.
    """
    poison_free_memory(q.device)
    order = None
    if grouped:
        order = load_grouping(v, CLUSTERS)(v, CLUSTERS, None, key_mask).order
        listed = order.long().sort(-1).values
        if not torch.equal(listed, torch.arange(v.shape[2], device=v.device).expand_as(listed)):
            raise ArithmeticError("the grouping kernel gave no permutation of the tokens")
    order, key_count = key_list(order, key_mask, q.shape[1])
    stages = spec.load()
    scale = q.shape[-1] ** -0.5
    operands = stages.prepare(
        q, k, v, recipe, order=order, key_count=key_count, softmax_scale=scale, want_lse=want_lse
    )
    return stages.attend(operands)


def worst_error(out, expected) -> float:
    """Relative L2 of the worst block of 128 query rows of a head; inf if out is not finite."""
    if out.shape != expected.shape or not bool(out.isfinite().all()):
        return math.inf
    difference = out.double() - expected
    return max(
        float((d.norm(dim=(-2, -1)) / e.norm(dim=(-2, -1)).clamp_min(1e-30)).max())
        for d, e in zip(difference.split(ROWS, 2), expected.split(ROWS, 2), strict=True)
    )


def run_wide(spec: KernelSpec, device: torch.device, step: int | None = None) -> Check:
    """Views whose last rows lie past 2^31 elements, as those of a fused QKV of a long clip do.

    step: elements between two rows; given only where the way, not the distance, is tested.
    """
    name = "rows past 2^31"
    if step is None:
        step = WIDE_STEP
        if device.type != "cuda":
            return Check(name, note="it needs a GPU")
        free, _ = torch.cuda.mem_get_info(device)
        if free < WIDE_BYTES:
            return Check(name, note=f"it needs 5 GB of free GPU memory, {free / 1e9:.1f} GB are free")
    made = sample_qkv("clustered", (1, 1, WIDE_ROWS, 128), dtype=torch.bfloat16, device=device)
    config = config_of(spec, Case(name, (1, 1, WIDE_ROWS, 128), WIDE_ROWS))
    choice = match(spec, AttentionProblem.of(*made, config))
    if choice.kernel is None:
        return Check(name, note=choice.reason)
    try:
        buffer = torch.empty(step * WIDE_ROWS, dtype=torch.bfloat16, device=device)
    except torch.OutOfMemoryError:
        return Check(name, note="it needs 5 GB of free GPU memory")
    strides = (step * WIDE_ROWS, 128, step, 1)
    views = [buffer.as_strided(x.shape, strides, 128 * i) for i, x in enumerate(made)]
    for view, x in zip(views, made, strict=True):
        view.copy_(x)
    out, _ = call(spec, choice.recipe, *views, grouped=True)
    error = worst_error(out, exact_attention(*made)[0])
    del buffer, views
    if device.type == "cuda":
        torch.cuda.empty_cache()  # nobody else has a use for one block of 4.6 GB
    return Check(name, error, ERROR_LIMITS[choice.recipe.numerics])


def poison_free_memory(device: torch.device) -> None:
    """What a kernel forgets to write is then NaN, not the zeros of fresh memory. CUDA's allocator only."""
    if device.type != "cuda":
        return
    # small tensors are cut from blocks of 2 MB, others from larger ones: fill some of either
    sizes = [2**17] * 32 + [2**22] * 8
    held = [torch.full((size,), math.nan, device=device) for size in sizes]
    del held
