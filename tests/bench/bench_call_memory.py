"""What one attention call needs, whole, in head groups and in ComfyUI's boxes, and its time.

usage: python tests/bench/bench_call_memory.py [kernel ...] [--length 75600] [--heads 40] [--json FILE]

Peaks are in units of q's bytes. Asked for: in boxes at most 4.2 (PyTorch's attention with q, k and v alive
needs 4), in 8 head groups or more 4.2 and at most 3% slower, else 5.8.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: F401, gives the checkout its import name
from comfyui_vc_attention.kernels import VCConfig, attend_call, group_tokens, prepare_call
from comfyui_vc_attention.kernels.group.labels import labels_from_order, order_from_labels
from comfyui_vc_attention.kernels.operands import Box, TokenGrouping
from comfyui_vc_attention.nodes.head_groups import BOXED, attend_by_heads
from timing import environment, interleaved_ms, peak_extra_bytes

GROUPS = (8, BOXED, 16, 40)


def made(length, heads, fused=False):
    """q, k, v as models lay them out: [B, L, H, D] in memory, each its own or one product's views."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    if fused:
        return list(normal(1, length, 3, heads, 128).permute(2, 0, 3, 1, 4))
    return [normal(1, length, heads, 128).transpose(1, 2) for _ in range(3)]


def in_boxes(length, heads, call):
    """call(boxes of q, k, v) as a model makes and hands them over; its tensors count."""

    def run():
        boxes = [Box(tensor) for tensor in made(length, heads)]
        return call(boxes)

    return run


def bench_kernel(kernel, length, heads):
    config = VCConfig(value_format="int8" if kernel.endswith(("int8_int8", "int8_int8_sm90")) else "auto")
    qkv, unit = made(length, heads), length * heads * 128 * 2
    order = TokenGrouping(group_tokens(qkv[2], 128).order, None)
    options = {"grouping": order, "kernel": kernel}
    calls = {"whole": lambda: attend_call(prepare_call(*qkv, config, **options))[0]}
    expected = calls["whole"]()
    for groups in GROUPS:
        calls[f"{groups} head groups"] = lambda n=groups: attend_by_heads(*qkv, config, n, **options)
    rows = []
    times = interleaved_ms(calls, rounds=4, warmup=1)
    for name, call in calls.items():
        same = torch.equal(call(), expected)
        peak = 3 + peak_extra_bytes(call) / unit
        slower = times[name] / times["whole"] - 1
        rows.append({"kernel": kernel, "how": name, "peak_q": peak, "slower": slower, "ms": times[name]})
        rows[-1]["same_bits"] = same
    qkv.clear()
    boxed = in_boxes(length, heads, lambda boxes: attend_call(prepare_call(*boxes, config, **options))[0])
    rows.append({"kernel": kernel, "how": "boxes", "peak_q": peak_extra_bytes(boxed) / unit})

    def fused():
        return attend_by_heads(*made(length, heads, True), config, BOXED, **options)

    rows.append({"kernel": kernel, "how": f"boxes of one tensor, {BOXED} groups"})
    rows[-1]["peak_q"] = peak_extra_bytes(fused) / unit
    return rows


def bench_pytorch(length, heads):
    def run(backends):
        with sdpa_kernel(backends):
            return torch.nn.functional.scaled_dot_product_attention(*made(length, heads))

    unit = length * heads * 128 * 2
    rows = []
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        peak = peak_extra_bytes(lambda b=backend: run([b])) / unit
        rows.append({"kernel": f"PyTorch {name}", "how": "whole", "peak_q": peak})
    return rows


def bench_state(length, heads):
    """What keeping an order costs, per block: as int32, and as labels that are sorted anew in each call."""
    v = made(length, heads)[2]
    grouping = group_tokens(v, 128)
    labels = labels_from_order(grouping.order)
    assert torch.equal(order_from_labels(labels), grouping.order), "labels must give the order back"
    times = interleaved_ms(
        {
            "group_tokens, cold": lambda: group_tokens(v, 128),
            "group_tokens, warm": lambda: group_tokens(v, 128, grouping),
            "labels from order": lambda: labels_from_order(grouping.order),
            "order from labels": lambda: order_from_labels(labels),
        },
        rounds=5,
    )
    kept = {"order": grouping.order, "labels": labels, "centroids": grouping.centroids}
    mib = {name: t.numel() * t.element_size() / 2**20 for name, t in kept.items()}
    peak = peak_extra_bytes(lambda: order_from_labels(labels)) / 2**20
    return {"ms": times, "mib_per_block": mib, "order_from_labels_peak_mib": peak}


def markdown(rows, state, length, heads):
    lines = [
        f"{length:,} tokens, {heads} heads, bf16",
        "",
        "| kernel | how | peak, q's | ms | slower | same bits |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ms = f"{row['ms']:.1f} | {row['slower']:+.1%} | {row['same_bits']}" if "ms" in row else " | | "
        lines.append(f"| {row['kernel']} | {row['how']} | {row['peak_q']:.3f} | {ms} |")
    lines += ["", *(f"{name}: {ms:.2f} ms" for name, ms in state["ms"].items())]
    lines += [f"{name}: {mib:.1f} MiB a block" for name, mib in state["mib_per_block"].items()]
    lines.append(f"order from labels needs {state['order_from_labels_peak_mib']:.0f} MiB at its peak")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", default=["cuda_int8_fp8_sm90", "cuda_int8_int8_sm90"])
    parser.add_argument("--length", type=int, default=75600)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = bench_pytorch(options.length, options.heads)
    for kernel in options.kernels:
        rows += bench_kernel(kernel, options.length, options.heads)
    state = bench_state(options.length, options.heads)
    print(markdown(rows, state, options.length, options.heads))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows, "state": state}))


if __name__ == "__main__":
    main()
