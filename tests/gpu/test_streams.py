"""Every kernel runs on the caller's stream: another one would read tensors that are not written yet."""

import pytest
import torch
from comfyui_vc_attention.kernels import (
    KERNELS,
    AttentionProblem,
    VCConfig,
    choose_kernel,
    group_tokens,
    vc_attention,
)
from comfyui_vc_attention.kernels.testing import sample_qkv

pytestmark = pytest.mark.gpu
CONFIGS = (VCConfig(), VCConfig(expcast="off", value_format="int8"), VCConfig("4-bit"))
CYCLES = 100_000_000  # about 50 ms: longer than all launches of a call


def config_for(q, name):
    """A config that the kernel computes on this card."""
    for config in CONFIGS:
        if choose_kernel(AttentionProblem.of(q, q, q, config), name).kernel is not None:
            return config
    return pytest.skip(choose_kernel(AttentionProblem.of(q, q, q), name).reason)


@pytest.mark.parametrize("name", [spec.name for spec in KERNELS if spec.name != "reference"])
def test_x01_work_goes_to_the_callers_stream(name):
    qkv = sample_qkv("clustered", (1, 2, 300, 128), 700, torch.bfloat16, "cuda")
    config = config_for(qkv[0], name)

    def attend(q, k, v):
        order = group_tokens(v, 8)
        return vc_attention(q, k, v, config, grouping=order, kernel=name, return_lse=True)

    expected = attend(*qkv)
    late = [torch.zeros_like(tensor) for tensor in qkv]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        for target, source in zip(late, qkv, strict=True):
            target.copy_(source)
        found = attend(*late)
        assert torch.cuda.default_stream().query()  # nothing was put there
        torch.cuda.current_stream().synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
