"""The Hopper kernels compile everywhere: registers, spills, and products that stay pipelined."""

import itertools
import re

import pytest
import torch
from comfyui_vc_attention.kernels.attend import cuda_build, cuda_int8_fp8_sm90
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.formats import EXPCAST_OFFSET, LOG2E
from comfyui_vc_attention.kernels.prepare.cuda_sm90 import largest_scales

from .compiled import SERIALISED, constant, packed_size, report, struct_size

reason = cuda_build.why_no_build()
builds = pytest.mark.skipif(reason is not None, reason=str(reason))


@builds
@pytest.mark.parametrize(("qk", "expcast", "means"), list(itertools.product((0, 1), repeat=3)))
def test_compiles_pipelined(qk, expcast, means):
    defines = (f"USE_INT8_QK={qk}", f"USE_EXPCAST={expcast}", f"USE_MEANS={means}")
    kernels, log = report(cuda_int8_fp8_sm90.SOURCE, "sm_90a", defines)
    assert not SERIALISED.findall(log), log
    # 128 at launch; setmaxnreg then moves 160 to each multiplying warpgroup
    registers, spilled = kernels["attend_e4m3"]
    assert registers == 128
    # a few bytes outside the loop cost nothing
    assert spilled <= 16


def test_host_and_device_agree_on_the_layout():
    frame = (cuda_int8_fp8_sm90.CSRC / "frame.cuh").read_text()
    constants = dict(re.findall(r"constexpr int (\w+) = ([^;]+);", frame))
    for name, expression in constants.items():
        if name not in ("KEY_RECORD", "VALUE_RECORD"):
            constants[name] = constant(expression, constants)
    assert constants["SHARED_BYTES"] == cuda_int8_fp8_sm90.SHARED_BYTES <= 227 * 1024
    assert constants["THREADS"] == cuda_int8_fp8_sm90.THREADS
    assert constants["BLOCK_ROWS"] == cuda_int8_fp8_sm90.BLOCK_ROWS
    assert packed_size(frame, "Call") == struct_size(cuda_int8_fp8_sm90.CALL)


def multiply_add(x, a, b):
    """fma of float32 numbers: the product is exact in float64."""
    return (x.double() * a.double() + b.double()).float()


def largest_code(a, top):
    """Byte that the kernel makes of the scores nearest to a row's maximum; a: code units per raw score."""
    preloaded = torch.tensor(12582912.0)
    raw = top[None] - torch.arange(3.0)[:, None]
    b = multiply_add(-preloaded, a, EXPCAST_OFFSET - top * a)
    return torch.round(multiply_add(preloaded + raw, a, b)).amax()


def test_no_score_within_the_cap_rounds_past_the_largest_code():
    generator = torch.Generator().manual_seed(0)
    unit = 8 * LOG2E * 0.1
    largest = torch.tensor(largest_scales(Recipe("int8_fp8"), 0.1) * unit)
    draw = torch.rand(200_000, generator=generator)
    top = torch.randint(-(127**2) * 128, 127**2 * 128, (200_000,), generator=generator).float()
    assert largest_code(largest * draw, top) <= 121
    # 127 is no number
    assert largest_code(50 * largest * draw, top) > 126
