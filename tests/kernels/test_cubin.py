import pytest
from comfyui_vc_attention.kernels.attend import cuda_build
from comfyui_vc_attention.kernels.cubin import resources

SOURCE = """
extern "C" __global__ void lean(float* x) { __shared__ float s[32]; s[threadIdx.x] = x[threadIdx.x];
    __syncthreads(); x[threadIdx.x] = s[31 - threadIdx.x]; }
extern "C" __global__ void heavy(float* x, int n) { float local[64];
    for (int i = 0; i < 64; ++i) local[(int)x[i] & 63] = i; x[n] = local[n]; }
"""


@pytest.mark.skipif(cuda_build.why_no_build() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_registers_stack_and_shared_memory(arch, tmp_path):
    source = tmp_path / "x.cu"
    source.write_text(SOURCE)
    found = resources(cuda_build.compile_cubin(source, arch)[0])
    assert set(found) == {"lean", "heavy"}
    assert found["lean"].stack_bytes == 0 and found["lean"].shared_bytes in (128, 1024 + 128)
    assert found["heavy"].stack_bytes >= 256 and 1 < found["heavy"].registers < 256


def test_what_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="must be a 64-bit ELF file, got b'PTX'"):
        resources(b"PTX")
