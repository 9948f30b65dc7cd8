"""What the demo measures: time and error of every self-attention call, by layer."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class Meter:
    """Self-attention of one sampling run."""

    seconds: float = 0.0
    errors: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # block -> one per call

    def timed(self, call, *args, **kwargs):
        """call(*args, **kwargs), its time added."""
        synchronize()
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        synchronize()
        self.seconds += time.perf_counter() - begin
        return result

    def compare(self, block: int, out, exact) -> None:
        """Relative L2 error of one call's output."""
        error = (out.double() - exact.double()).norm() / exact.double().norm()
        self.errors[block].append(float(error))

    def error_of(self, block: int) -> float:
        """Mean over the run."""
        return sum(self.errors[block]) / len(self.errors[block])


@dataclass
class Run:
    """One clip and what its attention cost."""

    frames: torch.Tensor  # [T, H, W, 3] in 0..1
    meter: Meter
    taken: int = 0
    declined: dict[str, int] = field(default_factory=dict)


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def exact_attention(q, k, v):
    """softmax(q k^T) v in float32: q, k, v [B, H, L, D]."""
    return torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of pictures in 0..1, in dB."""
    return float(-10 * (a.double() - b.double()).square().mean().log10())
