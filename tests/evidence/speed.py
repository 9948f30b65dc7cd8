"""Stage "speed": kernels and whole calls over length and heads beside cuDNN bf16; grouping; the preparation.

Needs a GPU: timing on a CPU says nothing about the kernels, so there the tables are empty and say so.
"""

import functools
from dataclasses import replace

import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens
from comfyui_vc_attention.kernels.benchmark_peers import PEERS
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.dispatch import attend_call, plain, prepare_call
from comfyui_vc_attention.kernels.prepare import reference as eager
from comfyui_vc_attention.kernels.registry import kernel_named, load_grouping

from . import orders
from .captured import captured_long
from .fidelity import log
from .length import Expected, kernels_for
from .structured import structured_qkv
from .tables import Table, earlier_row, named_failure

LENGTHS, HEADS = (4096, 8192, 16_384, 32_768, 75_600), 40
HEAD_COUNTS, HEADS_LENGTH = (12, 16, 24, 32, 56), 32_768
LONGEST = (150_000, 12)
PARTS_SHAPE = (75_600, 40)  # what grouping and the preparation are timed on: a long clip of Wan's
PAPER_SHAPES = {  # (tokens in time, rows, columns), heads; paper, appendix A
    "Wan2.2-A14B 720p": ((21, 45, 80), 40),
    "LongCat-Video 480p": ((24, 30, 52), 32),
    "HunyuanVideo-1.5 720p": ((31, 45, 80), 16),
    "MiniMax-H3 1344x768": ((70, 25, 42), 56),
}
PEAKS = {(9, 0): (1979.0, 989.0)}  # TFLOP/s of 8 and of 16 bits, dense; the card's data sheet
WARM_UP_S, TURNS_S = 0.1, 0.6  # before each measurement; how long calls take turns, a warm-up of half
LONG_FLOPS, CALLS = 2e13, (10, 3)  # calls back to back, of short calls and of those longer than that
STEPS, BLOCKS = 40, 40  # of the clip whose attention the schedules are summed over (Wan 14B)
COLUMNS = [
    "kernel", "tokens", "heads", "tensors", "kernel ms", "TFLOP/s", "of peak", "kernel over cuDNN",
    "kernel grouped ms", "kernel grouped over cuDNN", "call ms", "call over cuDNN", "call grouped ms",
    "call grouped over cuDNN", "in turns over cuDNN", "relative L2", "peak MiB",
    "over q, k and v",
]  # fmt: skip
RATIOS = {f"{name} over cuDNN": f"{name} ms" for name in ("kernel", "kernel grouped", "call", "call grouped")}
CUDNN = "cuDNN bf16"


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


def alone(call, calls=CALLS[0]):
    """Median milliseconds of a call by itself, back to back: as published times are taken."""
    from bench.timing import alone_ms

    return alone_ms(call, calls, WARM_UP_S)


def alone_both_ways(calls, count):
    """alone() of each call, first to last and back: what a card does while it warms up favours none."""
    there = [alone(call, count) for call in calls]
    back = [alone(call, count) for call in reversed(calls)]
    return [(a + b) / 2 for a, b in zip(there, reversed(back), strict=True)]


def cudnn_call(q, k, v):
    cudnn = next(peer for peer in PEERS if peer.name == "PyTorch cuDNN")
    return lambda: cudnn.attend(q, k, v)


class Shape:
    """One size and kind of tensors: rows of the speed table, every kernel and peer against the same cuDNN."""

    def __init__(self, q, k, v, tensors):
        self.qkv, self.tensors, self.clusters = (q, k, v), tensors, VCConfig().clusters_for(k.shape[2])
        self.flops = 4 * q.shape[1] * q.shape[2] ** 2 * q.shape[3]
        self.expected = Expected(q, k, v)
        self.cudnn = cudnn_call(q, k, v)
        self.calls = CALLS[self.flops > LONG_FLOPS]
        self.cudnn_ms = alone(self.cudnn, self.calls)

    def row(self, name, ms, turns, out, call, peak):
        """ms: kernel, kernel grouped, call and call grouped, None where there is none; turns: {name: ms}."""
        from bench.timing import peak_extra_bytes

        q = self.qkv[0]
        rate = None if ms[0] is None else self.flops / ms[0] / 1e9
        extra = peak_extra_bytes(call)
        row = [
            name, q.shape[2], q.shape[1], self.tensors,
            ms[0], rate, None if rate is None or peak is None else rate / peak, None,
            ms[1], None, ms[2], None, ms[3], None,
            turns and turns["cudnn"] / turns["ours"], self.expected.error(out), extra // 2**20,
            extra / (3 * q.numel() * q.element_size()),
        ]  # fmt: skip
        self.compare(row)
        return row

    def compare(self, row):
        """Fill in the ratios of a row's times to cuDNN's."""
        for ratio, ms in RATIOS.items():
            value = row[COLUMNS.index(ms)]
            row[COLUMNS.index(ratio)] = None if value is None else self.cudnn_ms / value

    def settle(self, rows):
        """Time cuDNN after the rest, too, and compare with the mean: a card that warms up favours none."""
        self.cudnn_ms = (self.cudnn_ms + alone(self.cudnn, self.calls)) / 2
        for row in rows:
            row[:] = self.cudnn_row() if row[0] == CUDNN else row
            self.compare(row)

    def peak_rate(self, bits):
        peaks = PEAKS.get(torch.cuda.get_device_capability()) if self.qkv[0].is_cuda else None
        return peaks and peaks[bits == 16]

    def cudnn_row(self):
        ms = [self.cudnn_ms, None, self.cudnn_ms, None]
        return self.row(CUDNN, ms, None, self.cudnn(), self.cudnn, self.peak_rate(16))

    def kernel_row(self, name, spec, config):
        """A kernel on operands at hand and from bf16 tensors, as outside the window and inside it."""
        q, k, v = self.qkv
        kernels, calls = [], []
        for how, order in ((plain(config), None), (config, group_tokens(v, self.clusters))):
            prepare = functools.partial(prepare_call, q, k, v, how, grouping=order, kernel=spec.name)
            attend = functools.partial(attend_call, prepare())
            kernels.append(attend)
            calls.append(lambda prepare=prepare: attend_call(prepare()))
        ms = alone_both_ways([*kernels, *calls], self.calls)
        turns, out = self.in_turns(attend, ms[1]), attend()[0]
        return self.row(name, ms, turns, out, lambda: attend_call(prepare()), self.peak_rate(8))

    def in_turns(self, call, ms):
        """{"cudnn", "ours": ms} of calls one after the other, long enough for the clock to settle."""
        from bench.timing import interleaved_ms

        rounds = max(3, round(1e3 * TURNS_S / (ms + self.cudnn_ms)))
        calls = {"cudnn": self.cudnn, "ours": call}
        return interleaved_ms(calls, rounds=rounds, warmup=rounds // 2)

    def peer_row(self, peer):
        def call():
            return peer.attend(*self.qkv)

        ms = [None, None, alone(call, self.calls), None]
        turns = self.in_turns(call, ms[2])
        return self.row(peer.name, ms, turns, call(), call, None)


def chosen_kernels(q, k, v, best_only):
    """(spec, config) of every kernel that can run, or of the best one for each numerics."""
    seen = set()
    for spec, config in kernels_for(q, k, v):
        if spec.name == "reference" or (best_only and spec.numerics in seen):
            continue
        seen.add(spec.numerics)
        yield spec, config


def without_expcast(spec, config):
    """(name, spec, config) of the same kernel with exponential and cast, if it writes FP8 probabilities."""
    if spec.numerics[0].endswith("_fp8"):
        yield f"{spec.name}, expcast off", spec, replace(config, expcast="off", value_format="fp8")


def time_shape(table, q, k, v, tensors, best_only, save, earlier=None):
    """Add the rows of one shape to the table, saving after each; what fails is named in the table's notes.

    best_only: the best kernel of each numerics, and what ExpCast buys it. earlier: as of run().
    """
    jobs = {CUDNN: Shape.cudnn_row}
    for spec, config in chosen_kernels(q, k, v, best_only):
        for name, *how in ((spec.name, spec, config), *(without_expcast(spec, config) if best_only else ())):
            jobs[name] = functools.partial(Shape.kernel_row, name=name, spec=how[0], config=how[1])
    for peer in PEERS:  # PyTorch's default is FlashAttention-2 or cuDNN, slower or measured above
        if not peer.name.startswith("PyTorch") and peer.why_not(q) is None:
            jobs[peer.name] = functools.partial(Shape.peer_row, peer=peer)
    place = f"{q.shape[2]:,} tokens, {q.shape[1]} heads, {tensors}"
    before = [earlier_row(earlier, table, [name, q.shape[2], q.shape[1], tensors]) for name in jobs]
    if all(before):  # ratios are over the same run's cuDNN: all of a shape or nothing
        table.rows += before
        return
    shape, first = Shape(q, k, v, tensors), len(table.rows)
    for name, job in jobs.items():
        with named_failure(table, f"{name}, {place}"):
            table.rows.append(job(shape))
        save()
    with named_failure(table, f"cuDNN again, {place}"):
        shape.settle(table.rows[first:])
    save()
    log(f"{place}: {len(jobs)} rows")


def order_time_table(device, shape):
    """What making and using an order costs, as a share of one attention kernel (Table 1, overhead column)."""
    tokens, heads = shape
    q, k, v = normal_qkv(tokens, heads, device)
    spec, config = next(chosen_kernels(q, k, v, True))
    prepared = prepare_call(q, k, v, config, kernel=spec.name)
    attend = alone(lambda: attend_call(prepared))
    table = Table(
        "Order time (Table 1, overhead)",
        f"What orders cost at {tokens:,} tokens and {heads} heads, alone and over one attention kernel "
        f"({attend:.1f} ms, {prepared.kernel.name}), on a step that makes them; the paper, gather included: "
        "static cube 2.7%, k-means 16.5%, warm-started 9.5%, balanced 84.5%, Hadamard on V 1.5%.",
        ["what", "clusters", "Lloyd steps", "ms", "of the kernel, %"],
        notes=[
            "A static cube costs the gather alone. PyTorch rows show what is not in the pack: upper bounds, "
            "no match for a kernel written for it."
        ],
    )

    def row(what, clusters, steps, ms):
        table.rows.append([what, clusters, steps, ms, 100 * ms / attend])

    grouping = group_tokens(v, 128)
    uses = alone_both_ways(
        [
            functools.partial(prepare_call, q, k, v, config, grouping=order, kernel=spec.name)
            for order in (None, grouping)
        ],
        CALLS[0],
    )
    row("gather by an order, in the preparation", None, None, uses[1] - uses[0])
    for clusters in (16, 32, 64, 128, 256):
        before = group_tokens(v, clusters)
        row("k-means", clusters, "as shipped", alone(lambda c=clusters: group_tokens(v, c)))
        warm = functools.partial(group_tokens, v, clusters, before)
        row("k-means, warm", clusters, "as shipped", alone(warm))
    group = load_grouping(v, 128)
    for steps in (1, 2, 4, 10):
        row("k-means", 128, steps, alone(lambda n=steps: group(v, 128, iterations=n)))
        ms = alone(lambda n=steps: group(v, 128, grouping, iterations=n))
        row("k-means, warm", 128, steps, ms)
    row("Hadamard on V, in PyTorch", None, None, alone(lambda: eager.rotate(v)))
    one = alone(lambda: orders.balanced_kmeans(v[:, :1]), 1)
    row(f"balanced k-means, in PyTorch, {heads} times that of one head", -(-tokens // 128), None, one * heads)
    return table


def schedule_table(by_length, order_times):
    """Attention time of one clip by where grouping sits (Table 3, latency), from the parts measured."""
    columns = by_length.columns.index
    tokens, heads = PARTS_SHAPE
    rows = [row for row in by_length.rows if row[1:3] == [tokens, heads] and row[columns("call grouped ms")]]
    ms = {row[0]: row[3] for row in order_times.rows if row[1:3] == [128, "as shipped"]}
    table = Table(
        "Schedules (Table 3, latency)",
        f"Seconds of attention in {STEPS} steps of {BLOCKS} blocks, {tokens:,} tokens, {heads} heads, one "
        "condition: the sum of parts measured above. The paper, whole clips of LongCat: first quarter "
        "351.0 s, uniform quarter 353.2 s, all steps 367.0 s.",
        ["steps that group", "reuse", "orders a block", *(row[0] for row in rows), "over no step"],
    )
    policies = [("no step", 4), ("first quarter", 4), ("first quarter", 1), ("first quarter", 2),
                ("first quarter", 8), ("uniform quarter", 4), ("every step", 4)]  # fmt: skip
    base = None
    for where, reuse in policies:
        grouped = {"no step": 0, "every step": STEPS}.get(where, STEPS // 4)
        made = grouped if where == "uniform quarter" else -(-grouped // reuse)
        making = ms["k-means"] + ms["k-means, warm"] * (made - 1) if made else 0.0
        seconds = [
            BLOCKS * 1e-3 * (making + grouped * row[columns("call grouped ms")]
                             + (STEPS - grouped) * row[columns("call ms")])
            for row in rows
        ]  # fmt: skip
        base = base or seconds
        table.rows.append([where, reuse, made, *seconds, seconds[0] / base[0] if rows else None])
    table.notes.append(f"The last column is of {rows[0][0]}." if rows else "No kernel was timed there.")
    return table


def ladder_table(device, shape):
    """The preparation with more and more of it fused, the rest in PyTorch on bf16 tensors (Figure 7)."""
    from bench.timing import interleaved_ms

    tokens, heads = shape
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


def run(device, save=lambda tables, data: None, earlier=None):
    """(tables, data) of this stage. save: given both after each row.

    earlier: the same run's results before it was cut short; shapes that it finished are not measured again.
    """
    by_length = Table(
        "Speed over length",
        f"Milliseconds and ratios at {HEADS} heads, and of one longer call, N(0, 1). Each alone, back to "
        "back; in turns: the grouped kernel (of peers the call) and cuDNN one after the other, where a card "
        "at its power limit gives each the clock that the other left. Grouped: with means and a token order. "
        "Memory: what a call needs beyond q, k and v, output included.",
        COLUMNS,
    )
    if device.type != "cuda":
        by_length.notes.append("Not measured: needs a GPU.")
        return [by_length], {}
    return measure_all(device, by_length, save, earlier)


def measure_all(device, by_length, save, earlier=None):
    """Every table, the most wanted first; a part that fails is named in a note."""
    by_heads = Table(
        "Speed over heads", f"The same at {HEADS_LENGTH:,} tokens and other head counts.", COLUMNS
    )
    shapes = Table(
        "The paper's shapes",
        "The best kernel of each numerics at the shapes of the paper's Table 2, on N(0, 1), structured and "
        "captured tensors: a power limit makes speed depend on the numbers. The paper on an H200: kernel "
        "1.46 times FlashAttention-4 on Wan2.2.",
        COLUMNS,
        notes=[
            "Captured: the trained sample model run on noise of that size, longer than any clip it was "
            "trained on; its heads of several blocks and steps. Numbers for a card's power, not pictures: "
            "errors on real captures are in stage fidelity.",
            "The paper's baseline is FlashAttention-4, ours cuDNN in the same run.",
        ],
    )
    tables = [by_length]

    def measure(table, tensors, make, best_only=False):
        if table not in tables:
            tables.append(table)
        with named_failure(table, tensors):
            time_shape(table, *make(), tensors, best_only, lambda: save(tables, {}), earlier)

    for tokens in LENGTHS:
        measure(by_length, "N(0, 1)", lambda n=tokens: normal_qkv(n, HEADS, device))
    for name, (grid, heads) in PAPER_SHAPES.items():
        tokens = grid[0] * grid[1] * grid[2]
        measure(shapes, f"{name}, N(0, 1)", lambda n=tokens, h=heads: normal_qkv(n, h, device), True)
    wan, (grid, heads) = next(iter(PAPER_SHAPES.items()))
    measure(shapes, f"{wan}, structured", lambda: structured_bf16(grid, heads, device), True)
    measure(shapes, f"{wan}, captured", lambda: captured_long(grid, heads, device=device), True)
    with named_failure(by_length, "Orders and preparation"):
        order_times = order_time_table(device, PARTS_SHAPE)
        tables += [order_times, schedule_table(by_length, order_times)]
        save(tables, {})
        tables.append(ladder_table(device, PARTS_SHAPE))
        save(tables, {})
    log("orders and preparation")
    for heads in HEAD_COUNTS:
        measure(by_heads, "N(0, 1)", lambda h=heads: normal_qkv(HEADS_LENGTH, h, device))
    measure(by_length, "N(0, 1)", lambda: normal_qkv(*LONGEST, device), True)
    return tables, {}
