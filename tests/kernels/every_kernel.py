"""One test for every kernel and numerics of the registry, skipped where that kernel does not run."""

import pytest
import torch
from comfyui_vc_attention.kernels import KERNELS
from comfyui_vc_attention.kernels.operands import AttentionProblem
from comfyui_vc_attention.kernels.registry import kernel_named

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [(spec.name, numerics) for spec in KERNELS for numerics in spec.numerics]
every_kernel = pytest.mark.parametrize(("name", "numerics"), ROWS, ids=["-".join(row) for row in ROWS])


def skip_unless_it_runs_here(name: str) -> None:
    """Triton kernels run in the interpreter where there is no GPU, others need their card."""
    if name.startswith("triton"):
        pytest.importorskip("triton")
    if DEVICE == "cuda" or name.startswith("cuda"):
        probe = torch.zeros(1, 1, 1, 128, device=DEVICE)
        why = kernel_named(name).why_not(AttentionProblem.of(probe, probe, probe))
        if why:
            pytest.skip(why)
