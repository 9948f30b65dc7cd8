"""The tensors that the evidence measures on: made ones of several kinds, and captures of the sample model."""

from dataclasses import dataclass, field, replace

import torch
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.kernels.testing import sample_qkv

from . import orders
from .structured import structured_qkv

DRIFT = 0.1  # energy share of the noise that changes between the steps of a warm start (chosen)
MADE_KINDS = (
    *("gauss", "structured", "structured, attention by content"),
    *("structured, outlier tokens", "structured, K channels x10"),
    *("structured, K channels x50, small Q", "structured, logits x4"),
)
QUERY_BLOCK = 128  # rows are taken in such blocks: published recipes share scales and means in them


@dataclass
class Sample:
    """One attention call [1, H, L, D]. grid: tokens in time, rows, columns; earlier: v of a step before."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grid: tuple[int, int, int]
    earlier: torch.Tensor | None = None
    _orders: dict = field(default_factory=dict, init=False, repr=False)

    def order(self, name):
        """A token order by name; None for sequence."""
        if name not in self._orders:
            self._orders[name] = self._make_order(name)
        return self._orders[name]

    def _make_order(self, name):
        if name == "sequence":
            return None
        if name == "cube":
            return orders.static_cube(self.grid, self.v.shape[1], self.v.device)
        if name == "grouped":
            return orders.kmeans(self.v, self.clusters)
        if name == "uncapped":
            return orders.kmeans(self.v, VCConfig().clusters)
        if name == "warm":
            if self.earlier is None:
                raise ValueError(f"{self.name} has no earlier values to start from")
            return orders.kmeans_warm(self.v, self.earlier, self.clusters)
        if name == "balanced":
            return orders.balanced_kmeans(self.v)
        raise ValueError(f"order must be sequence, cube, grouped, uncapped, warm or balanced, got {name!r}")

    @property
    def clusters(self):
        """As many as the node makes of so many tokens."""
        return VCConfig().clusters_for(self.v.shape[2])

    def rows(self, count):
        """q in blocks of 128 consecutive rows spread over the sequence: (q [1, H, M, D], row numbers)."""
        length = self.q.shape[2]
        if count >= length:
            return self.q, torch.arange(length, device=self.q.device)
        blocks = max(1, count // QUERY_BLOCK)
        last = length // QUERY_BLOCK - 1
        first = [round(i * last / max(1, blocks - 1)) * QUERY_BLOCK for i in range(blocks)]
        index = torch.cat([torch.arange(f, f + QUERY_BLOCK) for f in first]).to(self.q.device)
        return self.q[:, :, index], index


def made_sample(kind, heads, grid, device="cpu", seed=0, dtype=torch.bfloat16):
    """A Sample of one of MADE_KINDS.

    gauss: N(0, 1) with a constant offset per K channel. structured: structured.py, attention to the
    surroundings; attention by content: also to the same contents. outlier tokens: 1% of the tokens spike
    tenfold in 5% of their channels. K channels: 4 channels of K x10 where Q is x0.3, or x50 where Q is x0.02.
    logits x4: Q four times as large, so that few keys get all the weight.
    Drawn on the CPU: the same tensors on every machine, those of the calibration among them.
    """
    made = _made(kind, heads, grid, seed, dtype)
    return replace(made, **{name: getattr(made, name).to(device) for name in ("q", "k", "v")},
                   earlier=None if made.earlier is None else made.earlier.to(device))  # fmt: skip


def _made(kind, heads, grid, seed, dtype):
    tokens = grid[0] * grid[1] * grid[2]
    if kind == "gauss":
        q, k, v = sample_qkv("gauss", (1, heads, tokens, 128), seed=seed)
        k += torch.randn(1, heads, 1, 128, generator=torch.Generator().manual_seed(seed + 1))
        made = [t.to(dtype) for t in (q, k, v)]
        return Sample(kind, *made, grid)
    if kind not in MADE_KINDS:
        raise ValueError(f"kind must be one of {', '.join(MADE_KINDS)}, got {kind!r}")
    by_content = "by content" in kind
    q, k, v = structured_qkv(heads, grid, seed=seed, by_content=by_content)
    earlier = structured_qkv(heads, grid, seed=seed, drift=DRIFT)[2]
    if "outlier tokens" in kind:
        generator = torch.Generator().manual_seed(seed + 2)
        spread = v.std()
        token = torch.rand(1, heads, tokens, 1, generator=generator) < 0.01
        channel = torch.rand(v.shape, generator=generator) < 0.05
        spikes = token * channel * torch.randn(v.shape, generator=generator) * 10 * spread
        v, earlier = v + spikes, earlier + spikes
    if "K channels" in kind:
        gain, share = (50, 0.02) if "x50" in kind else (10, 0.3)
        k[..., :4] *= gain
        q[..., :4] *= share
    if "logits" in kind:
        q *= 4
    made = [t.to(dtype) for t in (q, k, v)]
    return Sample(kind, *made, grid, earlier.to(dtype))
