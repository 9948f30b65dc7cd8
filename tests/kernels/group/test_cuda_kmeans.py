"""The CUDA k-means compiles for every card; its seeds are the reference's."""

import pytest
import torch
from comfyui_vc_attention.kernels.attend import cuda_build
from comfyui_vc_attention.kernels.group import cuda_kmeans, reference

from ..attend.compiled import packed_size, report, struct_size

reason = cuda_build.why_no_build()


@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.parametrize(
    "case",
    ["sm_90 Bf16 128 1 1", "sm_80 Fp16 256 1 1", "sm_90 float 16 0 0"],
    ids=lambda c: c.replace(" ", "-"),
)
def test_compiles(case):
    arch, *values = case.split()
    names = ("INPUT", "CLUSTERS", "USE_UPDATE", "USE_WIDE")
    defines = tuple(f"{name}={value}" for name, value in zip(names, values, strict=True))
    kernels, _ = report(cuda_kmeans.SOURCE, arch, defines)
    assert set(kernels) == {"start_centroids", "assign", "move_centroids", "scan_counts", "scatter"}
    assert all(spilled <= 64 for _, spilled in kernels.values())


def test_host_packs_the_device_struct():
    assert packed_size(cuda_kmeans.SOURCE.read_text(), "Job") == struct_size(cuda_kmeans.JOB)


@pytest.mark.parametrize("clusters", [1, 7, 128])
def test_seeds_are_the_references(clusters):
    x = torch.arange(300.0)[None, None, :, None].expand(2, 1, -1, 1)
    exists = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) < 0.7
    for mask in (None, exists):
        seeds = cuda_kmeans._seeds(2, 300, clusters, mask, "cpu")
        want = reference.evenly_spaced(x, torch.ones_like(exists) if mask is None else mask, clusters)
        assert torch.equal(seeds.float(), want[:, 0, :, 0])


def test_refuses_what_it_cannot_group():
    assert cuda_kmeans.why_not(torch.empty(1, 1, 8, 128)) is None
    assert "head_dim 128" in cuda_kmeans.why_not(torch.empty(1, 1, 8, 64))
    assert "float64" in cuda_kmeans.why_not(torch.empty(1, 1, 8, 128, dtype=torch.float64))
