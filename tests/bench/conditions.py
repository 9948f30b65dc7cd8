"""One kernel under other conditions: rising row maxima, rotary embedding, 64 channels, a whole schedule."""

import math

import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens
from comfyui_vc_attention.kernels.dispatch import attend_call, plain, prepare_call
from timing import alone_ms

STEPS, WINDOW_STEPS, REGROUP = 40, 10, 4  # window of 25%


def rising(q, k, seed=5):
    """q and k whose scores rise along the keys by 8 standard deviations of their noise."""
    generator = torch.Generator("cuda").manual_seed(seed)
    direction = torch.randn(q.shape[-1], device="cuda", generator=generator)
    ramp = torch.linspace(-4, 4, k.shape[2], device="cuda")[:, None] / math.sqrt(q.shape[-1])
    return (q + direction).to(q.dtype), (k + ramp * direction).to(k.dtype)


def rope_price(kernel, q, k, v):
    """Milliseconds of the preparation without and with rotary tables, interleaved and half-split."""
    angle = torch.rand(q.shape[2], q.shape[3] // 2, device="cuda") * 6
    tables = angle.cos(), angle.sin()
    config = VCConfig()
    ropes = {"none": None} | {layout: (*tables, layout) for layout in ("interleaved", "half")}
    return {
        name: alone_ms(lambda rope=rope: prepare_call(q, k, v, config, kernel=kernel, rope=rope))
        for name, rope in ropes.items()
    }


def by_parts(ms):
    """Share of the kernels' time in the calls of a schedule.

    ms: "cold", "warm" and, each with ", means" and ", plain", "kernel" and "prepare".
    """
    later = STEPS - WINDOW_STEPS
    kernels = WINDOW_STEPS * ms["kernel, means"] + later * ms["kernel, plain"]
    warm = math.ceil(WINDOW_STEPS / REGROUP) - 1
    rest = ms["cold"] + warm * ms["warm"]
    rest += WINDOW_STEPS * ms["prepare, means"] + later * ms["prepare, plain"]
    return kernels / (kernels + rest)


def whole_schedule(kernel, q, k, v, clusters=128):
    """(milliseconds of 40 steps from bf16 tensors, of the attention kernels in them), measured in one go."""
    window = VCConfig()
    later = plain(window)

    def timed(steps):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        steps()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def calls():
        grouping = None
        for step in range(STEPS):
            if step < WINDOW_STEPS and step % REGROUP == 0:
                grouping = group_tokens(v, clusters, grouping)
            inside = step < WINDOW_STEPS
            config = window if inside else later
            attend_call(prepare_call(q, k, v, config, grouping=grouping if inside else None, kernel=kernel))

    grouping = group_tokens(v, clusters)
    in_window = prepare_call(q, k, v, window, grouping=grouping, kernel=kernel)
    after_it = prepare_call(q, k, v, later, kernel=kernel)

    def kernels():
        for step in range(STEPS):
            attend_call(in_window if step < WINDOW_STEPS else after_it)

    kernels_once = timed(kernels)
    whole = timed(calls)
    return whole, (kernels_once + timed(kernels)) / 2


def markdown_conditions(found):
    lines = ["| condition | |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in found.items()])
