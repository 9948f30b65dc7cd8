"""Stage "length": error of every kernel that runs here, in sampled rows, from 1k to 400k keys.

Beside the kernels the reference of every recipe: an error that both have is the recipe's, not accumulation.
"""

from dataclasses import replace

import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.benchmark import config_for
from comfyui_vc_attention.kernels.config import resolve_demean
from comfyui_vc_attention.kernels.dispatch import plain
from comfyui_vc_attention.kernels.operands import AttentionProblem
from comfyui_vc_attention.kernels.registry import KERNELS
from comfyui_vc_attention.kernels.testing import relative_l2

from .fidelity import log
from .measures import exact_rows
from .methods import RECIPES
from .stages import attend_rows
from .tables import Table, named_failure

LENGTHS = (1024, 4096, 16_384, 65_536, 131_072, 262_144, 299_520, 299_521, 314_437, 400_000)
# tokens, heads: one head, and as many as real models have, by one kernel of each numerics
LARGE = ((400_000, 1), (75_600, 40), (113_406, 56), (299_520, 56))
FAST = ("cuda_int8_fp8_sm90", "cuda_int8_int8_sm90", "cuda_fp8_fp8_sm90")
REFERENCE_LENGTHS = (1024, 16_384, 131_072, 400_000)
FUSED_FROM = 262_144  # shorter lengths are tested contiguous only, beside one short one
ROWS = 128  # at the start, in the middle and at the end
CPU_LENGTHS = (512, 1000)


def inputs(tokens, heads, layout, device, seed=0):
    """q, k, v [1, H, L, 128] bf16, N(0, 1) with an offset on K; fused: views of one [1, L, 3, H, 128]."""
    generator = torch.Generator(device).manual_seed(seed)
    whole = torch.empty(1, tokens, 3, heads, 128, device=device, dtype=torch.bfloat16)
    whole.normal_(generator=generator)
    whole[:, :, 1] += torch.randn(heads, 128, device=device, generator=generator).bfloat16()
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    return (q, k, v) if layout == "fused" else tuple(t.contiguous() for t in (q, k, v))


def sampled(length):
    """Row numbers: the first, the middle and the last ROWS."""
    starts = {0, max(0, length // 2 - ROWS // 2), max(0, length - ROWS)}
    return sorted({row for start in starts for row in range(start, min(length, start + ROWS))})


class Expected:
    """Exact output in the sampled rows, or in these, of the first and the last head."""

    def __init__(self, q, k, v, rows=None):
        self.rows = torch.tensor(rows or sampled(q.shape[2]), device=q.device)
        self.heads = sorted({0, q.shape[1] - 1})
        self.out = exact_rows(q[:, self.heads][:, :, self.rows], k[:, self.heads], v[:, self.heads])

    def error(self, out):
        return relative_l2(out[:, self.heads][:, :, self.rows], self.out)


def kernels_for(q, k, v):
    """(spec, config) of every kernel that can run this call."""
    for spec in KERNELS:
        config = config_for(spec)
        slow = q.is_cuda and spec.name == "reference"
        if not slow and spec.why_not(AttentionProblem.of(q, k, v, config)) is None:
            yield spec, config


def measure_references(table, tokens, heads, device):
    """Add the rows of every recipe's reference, in whole blocks of queries: codes are shared inside them."""
    q, k, v = inputs(tokens, heads, "contiguous", device)
    rows = [row for first in sampled(tokens // ROWS * ROWS)[::ROWS] for row in block_at(first)]
    expected, order = Expected(q, k, v, rows), group_tokens(v, 128).order
    for name, recipe in RECIPES.items():
        later = replace(recipe, demean=resolve_demean(None, recipe.value_format))
        with named_failure(table, f"reference {name}, {tokens:,} keys"):
            outs = [attend_rows(q, k, v, *how, expected.rows) for how in ((later, None), (recipe, order))]
            errors = [relative_l2(out[:, expected.heads], expected.out) for out in outs]
            table.rows.append([f"reference {name}", tokens, heads, "contiguous", *errors])
    log(f"{tokens:,} tokens, references")


def block_at(row):
    """Rows of the whole block of ROWS that row is in."""
    first = row // ROWS * ROWS
    return range(first, first + ROWS)


def measure(table, tokens, heads, layout, device, only=None):
    """Add the rows of one size: each kernel as outside the grouping window, and grouped with means."""
    q, k, v = inputs(tokens, heads, layout, device)
    expected, grouping = Expected(q, k, v), group_tokens(v, 128)
    for spec, config in kernels_for(q, k, v):
        if only and spec.name not in only:
            continue
        with named_failure(table, f"{spec.name}, {tokens:,} keys, {heads} heads, {layout}"):
            numbers = [
                expected.error(vc_attention(q, k, v, how, grouping=order, kernel=spec.name))
                for how, order in ((plain(config), None), (config, grouping))
            ]
            table.rows.append([spec.name, tokens, heads, layout, *numbers])
    log(f"{tokens:,} tokens, {heads} heads, {layout}")


def run(device, lengths=None, heads=2, save=lambda tables, data: None):
    """(tables, data) of this stage. A size that does not fit the memory is named in the notes.

    save: given both after each size.
    """
    cuda = device.type == "cuda"
    lengths = lengths or (LENGTHS if cuda else CPU_LENGTHS)
    table = Table(
        "Length",
        "Does the error grow with the number of keys, and do long or odd lengths and views of one fused "
        f"projection work: relative L2 in {ROWS} rows at the start, the middle and the end, bf16.",
        ["kernel", "keys", "heads", "layout", "error", "error grouped"],
        notes=["Error: as outside the grouping window. Each length is one draw of the tensors."],
    )
    jobs = [(tokens, heads, "contiguous", None) for tokens in lengths]
    jobs += [(t, heads, "fused", None) for t in lengths if t >= FUSED_FROM or t == lengths[0]]
    jobs += [(tokens, many, "fused", FAST) for tokens, many in LARGE] if cuda else []
    data = {"config": str(VCConfig())}
    for tokens, many, layout, only in jobs:
        with named_failure(table, f"{tokens:,} keys, {many} heads, {layout}"):
            measure(table, tokens, many, layout, device, only)
        save([table], data)
    for tokens in REFERENCE_LENGTHS if cuda else lengths:
        with named_failure(table, f"references, {tokens:,} keys"):
            measure_references(table, tokens, heads, device)
        save([table], data)
    longest = max((row[1] for row in table.rows), default=0)
    table.notes.append(f"Longest measured: {longest:,} keys.")
    return [table], data | {"longest": longest}
