"""Attention kernels against torch's cuDNN bf16 attention, and the price of grouping; checked before timed.

usage: python tests/bench/bench_attend.py [kernel ...] [--lengths 32768 75600] [--heads 40] [--json FILE]

Prints a Markdown table. Inputs are N(0, 1) with a constant offset per K channel. "kernel" is the attention
kernel on prepared operands, "call" is everything from bf16 tensors with the token order at hand.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import conftest  # noqa: F401, gives the checkout its import name
from comfyui_vc_attention.kernels import VCConfig, group_tokens
from comfyui_vc_attention.kernels.dispatch import attend_call, prepare_call
from comfyui_vc_attention.kernels.group import reference as group_reference
from comfyui_vc_attention.kernels.operands import TokenGrouping
from comfyui_vc_attention.kernels.testing import energy_removed, relative_l2, sample_qkv
from timing import environment, interleaved_ms, kernels_ms, peak_extra_bytes

# relative L2 against float32 attention on N(0, 1) values; half above what the recipes measure
ERROR_BOUNDS = {"int8_fp8": 0.06, "fp8_fp8": 0.08, "int8_int8": 0.022}
CHECKED_ROWS = 512


def inputs(heads, length, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = (normal(1, heads, length, 128) for _ in range(3))
    return q, k + normal(1, heads, 1, 128), v


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def check_error(kernel, out, q, k, v):
    """Relative L2 of some rows of one head; raises if it is past the bound of the kernel's numerics."""
    rows = q[:, :1, :CHECKED_ROWS].float()
    exact = scaled_dot_product_attention(rows, k[:, :1].float(), v[:, :1].float())
    error = relative_l2(out[:, :1, :CHECKED_ROWS], exact)
    bound = next(b for numerics, b in ERROR_BOUNDS.items() if numerics in kernel)
    if not error < bound:
        raise AssertionError(f"{kernel}: relative L2 must be under {bound}, got {error}")
    return error


def bench_kernel(kernel, q, k, v, config, grouping, label):
    def call():
        prepared = prepare_call(q, k, v, config, grouping=grouping, kernel=kernel)
        return attend_call(prepared)[0]

    error = check_error(kernel, call(), q, k, v)
    prepared = prepare_call(q, k, v, config, grouping=grouping, kernel=kernel)
    # cuDNN's call is one kernel; ours has one small fill beside the kernel
    ms = interleaved_ms(
        {"cudnn": lambda: cudnn(q, k, v), "kernel": lambda: attend_call(prepared), "call": call}
    )
    prepared = None
    return {
        "kernel": kernel,
        "what": label,
        "length": q.shape[2],
        "heads": q.shape[1],
        "error": error,
        "cudnn_ms": ms["cudnn"],
        "kernel_ms": ms["kernel"],
        "call_ms": ms["call"],
        "kernel_ratio": ms["cudnn"] / ms["kernel"],
        "call_ratio": ms["cudnn"] / ms["call"],
        "kernel_tflops": 4 * q.shape[1] * q.shape[2] ** 2 * 128 / ms["kernel"] / 1e9,
        "extra_memory_share": peak_extra_bytes(call) / (3 * q.numel() * 2),
        "kernels_ms": kernels_ms(call, rounds=2),
    }


def bench_grouping(heads, length, attention_ms, clusters=128, checked_heads=4):
    """Cold and warm grouping as a share of the attention kernel's time, and the energy each removes."""
    v = sample_qkv("clustered", (1, heads, 1, 128), keys=length, dtype=torch.bfloat16, device="cuda")[2]
    cold = group_tokens(v, clusters)
    moved = v + 0.1 * torch.randn_like(v)
    ms = interleaved_ms(
        {"cold": lambda: group_tokens(v, clusters), "warm": lambda: group_tokens(moved, clusters, cold)}
    )
    some = slice(0, checked_heads)
    reference = group_reference.group_tokens(v[:, some], clusters)
    warm = group_tokens(moved, clusters, cold)
    again = group_reference.group_tokens(moved[:, some], clusters)
    return {
        "length": length,
        "cold_ms": ms["cold"],
        "warm_ms": ms["warm"],
        "cold_share": ms["cold"] / attention_ms,
        "warm_share": ms["warm"] / attention_ms,
        "kernels_ms": kernels_ms(lambda: group_tokens(v, clusters), rounds=2),
        "energy_cold": energy_removed(v[:, some], cold.order[:, some]),
        "energy_reference": energy_removed(v[:, some], reference.order),
        "energy_warm": energy_removed(moved[:, some], warm.order[:, some]),
        "energy_reference_moved": energy_removed(moved[:, some], again.order),
        "energy_sequence": energy_removed(v[:, some]),
    }


def markdown(rows):
    heads = "kernel|what|L|rel. L2|cuDNN ms|kernel ms|TFLOP/s|over cuDNN|call ms|call over cuDNN|memory"
    lines = [f"| {heads.replace('|', ' | ')} |", "|" + "---|" * 11]
    for r in rows:
        lines.append(
            f"| `{r['kernel']}` | {r['what']} | {r['length']:,} | {r['error']:.4f} "
            f"| {r['cudnn_ms']:.1f} | {r['kernel_ms']:.1f} "
            f"| {r['kernel_tflops']:.0f} | {r['kernel_ratio']:.2f} | {r['call_ms']:.1f} "
            f"| {r['call_ratio']:.2f} | {r['extra_memory_share']:.2f} |"
        )
    return "\n".join(lines)


def markdown_grouping(rows):
    heads = "L|cold ms|share|warm ms|share|energy removed: sequence|cold|reference|warm|reference"
    lines = [f"| {heads.replace('|', ' | ')} |", "|" + "---|" * 10]
    for r in rows:
        lines.append(
            f"| {r['length']:,} | {r['cold_ms']:.2f} | {r['cold_share']:.1%} | {r['warm_ms']:.2f} "
            f"| {r['warm_share']:.1%} | {r['energy_sequence']:.3f} | {r['energy_cold']:.3f} "
            f"| {r['energy_reference']:.3f} | {r['energy_warm']:.3f} | {r['energy_reference_moved']:.3f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", default=["triton_int8_fp8"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 75600])
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--plain", action="store_true", help="also without means, as after the window")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, groupings = [], []
    for length in options.lengths:
        q, k, v = inputs(options.heads, length)
        order = torch.rand(1, options.heads, length, device="cuda").argsort(-1).int()
        for kernel in options.kernels:
            grouped = (VCConfig(), TokenGrouping(order, None), "means, order")
            for config, grouping, label in [grouped] + [
                (VCConfig(demean=False), None, "plain")
            ] * options.plain:
                rows.append(bench_kernel(kernel, q, k, v, config, grouping, label))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
        del q, k, v, order
        first = next(row for row in rows if row["length"] == length)
        groupings.append(bench_grouping(options.heads, length, first["kernel_ms"]))
    facts = environment()
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    print(f"\n{text}\n\n{markdown(rows)}\n\n{markdown_grouping(groupings)}")
    if options.json:
        options.json.write_text(json.dumps({**facts, "attention": rows, "grouping": groupings}, indent=1))


if __name__ == "__main__":
    main()
