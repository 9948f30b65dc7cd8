"""The Hopper kernels compile everywhere: registers, spills, and products that stay pipelined."""

import itertools
import re

import pytest
from comfyui_vc_attention.kernels.attend import cuda_build, cuda_int8_fp8_sm90

from .compiled import SERIALISED, packed_size, report, struct_size

reason = cuda_build.why_no_build()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


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
        if name != "VALUE_RECORD":
            constants[name] = int(eval(expression.replace("/", "//"), {}, constants))
    assert constants["SHARED_BYTES"] == cuda_int8_fp8_sm90.SHARED_BYTES <= 227 * 1024
    assert constants["THREADS"] == cuda_int8_fp8_sm90.THREADS
    assert constants["BLOCK_ROWS"] == cuda_int8_fp8_sm90.BLOCK_ROWS
    assert packed_size(frame, "Call") == struct_size(cuda_int8_fp8_sm90.CALL)
