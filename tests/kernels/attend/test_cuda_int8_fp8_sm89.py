"""The f16-accumulator kernel: compiles for its cards, and its bound on sums holds."""

import pytest
import torch
from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.attend import cuda_build, cuda_int8_fp8_sm89
from comfyui_vc_attention.kernels.prepare import cuda_mma

from .compiled import report

reason = cuda_build.why_no_build()


@pytest.mark.skipif(reason is not None, reason=str(reason))
@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize(("expcast", "means"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_compiles(arch, expcast, means):
    defines = (f"USE_EXPCAST={expcast}", f"USE_MEANS={means}")
    kernels, _ = report(cuda_int8_fp8_sm89.SOURCE, arch, defines)
    registers, spilled = kernels["attend_e4m3"]
    # E4M3 products of sm_90 are expanded to 16 bits, which takes registers; it only tests the kernel
    assert registers <= 168 and spilled <= (96 if arch == "sm_90" else 24)


def test_no_sum_of_a_tile_overflows():
    # |residual| <= |v| + |mean| <= 2 amax|v|, the mean rounded to 11 bits; codes round to E4M3
    largest_code = formats.to_e4m3(torch.tensor(2 * (1 + 2**-11) * cuda_mma.VALUE_TOP)).float().item()
    assert largest_code == 1.75
    for step in range(1, 5):
        bound = step * 32 * formats.P_FP8_SCALE * largest_code
        # a bound that is an f16 number is not passed by rounding a sum that keeps to it
        assert torch.tensor(bound).half().item() == bound < torch.finfo(torch.float16).max
