"""One run, step by step and block by block: what ran, how long it took, what the tile means removed."""

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from ..kernels.formats import TILE

SAMPLED_HEADS, SAMPLED_TILES = 4, 64  # chosen: enough for a percentage, a few MiB at any length
PROBED_HEADS, PROBED_ROWS = 2, 32  # chosen: tells blocks apart, costs about a thousandth of the call
USUAL = "usual attention"  # video self-attention that this pack left to ComfyUI
GROUPING = "grouping"  # part of the kernels' time


def spaced(count: int, wanted: int) -> slice:
    """At most about wanted of count things, evenly spaced."""
    return slice(None, None, max(1, count // wanted))


def energy_shares(v: torch.Tensor, order: torch.Tensor) -> torch.Tensor | None:
    """Share of the value energy that tile means remove: fp32 [2], in token order and in the given order.

    v: [B, H, Lk, D]; order: int32 [B, H, Lk]. Estimated from a few heads and tiles of the first row, averaged
    over tiles (Eq. 5). None below one tile. No host synchronisation.
    """
    tiles = v.shape[2] // TILE
    if not tiles:
        return None
    heads = spaced(v.shape[1], SAMPLED_HEADS)
    values = v[0, heads]
    grouped = order[0, heads, : tiles * TILE].long()
    plain = torch.arange(tiles * TILE, device=v.device).expand_as(grouped)
    shares = []
    for listed in (plain, grouped):
        sampled = listed.unflatten(1, (tiles, TILE))[:, spaced(tiles, SAMPLED_TILES)].flatten(1)
        rows = values.gather(1, sampled[..., None].expand(-1, -1, v.shape[3])).float()
        rows = rows.unflatten(1, (-1, TILE))
        removed = TILE * rows.mean(2).square().sum(-1)
        shares.append((removed / rows.square().sum((-1, -2)).clamp_min(1e-30)).mean())
    return torch.stack(shares)


class ErrorProbe:
    """A few query rows of the exact output of one call, in the call's dtype, to compare the kernel's with."""

    def __init__(self, q, k, v, scale: float | None):
        """q: [B, H, Lq, D]; k, v: [B, H, Lk, D]; only the first batch row is looked at."""
        self._rows = (slice(0, 1), spaced(q.shape[1], PROBED_HEADS), spaced(q.shape[2], PROBED_ROWS))
        first = self._rows[:2]
        attention = torch.nn.functional.scaled_dot_product_attention
        self._exact = attention(q[self._rows], k[first], v[first], scale=scale).float()

    def relative_l2(self, out: torch.Tensor) -> torch.Tensor:
        """Error of out [B, H, Lq, D] in the probed rows: a 0-dim tensor, no host synchronisation."""
        return (out[self._rows].float() - self._exact).norm() / self._exact.norm().clamp_min(1e-30)


class RunRecord:
    """Plain numbers once close() was called; until then it holds events and small tensors of the device."""

    def __init__(self):
        self.cells: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)  # (step, block) -> what ran
        self.milliseconds: dict[str, float] = defaultdict(float)  # kernel, USUAL or GROUPING -> time
        self.timed_calls: Counter[str] = Counter()
        self.energy: dict[tuple[int, int], tuple[float, float]] = {}  # (step, block) -> token order, grouped
        self.errors: dict[tuple[int, str, bool], float] = {}  # (block, kernel, grouped) -> relative L2
        self.seconds = 0.0  # of the whole sampler call
        self.peak_bytes = 0  # most that PyTorch had allocated on the run's GPU
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._shares: dict[tuple[int, int], torch.Tensor] = {}
        self._errors: dict[tuple[int, str, bool], torch.Tensor | None] = {}
        self._begin = time.perf_counter()
        self._lock = threading.Lock()

    def add(self, step: int, block: int, what: str) -> None:
        with self._lock:
            self.cells[step, block][what] += 1

    def steps_of(self, numerics: str) -> set[int]:
        """Steps in which a kernel computed these numerics."""
        with self._lock:
            return {step for (step, _), ran in self.cells.items() for what in ran if numerics in what.split()}

    @contextlib.contextmanager
    def timed(self, what: str, device: torch.device) -> Iterator[None]:
        """Measure what happens inside, on the device's clock; nothing waits for it."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._add_time(what, 1e3 * (time.perf_counter() - begin))
            return
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = torch.cuda.current_stream(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        yield
        end.record(stream)
        with self._lock:
            self._events.append((what, start, end))

    def add_energy(self, step: int, block: int, v: torch.Tensor, order: torch.Tensor) -> None:
        shares = energy_shares(v, order)
        if shares is not None:
            with self._lock:
                self._shares[step, block] = shares

    def wants_error(self, block: int, what: str, grouped: bool) -> bool:
        """Whether this is the run's first such call: one measured call per block is enough."""
        with self._lock:
            first = (block, what, grouped) not in self._errors
            self._errors.setdefault((block, what, grouped), None)
            return first

    def add_error(self, block: int, what: str, grouped: bool, error: torch.Tensor) -> None:
        with self._lock:
            self._errors[block, what, grouped] = error

    def close(self, device: torch.device | None = None) -> None:
        """Read what the device measured. This waits for it, so call it when sampling is over."""
        for what, start, end in self._events:
            end.synchronize()
            self._add_time(what, start.elapsed_time(end))
        self.energy = {where: tuple(shares.tolist()) for where, shares in self._shares.items()}
        self.errors = {key: float(error) for key, error in self._errors.items() if error is not None}
        self.seconds = time.perf_counter() - self._begin
        if device is not None and device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(device)
        self.drop()

    def drop(self) -> None:
        """Free what lies on the device, read or not."""
        self._events.clear()
        self._shares.clear()
        self._errors.clear()

    def _add_time(self, what: str, milliseconds: float) -> None:
        with self._lock:
            self.milliseconds[what] += milliseconds
            self.timed_calls[what] += 1

    def block_errors(self) -> list[tuple[int, float]]:
        """(block, largest relative L2 measured in it), worst first."""
        worst: dict[int, float] = {}
        for (block, _, _), error in self.errors.items():
            worst[block] = max(error, worst.get(block, 0.0))
        return sorted(worst.items(), key=lambda item: -item[1])

    def mean_energy(self) -> tuple[float, float] | None:
        """Shares in token order and grouped, averaged over steps and blocks; None if nothing was grouped."""
        if not self.energy:
            return None
        plain, grouped = zip(*self.energy.values(), strict=True)
        return sum(plain) / len(plain), sum(grouped) / len(grouped)
