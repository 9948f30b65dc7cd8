"""Stage "speed": kernels and whole calls over length and heads beside cuDNN bf16; grouping; the preparation.

Needs a GPU: timing on a CPU says nothing about the kernels, so there the tables are empty and say so.
"""

import torch
from comfyui_vc_attention.kernels import group_tokens
from comfyui_vc_attention.kernels.benchmark import config_for
from comfyui_vc_attention.kernels.benchmark_peers import PEERS
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.dispatch import attend_call, plain, prepare_call
from comfyui_vc_attention.kernels.prepare import reference as eager
from comfyui_vc_attention.kernels.registry import kernel_named

from .captured import captured_long
from .fidelity import log
from .length import kernels_for
from .structured import structured_qkv
from .tables import Table

LENGTHS, HEADS = (4096, 8192, 16_384, 32_768, 75_600), 40
HEAD_COUNTS, HEADS_LENGTH = (12, 16, 24, 32, 56), 32_768
LONGEST = (150_000, 12)
PAPER_SHAPES = {  # (tokens in time, rows, columns), heads; paper, appendix A
    "Wan2.2-A14B 720p": ((21, 45, 80), 40),
    "LongCat-Video 480p": ((24, 30, 52), 32),
    "HunyuanVideo-1.5 720p": ((31, 45, 80), 16),
    "MiniMax-H3 1344x768": ((70, 25, 42), 56),
}
PEAK_8_BIT = {(9, 0): 1979.0}  # TFLOP/s, dense; the card's data sheet
BUDGET_MS, ROUNDS = 2500.0, (3, 10)  # time for one call of a size, and its fewest and most repetitions
COLUMNS = ["kernel", "tokens", "heads", "tensors", "kernel ms", "TFLOP/s", "of peak", "kernel over cuDNN",
           "call ms", "call over cuDNN", "call grouped ms", "peak MiB", "extra over q, k, v"]  # fmt: skip


def normal_qkv(tokens, heads, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator)

    q, k, v = (normal(1, heads, tokens, 128) for _ in range(3))
    return q, k + normal(1, heads, 1, 128), v


def structured_bf16(grid, heads, device):
    """Structured tensors head by head, so that float32 copies of all heads are never there at once."""
    parts = [structured_qkv(1, grid, device=device, seed=head) for head in range(heads)]
    return tuple(torch.cat([p[i].bfloat16() for p in parts], 1) for i in range(3))


def rounds_for(tokens, heads):
    """Repetitions that fit the budget at about 500 TFLOP/s."""
    ms = 4 * heads * tokens**2 * 128 / 500e9
    return int(min(ROUNDS[1], max(ROUNDS[0], BUDGET_MS / 8 / ms)))


def time_shape(q, k, v, tensors, only=None):
    """Rows of the speed table: every kernel that can run, and the peers, against cuDNN in the same run."""
    from bench.timing import interleaved_ms, peak_extra_bytes

    tokens, heads = q.shape[2], q.shape[1]
    flops = 4 * heads * tokens**2 * 128
    rounds = rounds_for(tokens, heads)
    peak = PEAK_8_BIT.get(torch.cuda.get_device_capability())
    peers = {p.name: p for p in PEERS if p.why_not(q) is None}
    cudnn = peers.pop("PyTorch cuDNN")
    rows, grouping = [], group_tokens(v, 128)

    def row(name, ms, kernel, call, grouped, of_peak, extra):
        base = ms["cudnn"]
        rate = flops / ms[kernel] / 1e9 if kernel else None
        rows.append([
            name, tokens, heads, tensors, ms.get(kernel), rate, rate / of_peak if rate and of_peak else None,
            base / ms[kernel] if kernel else None, ms[call], base / ms[call], ms.get(grouped), extra // 2**20,
            extra / (3 * q.numel() * q.element_size()),
        ])  # fmt: skip

    first = interleaved_ms({"cudnn": lambda: cudnn.attend(q, k, v)}, rounds=rounds)
    row("cuDNN bf16", first, "cudnn", "cudnn", None, None, peak_extra_bytes(lambda: cudnn.attend(q, k, v)))
    for spec, config in kernels_for(q, k, v):
        if spec.name == "reference" or (only and not spec.name.startswith(only)):
            continue
        bare = plain(config)
        prepared = prepare_call(q, k, v, bare, kernel=spec.name)

        def call(how=bare, order=None, name=spec.name):
            return attend_call(prepare_call(q, k, v, how, grouping=order, kernel=name))[0]

        calls = {
            "cudnn": lambda: cudnn.attend(q, k, v),
            "kernel": lambda prepared=prepared: attend_call(prepared),
            "call": call,
            "grouped": lambda call=call, config=config: call(config, grouping),
        }
        ms = interleaved_ms(calls, rounds=rounds, warmup=1)
        prepared = calls = None
        row(spec.name, ms, "kernel", "call", "grouped", peak, peak_extra_bytes(call))
    for name, peer in peers.items():
        if name == "PyTorch":  # its default is FlashAttention-2 or cuDNN, both slower or measured above
            continue
        ms = interleaved_ms(
            {"cudnn": lambda: cudnn.attend(q, k, v), "call": lambda peer=peer: peer.attend(q, k, v)},
            rounds=rounds, warmup=1,
        )  # fmt: skip
        row(name, ms, None, "call", None, None, peak_extra_bytes(lambda peer=peer: peer.attend(q, k, v)))
    log(f"{tokens:,} tokens, {heads} heads, {tensors}: {len(rows)} rows, {rounds} rounds")
    return rows


def grouping_table(device, tokens=75_600, heads=40):
    """Clusters and Lloyd steps in time, as a share of one attention call (Table 1's overhead column)."""
    from bench.timing import interleaved_ms

    q, k, v = normal_qkv(tokens, heads, device)
    prepared = prepare_call(q, k, v, config_for(next(kernels_for(q, k, v))[0]))
    attend = interleaved_ms({"attend": lambda: attend_call(prepared)}, rounds=4)["attend"]
    table = Table(
        "Grouping time (Table 1, overhead)",
        f"What making an order costs at {tokens:,} tokens and {heads} heads, alone and over one attention "
        f"kernel ({attend:.1f} ms, {prepared.kernel.name}); the paper: cold 16.5%, warm 9.5% of a call.",
        ["clusters", "cold ms", "cold share", "warm ms", "warm share"],
    )
    for clusters in (16, 32, 64, 128, 256):
        before = group_tokens(v, clusters)
        ms = interleaved_ms(
            {"cold": lambda c=clusters: group_tokens(v, c),
             "warm": lambda c=clusters, b=before: group_tokens(v, c, b)}, rounds=5,
        )  # fmt: skip
        table.rows.append([clusters, ms["cold"], ms["cold"] / attend, ms["warm"], ms["warm"] / attend])
    return table


def ladder_table(device, tokens=75_600, heads=40):
    """The preparation with more and more of it fused, the rest in PyTorch on bf16 tensors (Figure 7)."""
    from bench.timing import interleaved_ms

    q, k, v = normal_qkv(tokens, heads, device)
    angle = torch.rand(tokens, 64, device=device) * 6.28
    rope = (angle.cos(), angle.sin(), "interleaved")
    order = group_tokens(v, 128).order
    scale = 128**-0.5
    full, bare = Recipe("int8_fp8", expcast=True), Recipe("int8_fp8", True, demean=False, smooth_k=False)
    fused = kernel_named("triton_int8_fp8").load().prepare

    def turned():
        return eager.apply_rope(q, *rope).to(q.dtype), eager.apply_rope(k, *rope).to(k.dtype)

    def smoothed():
        a, b = turned()
        b = b.gather(2, order.long()[..., None].expand(-1, -1, -1, 128))
        c = v.gather(2, order.long()[..., None].expand(-1, -1, -1, 128))
        b = b - b.mean(2, keepdim=True)
        return a, b, eager.residuals(c, eager.tile_means(c))

    rungs = {
        "unfused: each step in PyTorch": lambda: eager.prepare(
            *turned(), v, full, order=order, softmax_scale=scale
        ),
        "+ quantizers and rotation": lambda: fused(*smoothed(), bare, softmax_scale=scale),
        "+ means and gather": lambda: fused(*turned(), v, full, order=order, softmax_scale=scale),
        "+ rotary": lambda: fused(q, k, v, full, order=order, softmax_scale=scale, rope=rope),
    }
    hand = kernel_named("cuda_int8_fp8_sm90")
    if any(spec.name == hand.name for spec, _ in kernels_for(q, k, v)):
        rungs["+ written by hand"] = lambda: hand.load().prepare(
            q, k, v, full, order=order, softmax_scale=scale, rope=rope
        )
    table = Table(
        "Preparation ladder (Figure 7)",
        f"What fusing the preparation buys at {tokens:,} tokens and {heads} heads; the paper's steps: 1.59, "
        "1.43, 1.94 and 1.97 times.",
        ["rung", "ms", "over the rung before", "over the first"],
    )
    ms = interleaved_ms(rungs, rounds=3, warmup=1)
    last = first = next(iter(ms.values()))
    for name, value in ms.items():
        table.rows.append([name, value, last / value, first / value])
        last = value
    return table


def run(device, save=lambda tables, data: None):
    """(tables, data) of this stage. save: given both after each shape."""
    by_length = Table("Speed over length", f"Milliseconds and ratios at {HEADS} heads, N(0, 1).", COLUMNS)
    by_heads = Table(
        "Speed over heads", f"The same at {HEADS_LENGTH:,} tokens and other head counts.", COLUMNS
    )
    shapes = Table(
        "The paper's shapes",
        "Speed at the shapes of the paper's Table 2, on N(0, 1), structured and captured tensors: a power "
        "limit makes speed depend on the numbers.",
        COLUMNS,
        notes=[
            "Captured: the sample model run on a clip of that size; its heads of several blocks and steps."
        ],
    )
    tables = [by_length, by_heads, shapes]
    if device.type != "cuda":
        by_length.notes.append("Not measured: needs a GPU.")
        return tables[:1], {}

    def measure(table, q, k, v, tensors, only=None):
        table.rows += time_shape(q, k, v, tensors, only)
        save(tables, {})

    for tokens in LENGTHS:
        measure(by_length, *normal_qkv(tokens, HEADS, device), "N(0, 1)")
    tables += [grouping_table(device), ladder_table(device)]
    log("grouping and preparation")
    measure(by_length, *normal_qkv(*LONGEST, device), "N(0, 1)", "cuda")
    for heads in HEAD_COUNTS:
        measure(by_heads, *normal_qkv(HEADS_LENGTH, heads, device), "N(0, 1)", "cuda")
    for name, (grid, heads) in PAPER_SHAPES.items():
        tokens = grid[0] * grid[1] * grid[2]
        measure(shapes, *normal_qkv(tokens, heads, device), f"{name}, N(0, 1)", "cuda")
    grid, heads = PAPER_SHAPES["Wan2.2-A14B 720p"]
    measure(shapes, *structured_bf16(grid, heads, device), "Wan2.2-A14B 720p, structured", "cuda")
    measure(shapes, *captured_long(grid, heads, device=device), "Wan2.2-A14B 720p, captured", "cuda")
    return tables, {}
