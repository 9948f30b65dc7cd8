"""One attention call on one GPU and on two (Ulysses and ring through yunchang over NCCL): time and error.

python tests/kernels/parallel/two_cards.py [--tokens 75600] [--heads 40] [--kernel auto] [--json out.json]

Needs two GPUs of one host and yunchang; without GPUs it checks itself over gloo with small shapes. Prints one
line per case. A measurement, no test: pytest does not collect it.
"""

import argparse
import json
import os
import statistics
import tempfile

import ranks
import torch
import torch.distributed as dist

WARM_UP, REPEATS = 3, 10
EXACT_ROWS = 256  # queries whose exact attention is computed, spread over the sequence


def parse():
    cuda = torch.cuda.device_count() >= ranks.RANKS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=75_600 if cuda else 512)
    parser.add_argument("--heads", type=int, default=40 if cuda else 4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="auto" if cuda else "reference")
    parser.add_argument("--expcast", default="auto")
    parser.add_argument("--value-format", default="auto")
    parser.add_argument("--json")
    return parser.parse_args()


def median_ms(call, device):
    """Median wall time of a call that both ranks make, in milliseconds; the slower rank counts."""
    times = []
    for _ in range(WARM_UP + REPEATS if device.type == "cuda" else 2):
        dist.barrier()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            call()
            times.append(float("nan"))
    slowest = torch.tensor(statistics.median(times[WARM_UP:] or times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def error(out, qkv, rows):
    """Relative L2 of a few query rows against float32 attention, head by head."""
    from comfyui_vc_attention.kernels.testing import relative_l2

    q, k, v = qkv
    exact = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, head : head + 1].float() for x in (q[:, :, rows], k, v))
        )
        for head in range(q.shape[1])
    ]
    return relative_l2(out[:, :, rows], torch.cat(exact, 1))


@torch.inference_mode()
def measure(rank, options, folder):
    ranks.name_the_checkout()
    from comfyui_vc_attention.kernels import VCConfig, vc_attention
    from comfyui_vc_attention.kernels.parallel.sharded import ShardedAttention
    from comfyui_vc_attention.kernels.testing import sample_qkv

    cuda = torch.cuda.device_count() >= ranks.RANKS
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks.RANKS
    )
    config = VCConfig(expcast=options.expcast, value_format=options.value_format)
    shape = (1, options.heads, options.tokens, options.head_dim)
    qkv = sample_qkv("clustered", shape, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    rows = torch.linspace(0, options.tokens - 1, min(EXACT_ROWS, options.tokens)).long().to(device)
    mine = slice(rank * options.tokens // ranks.RANKS, (rank + 1) * options.tokens // ranks.RANKS)
    shard = [x[:, :, mine].transpose(1, 2).contiguous() for x in qkv]  # as models have it
    lines = []

    def add(case, out, ms):
        lines.append({"case": case, "ms": ms, "relative_l2": error(out, qkv, rows)})

    # both ranks do the whole call, so that both cards are as warm as with the split
    alone = vc_attention(*qkv, config, kernel=options.kernel)
    add("one card", alone, median_ms(lambda: vc_attention(*qkv, config, kernel=options.kernel), device))
    engine = ranks.Yunchang()
    for case, degrees in (("ulysses", (ranks.RANKS, 1)), ("ring", (1, ranks.RANKS))):
        engine.degrees(*degrees)
        sharded = ShardedAttention(config, kernel=options.kernel)
        layer = engine.layer(sharded)
        out = ranks.whole(layer(*shard).transpose(1, 2))
        add(case, out, median_ms(lambda layer=layer: layer(*shard), device))
        lines[-1]["equal_to_one_card"] = bool(out.equal(alone))
        lines[-1]["times_one_card"] = lines[0]["ms"] / lines[-1]["ms"]
    if rank == 0:
        report(options, device, lines)
    dist.destroy_process_group()


def report(options, device, lines):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, gloo"
    head = {**vars(options), "device": name, "torch": torch.__version__}
    print(head)
    for line in lines:
        print(line)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**head, "lines": lines}, file, indent=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (parse(), folder), nprocs=ranks.RANKS)
