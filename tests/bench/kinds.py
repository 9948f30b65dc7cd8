"""Errors on five kinds of tensors, beside comfy-kitchen's INT8 attention where it is installed."""

import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.benchmark_peers import PEERS
from comfyui_vc_attention.kernels.testing import KINDS, relative_l2, sample_qkv
from timing import alone_ms

LENGTH, HEADS, ROWS = 32768, 4, 512
PEER = "comfy-kitchen INT8"


def peer():
    return next(peer for peer in PEERS if peer.name == PEER)


def bench_peer(q, k, v):
    """Milliseconds of the peer's whole call, or why there are none."""
    reason = peer().why_not(q)
    if reason:
        return reason
    return alone_ms(lambda: peer().attend(q, k, v), calls=4)


def errors_by_kind(kernels, dtype, clusters=128):
    """{method: {kind: relative L2 against float32 attention}}; grouped means, and "no means".

    The rounding of the output is in every error: about 0.0017 in bf16, 0.0002 in fp16. Where values are
    smooth that is most of an INT8 kernel's error in bf16; the ratio of two kernels is theirs only in fp16.
    """
    found = {}
    for kind in KINDS:
        q, k, v = sample_qkv(kind, (1, HEADS, LENGTH, 128), dtype=dtype, device="cuda", seed=11)
        exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, :ROWS].float(), k.float(), v.float())

        def add(name, out, exact=exact, kind=kind):
            found.setdefault(name, {})[kind] = relative_l2(out[:, :, :ROWS], exact)

        if peer().why_not(q) is None:
            add(PEER, peer().attend(q, k, v))
        grouping = group_tokens(v, clusters)
        for kernel in kernels:
            add(kernel, vc_attention(q, k, v, VCConfig(), grouping=grouping, kernel=kernel))
            add(f"{kernel}, no means", vc_attention(q, k, v, VCConfig(demean=False), kernel=kernel))
    return found


def markdown_kinds(name, found):
    """Errors with tensors of the named dtype, and what int8_int8 has of the peer's."""
    lines = [f"| L={LENGTH:,}, {name}, relative L2 | {' | '.join(KINDS)} |", "|" + "---|" * (1 + len(KINDS))]
    lines += [f"| {name} | {' | '.join(f'{row[k]:.4f}' for k in KINDS)} |" for name, row in found.items()]
    if PEER in found:
        for name, row in found.items():
            if "int8_int8" in name:
                shares = " | ".join(f"{row[k] / found[PEER][k]:.3f}" for k in KINDS)
                lines.append(f"| {name}, over {PEER} | {shares} |")
    return "\n".join(lines)
