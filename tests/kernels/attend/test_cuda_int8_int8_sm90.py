"""The integer Hopper kernel compiles everywhere: registers, spills, and products that stay pipelined."""

import pytest
from comfyui_vc_attention.kernels.attend import cuda_build, cuda_int8_int8_sm90

from .compiled import SERIALISED, report

reason = cuda_build.why_no_build()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.mark.parametrize(("means", "f16"), [(0, 0), (1, 0), (1, 1)])
def test_compiles_pipelined(means, f16):
    kernels, log = report(
        cuda_int8_int8_sm90.SOURCE, "sm_90a", (f"USE_MEANS={means}", f"USE_F16_MEANS={f16}")
    )
    assert not SERIALISED.findall(log), log
    assert kernels["attend_u8s8"] == (128, 0)
