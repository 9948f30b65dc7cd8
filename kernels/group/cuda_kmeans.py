"""group_tokens on NVIDIA GPUs: k-means whose Lloyd steps see a sample of the tokens (csrc/cuda_kmeans.cu)."""

from pathlib import Path

import torch

from ..attend.cuda_build import MOST_HEADS, load_module, pack
from ..operands import TokenGrouping

SOURCE = Path(__file__).parent / "csrc" / "cuda_kmeans.cu"
HEAD_DIM = 128
CHUNK = 1024  # tokens of a block
TOKENS = 128  # tokens of a tile of the update
SAMPLE_STRIDE = 7  # one token in 7 (chosen; odd, so that no row length of a video lines up with it)
TOKENS_PER_CLUSTER = 64  # the sample holds at least so many where there are as many (chosen)
# chosen from tests/bench/NOTES.md, "Lloyd steps": more of them remove no more energy
COLD_ITERATIONS = 4  # from evenly spaced seeds
WARM_ITERATIONS = 1  # from the centroids of an earlier denoising step
INPUTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "float"}
JOB = "PqqqPPPPPPPPPPqiiii"  # struct Job


def why_not(v: torch.Tensor) -> str | None:
    """None if this module can group v, else the reason."""
    if v.shape[-1] != HEAD_DIM:
        return f"needs head_dim {HEAD_DIM}, got {v.shape[-1]}"
    if v.dtype not in INPUTS:
        return f"takes bf16, fp16 and fp32, got {v.dtype}"
    heads = v.shape[0] * v.shape[1]
    if heads > MOST_HEADS:
        return f"takes at most {MOST_HEADS:,} heads of all batches, got {heads:,}"
    return None


def group_tokens(v, clusters, previous=None, key_mask=None, *, iterations=None) -> TokenGrouping:
    """Order that lists each head's keys cluster by cluster; arguments and result as group/reference.py.

    Equal inputs give equal orders. No host synchronisation.
    """
    batch, heads, tokens, _ = v.shape
    device, all_heads = v.device, batch * heads
    if iterations is None:
        iterations = COLD_ITERATIONS if previous is None else WARM_ITERATIONS
    padded = -(-clusters // 16) * 16
    stride = max(1, min(SAMPLE_STRIDE, tokens // (TOKENS_PER_CLUSTER * clusters)))
    sample_chunks, chunks = -(-tokens // (stride * CHUNK)), -(-tokens // CHUNK)
    exists = None if key_mask is None else key_mask.contiguous()
    seeds = None
    if previous is None:
        seeds = _seeds(batch, tokens, clusters, exists, device)
        centroids = torch.empty(batch, heads, clusters, HEAD_DIM, device=device)
    else:
        centroids = previous.centroids.float().clone(memory_format=torch.contiguous_format)

    def integers(*shape):
        return torch.empty(shape, dtype=torch.int32, device=device)

    narrow = torch.empty(all_heads, padded, HEAD_DIM, dtype=torch.int16, device=device)
    half_norms = torch.empty(all_heads, padded, device=device)
    labels = torch.empty(all_heads, tokens, dtype=torch.int16, device=device)
    sums = torch.empty(all_heads, sample_chunks, padded, HEAD_DIM, device=device)
    counts, offsets = (integers(all_heads, chunks, padded + 1) for _ in range(2))
    order = integers(batch, heads, tokens)

    def job(job_chunks, job_stride):
        return pack(
            JOB,
            v, *v.stride()[:3],
            exists, seeds, centroids, narrow, half_norms, sums, counts, labels, offsets, order,
            tokens, heads, clusters, job_chunks, job_stride,
        )  # fmt: skip

    step, full = (_load(v, padded, update) for update in (True, False))
    full.launch("start_centroids", (padded, all_heads), HEAD_DIM, job(chunks, 1))
    for _ in range(iterations):
        sample = job(sample_chunks, stride)
        step.launch("assign", (sample_chunks, all_heads), 256, sample, shared=_shared_bytes(padded, True))
        step.launch("move_centroids", (padded, all_heads), HEAD_DIM, sample)
    everything = job(chunks, 1)
    full.launch("assign", (chunks, all_heads), 256, everything, shared=_shared_bytes(padded, False))
    full.launch("scan_counts", (all_heads,), 512, everything)
    full.launch("scatter", (chunks, all_heads), CHUNK, everything)
    return TokenGrouping(order, centroids)


def _load(v, padded, update):
    capability = torch.cuda.get_device_capability(v.device)
    vector = 16 // v.element_size()
    wide = v.data_ptr() % 16 == 0 and all(stride % vector == 0 for stride in v.stride()[:3])
    switches = {
        "INPUT": INPUTS[v.dtype],
        "CLUSTERS": padded,
        "USE_UPDATE": int(update),
        "USE_WIDE": int(wide),
    }
    arch = f"sm_{capability[0]}{capability[1]}"
    return load_module(SOURCE, arch, v.device, tuple(f"{name}={value}" for name, value in switches.items()))


def shared_bytes(clusters: int) -> int:
    """What a block of the hungriest kernel needs."""
    return _shared_bytes(-(-clusters // 16) * 16, True)


def _shared_bytes(padded, update):
    """Centroids at 320 bytes, half norms, counts, labels of a tile; for the update the tile itself."""
    return padded * 328 + 64 + TOKENS * 2 + (TOKENS * 272 if update else 0)


def _seeds(batch, tokens, clusters, exists, device):
    """int32 [B, clusters]: existing tokens at even distances, as the reference's."""
    steps = torch.arange(clusters, device=device)[None]
    if exists is None:
        return (steps * tokens // clusters).expand(batch, -1).int().contiguous()
    listed = (~exists).to(torch.uint8).argsort(dim=1, stable=True)
    return listed.gather(1, steps * exists.sum(1, keepdim=True) // clusters).int()
