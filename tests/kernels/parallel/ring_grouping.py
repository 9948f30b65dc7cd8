"""What grouping finds in one rank's part of the keys: the table of kernels/parallel/README.md.

python tests/kernels/parallel/ring_grouping.py  # a minute on a CPU
"""

import ranks
import torch

TOKENS, HEADS, D, DEVIATION, TILE = 16_384, 2, 128, 0.75, 128


def values(clusters):
    """Values around cluster centres, in random order: [1, H, L, D]."""
    generator = torch.Generator().manual_seed(0)
    centres = DEVIATION * torch.randn(1, HEADS, clusters, D, generator=generator)
    labels = torch.randint(0, clusters, (1, HEADS, TOKENS), generator=generator)
    noise = torch.randn(1, HEADS, TOKENS, D, generator=generator)
    return noise + centres.gather(2, labels[..., None].expand(-1, -1, -1, D))


def removed_and_error(v, order):
    """Share of the energy that tile means remove, and squared error of INT8 residuals over squared values."""
    tiles = v.gather(2, order.long()[..., None].expand_as(v)).unflatten(2, (-1, TILE))
    residuals = tiles - tiles.mean(3, keepdim=True)
    scale = residuals.abs().amax(3, keepdim=True) / 127
    error = (residuals / scale).round() * scale - residuals
    return [1 - (residuals.square().sum() / v.square().sum()), error.square().sum() / v.square().sum()]


@torch.inference_mode()
def main():
    ranks.name_the_checkout()
    from comfyui_vc_attention.kernels import VCConfig, group_tokens

    for clusters in (64, 256):
        v = values(clusters)
        token_order = torch.arange(TOKENS).expand(v.shape[:3])
        rows = [("token order", [removed_and_error(v, token_order)])]
        for parts in (1, 2, 4, 8):
            for groups in (VCConfig().clusters, VCConfig().clusters_for(TOKENS // parts)):
                shards = [part.contiguous() for part in v.chunk(parts, 2)]
                found = [removed_and_error(part, group_tokens(part, groups).order) for part in shards]
                rows.append((f"by {parts}, {groups} groups", found))
        for name, found in rows:
            removed, error = torch.tensor(found).mean(0)
            print(f"{clusters} clusters, {name}: removed {removed:.1%}, error {error.sqrt():.4f}", flush=True)


if __name__ == "__main__":
    main()
