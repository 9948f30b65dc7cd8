"""Attention kernels against torch's cuDNN bf16 attention, and the price of grouping; checked before timed.

usage: python tests/bench/bench_attend.py [kernel ...] [--lengths 32768 75600] [--heads 40] [--json FILE]
       python tests/bench/bench_attend.py --all
       python tests/bench/bench_attend.py cuda_int8_int8 --all --lengths 32768

Prints Markdown tables. Inputs are N(0, 1) with a constant offset per K channel. "kernel" is the attention
kernel on prepared operands, "call" is everything from bf16 tensors with the token order at hand. Each is
timed alone, back to back, and so is cuDNN; "taking turns" is the ratio when they alternate, call by call: a
card at its power limit then gives each the clock that the others left it.
--all: the named kernels, or every Hopper kernel, in the window and after it, and errors on five kinds of
tensors beside comfy-kitchen's INT8 attention (where installed); of the first one also its speed beside
comfy-kitchen, rising maxima, a whole schedule, rotary embedding; 64 channels.
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
from comfyui_vc_attention.kernels import AttentionProblem, VCConfig, choose_kernel, group_tokens
from comfyui_vc_attention.kernels.dispatch import attend_call, plain, prepare_call
from comfyui_vc_attention.kernels.group import reference as group_reference
from comfyui_vc_attention.kernels.operands import TokenGrouping
from comfyui_vc_attention.kernels.testing import energy_removed, relative_l2, sample_qkv
from conditions import by_parts, markdown_conditions, rising, rope_price, whole_schedule
from kinds import PEER, bench_peer, errors_by_kind, markdown_kinds, peer
from timing import alone_ms, environment, interleaved_ms, kernels_ms, peak_extra_bytes

from tests.evidence.bounds import HARD, MARGIN, bound

MEANS, PLAIN = "means, order", "plain"
CONFIGS = {MEANS: VCConfig(), PLAIN: plain(VCConfig())}
RECIPES = {"int8_fp8": "int8_fp8 + ExpCast", "fp8_fp8": "fp8_fp8 + ExpCast", "int8_int8": "int8_int8"}
CHECKED_ROWS = 512
HOPPER = ["cuda_int8_fp8_sm90", "cuda_fp8_fp8_sm90", "cuda_int8_int8_sm90"]


def inputs(heads, length, seed=0, channels=128):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = (normal(1, heads, length, channels) for _ in range(3))
    return q, k + normal(1, heads, 1, channels), v


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def check_error(kernel, out, q, k, v, margin=MARGIN):
    """Relative L2 of some rows of one head; raises if it is past the bound of tests/evidence."""
    rows = q[:, :1, :CHECKED_ROWS].float()
    exact = scaled_dot_product_attention(rows, k[:, :1].float(), v[:, :1].float())
    error = relative_l2(out[:, :1, :CHECKED_ROWS], exact)
    recipe = next(row for numerics, row in RECIPES.items() if numerics in kernel)
    largest = bound(f"{recipe}, means, sequence", margin=margin)
    if not error < largest:
        raise AssertionError(f"{kernel}: relative L2 must be under {largest:.4f}, got {error}")
    return error


def bench_kernel(kernel, q, k, v, config, grouping, label, cudnn_ms, rounds):
    """One row. cudnn_ms: of cuDNN alone on these tensors; rounds: turns that all take afterwards."""

    def prepare():
        return prepare_call(q, k, v, config, grouping=grouping, kernel=kernel)

    def call():
        return attend_call(prepare())[0]

    error = check_error(kernel, call(), q, k, v)
    prepared = prepare()
    # cuDNN's call is one kernel; ours has one small fill beside the kernel
    calls = {"kernel": lambda: attend_call(prepared), "call": call}
    ms = {name: alone_ms(timed) for name, timed in calls.items()} | {"prepare": alone_ms(prepare)}
    turns = interleaved_ms({"cudnn": lambda: cudnn(q, k, v)} | calls, rounds, warmup=0)
    prepared = None
    peak = peak_extra_bytes(call)
    return {
        "kernel": kernel,
        "what": label,
        "length": q.shape[2],
        "heads": q.shape[1],
        "error": error,
        "cudnn_ms": cudnn_ms,
        "kernel_ms": ms["kernel"],
        "call_ms": ms["call"],
        "kernel_ratio": cudnn_ms / ms["kernel"],
        "call_ratio": cudnn_ms / ms["call"],
        "turns_ms": turns,
        "kernel_ratio_turns": turns["cudnn"] / turns["kernel"],
        "call_ratio_turns": turns["cudnn"] / turns["call"],
        "prepare_ms": ms["prepare"],
        "kernel_tflops": 4 * q.shape[1] * q.shape[2] ** 2 * q.shape[3] / ms["kernel"] / 1e9,
        # the peak counts the output, whose share is a third
        "extra_memory_share": peak / (3 * q.numel() * 2),
        "own_memory_share": (peak - 2 * q.numel()) / (3 * q.numel() * 2),
        "kernels_ms": kernels_ms(call, rounds=2),
    }


def bench_grouping(heads, length, attention_ms, clusters=128, checked_heads=4):
    """Cold and warm grouping as a share of the attention kernel's time, and the energy each removes."""
    v = sample_qkv("clustered", (1, heads, 1, 128), keys=length, dtype=torch.bfloat16, device="cuda")[2]
    cold = group_tokens(v, clusters)
    moved = v + 0.1 * torch.randn_like(v)
    ms = {
        "cold": alone_ms(lambda: group_tokens(v, clusters)),
        "warm": alone_ms(lambda: group_tokens(moved, clusters, cold)),
    }
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
    heads = (
        "kernel|what|L|rel. L2|cuDNN ms|kernel ms|TFLOP/s|over cuDNN|taking turns|prepare ms|call ms"
        "|call over cuDNN|taking turns|memory over q + k + v|without the output"
    )
    lines = [f"| {heads.replace('|', ' | ')} |", "|" + "---|" * 15]
    for r in rows:
        lines.append(
            f"| `{r['kernel']}` | {r['what']} | {r['length']:,} | {r['error']:.4f} "
            f"| {r['cudnn_ms']:.1f} | {r['kernel_ms']:.1f} "
            f"| {r['kernel_tflops']:.0f} | {r['kernel_ratio']:.2f} | {r['kernel_ratio_turns']:.2f} "
            f"| {r['prepare_ms']:.2f} | {r['call_ms']:.1f} | {r['call_ratio']:.2f} "
            f"| {r['call_ratio_turns']:.2f} | {r['extra_memory_share']:.2f} | {r['own_memory_share']:.2f} |"
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


def bench_rising(kernel, q, k, v, bases):
    """{condition: text} of row maxima that keep rising along the keys; bases: the rows to compare with."""
    q, k = rising(q, k)
    cudnn_ms, found = alone_ms(lambda: cudnn(q, k, v)), {}
    for base, config in zip(bases, CONFIGS.values(), strict=True):
        prepared = prepare_call(q, k, v, config, kernel=kernel)
        # scores spread further: the reference has 1.35 times its usual error in int8_int8
        error = check_error(kernel, attend_call(prepared)[0], q, k, v, HARD)
        ms = alone_ms(lambda prepared=prepared: attend_call(prepared))
        found[f"row maxima rising, {base['what']}"] = (
            f"{ms:.1f} ms, {ms / base['kernel_ms'] - 1:+.1%}, {cudnn_ms / ms:.2f} over cuDNN, "
            f"relative L2 {error:.4f}"
        )
    return found


def bench_beside_peer(kernel, q, k, v, rows, peer_ms, rounds):
    """{condition: text}: our whole call over the peer's, alone and taking turns. rows: of means, of plain."""
    order = torch.rand(v.shape[:3], device="cuda").argsort(-1).int()
    cases = {MEANS: (CONFIGS[MEANS], TokenGrouping(order, None)), PLAIN: (CONFIGS[PLAIN], None)}
    calls = {PEER: lambda: peer().attend(q, k, v)}
    for what, (config, grouping) in cases.items():
        calls[what] = lambda config=config, grouping=grouping: attend_call(
            prepare_call(q, k, v, config, grouping=grouping, kernel=kernel)
        )
    turns = interleaved_ms(calls, rounds)
    return {
        f"whole call over {PEER}, {what}": f"{peer_ms / row['call_ms']:.3f} alone, "
        f"{turns[PEER] / turns[what]:.3f} taking turns ({turns[PEER]:.1f} and {turns[what]:.1f} ms)"
        for what, row in zip(cases, rows, strict=True)
    }


def bench_conditions(kernel, heads, length, rows, grouping, rounds):
    """What the table asks of one kernel at one length beside its plain time, {condition: text}."""
    q, k, v = inputs(heads, length)
    found = {}
    means, plain = (
        next(r for r in rows if (r["kernel"], r["length"], r["what"]) == (kernel, length, what))
        for what in (MEANS, PLAIN)
    )
    peer_ms = bench_peer(q, k, v)
    if isinstance(peer_ms, float):
        found[f"{PEER}, whole call"] = f"{peer_ms:.1f} ms, {plain['cudnn_ms'] / peer_ms:.2f} over cuDNN"
        found |= bench_beside_peer(kernel, q, k, v, (means, plain), peer_ms, rounds)
    else:
        found[PEER] = peer_ms
    found |= bench_rising(kernel, q, k, v, (means, plain))
    rope = rope_price(kernel, q, k, v)
    found["preparation with rope"] = ", ".join(f"{name} {ms:.2f} ms" for name, ms in rope.items())
    ms = {"cold": grouping["cold_ms"], "warm": grouping["warm_ms"]}
    for name, row in (("means", means), ("plain", plain)):
        ms |= {f"kernel, {name}": row["kernel_ms"], f"prepare, {name}": row["prepare_ms"]}
    found["40 steps, from parts"] = f"{by_parts(ms):.4f} of the kernel ratio kept"
    whole, kernels = whole_schedule(kernel, q, k, v)
    found["40 steps, measured"] = (
        f"{whole / 40:.2f} ms a call, {kernels / whole:.4f} of the kernel ratio kept"
    )
    return found


def bench_lengths(options):
    """Rows of the kernels, of the grouping and of the other conditions."""
    rows, groupings, conditions = [], [], {}
    for length in options.lengths:
        q, k, v = inputs(options.heads, length)
        order = torch.rand(1, options.heads, length, device="cuda").argsort(-1).int()
        cudnn_ms = alone_ms(lambda q=q, k=k, v=v: cudnn(q, k, v))
        for kernel in options.kernels:
            cases = [(CONFIGS[MEANS], TokenGrouping(order, None), MEANS)]
            cases += [(CONFIGS[PLAIN], None, PLAIN)] * options.plain
            for config, grouping, label in cases:
                rows.append(bench_kernel(kernel, q, k, v, config, grouping, label, cudnn_ms, options.rounds))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
        del q, k, v, order
        first = next(row for row in rows if row["length"] == length)
        groupings.append(bench_grouping(options.heads, length, first["kernel_ms"]))
        if options.all:
            conditions[length] = bench_conditions(
                options.kernels[0], options.heads, length, rows, groupings[-1], options.rounds
            )
            print(markdown_conditions(conditions[length]), flush=True)
    return rows, groupings, conditions


def bench_64_channels(heads, length, rounds):
    """The automatic kernel on heads of 64 channels."""
    q, k, v = inputs(heads, length, channels=64)
    kernel = choose_kernel(AttentionProblem.of(q, k, v), untested=True).kernel.name
    cudnn_ms = alone_ms(lambda: cudnn(q, k, v))
    return bench_kernel(kernel, q, k, v, VCConfig(), None, "means, 64 channels", cudnn_ms, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 75600])
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each where they take turns")
    parser.add_argument("--plain", action="store_true", help="also as after the window: in token order")
    parser.add_argument(
        "--all", action="store_true", help="every condition, beside comfy-kitchen; Hopper's if none is named"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.kernels = options.kernels or (HOPPER if options.all else ["triton_int8_fp8"])
    options.plain |= options.all
    rows, groupings, conditions = bench_lengths(options)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16} if options.all else {}
    kinds = {name: errors_by_kind(options.kernels, dtype) for name, dtype in dtypes.items()}
    if options.all:
        rows.append(bench_64_channels(options.heads, min(options.lengths), options.rounds))
    facts = environment()
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    print(f"\n{text}\n\n{markdown(rows)}\n\n{markdown_grouping(groupings)}")
    for length, found in conditions.items():
        print(f"\n`{options.kernels[0]}`, {length:,} tokens\n\n{markdown_conditions(found)}")
    for name, found in kinds.items():
        print(f"\n{markdown_kinds(name, found)}")
    if options.json:
        measured = {"attention": rows, "grouping": groupings, "conditions": conditions, "kinds": kinds}
        options.json.write_text(json.dumps(facts | measured, indent=1))


if __name__ == "__main__":
    main()
