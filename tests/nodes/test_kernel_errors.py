import pytest
import torch
from comfyui_vc_attention.nodes.kernel_errors import CudaContextLost, raise_unless_recoverable


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("HIP out of memory")]
)
def test_out_of_memory_goes_through(error):
    with pytest.raises(type(error)) as caught:
        raise_unless_recoverable(error, "triton_int8_fp8")
    assert caught.value is error


@pytest.mark.parametrize(
    "text", ["CUDA error: an illegal memory access was encountered", "CUDA error: misaligned address"]
)
def test_n20_a_lost_context_names_the_kernel_and_the_remedy(text):
    with pytest.raises(CudaContextLost, match=r"CUDA context lost, restart ComfyUI .*triton_int8_fp8"):
        raise_unless_recoverable(RuntimeError(text), "triton_int8_fp8")


@pytest.mark.parametrize(
    "error", [RuntimeError("no kernel image is available"), ValueError("k and v differ")]
)
def test_other_errors_are_survived(error):
    raise_unless_recoverable(error, "triton_int8_fp8")
