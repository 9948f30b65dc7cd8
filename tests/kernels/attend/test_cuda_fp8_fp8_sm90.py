"""One source computes both: its E4M3 queries and keys compile in test_cuda_int8_fp8_sm90.py."""

from comfyui_vc_attention.kernels.attend import cuda_fp8_fp8_sm90, cuda_int8_fp8_sm90


def test_same_launch():
    assert cuda_fp8_fp8_sm90.attend is cuda_int8_fp8_sm90.attend
