"""Pieces of the quantizers: rotation signs, rounding to codes."""

import pytest
import torch
from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.prepare.triton_rows import (
    exact_products,
    rotate,
    rotate_fp32,
    rotation_factors,
    rotation_signs,
    scale_of,
    to_codes,
)

triton = pytest.importorskip("triton")
tl = triton.language

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def codes_kernel(x, codes, N: tl.constexpr, FP8: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(codes + o_n, to_codes(tl.load(x + o_n), FP8))


@triton.jit
def rotate_kernel(x, signs, out, root, D: tl.constexpr, EXACT: tl.constexpr, ROPE: tl.constexpr):
    o_x = tl.arange(0, 64)[:, None] * D + tl.arange(0, D)[None, :]
    if EXACT:
        b_h = tl.load(signs + tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :])
        tl.store(out + o_x, rotate(tl.load(x + o_x), b_h, root))
    else:
        tl.store(out + o_x, rotate_fp32(tl.load(x + o_x), signs, root, ROPE))


@triton.jit
def scale_kernel(amax, scale, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(scale + o_n, scale_of(tl.load(amax + o_n), 127.0))


def test_signs_are_the_rotation_without_its_scale():
    signs = rotation_signs(64, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(signs / 8, formats.hadamard_matrix(64))
    assert signs.abs().eq(1).all()


def test_int8_codes_round_to_even_and_clamp():
    x = torch.cat([torch.linspace(-130, 130, 2047), torch.tensor([0.5])]).to(DEVICE)
    x[:4] = torch.tensor([1.5, 2.5, -1.5, -2.5])
    codes = torch.empty(2048, dtype=torch.int8, device=DEVICE)
    codes_kernel[(1,)](x, codes, N=2048, FP8=False)
    assert torch.equal(codes, formats.to_int8(x))


def test_e4m3_codes_round_to_even_carry_and_saturate():
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("E4M3 needs sm_89 or newer")
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-500, 500, 4096), 0.02 * torch.randn(4096, generator=generator)]).to(DEVICE)
    codes = torch.empty(8192, dtype=torch.float8_e4m3fn, device=DEVICE)
    codes_kernel[(1,)](x, codes, N=8192, FP8=True)
    assert torch.equal(codes.float(), formats.to_e4m3(x).float())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", [0, 1, 2], ids=["plain", "interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotation_is_exact_to_float32(dtype, layout, head_dim):
    x = (torch.randn(64, head_dim, generator=torch.Generator().manual_seed(1)) + 3).to(dtype).to(DEVICE)
    exact = exact_products(dtype, layout)
    if not exact:
        x = x.float() * 1.2345  # more bits than 16-bit numbers have
    signs = rotation_signs(head_dim, x.dtype, x.device) if exact else rotation_factors(head_dim, x.device)
    out = torch.empty(64, head_dim, device=DEVICE)
    rotate_kernel[(1,)](x, signs, out, head_dim**-0.5, D=head_dim, EXACT=exact, ROPE=layout)
    expected = x.double() @ formats.hadamard_matrix(head_dim, torch.float64, DEVICE)
    assert (out - expected).abs().max() < 1e-5


def test_scale_of_nothing_is_one():
    amax = torch.tensor([0.0, 127.0, 1e-30, 5.0], device=DEVICE)
    scale = torch.empty(4, device=DEVICE)
    scale_kernel[(1,)](amax, scale, N=4)
    assert torch.equal(scale, torch.where(amax > 0, amax / 127, 1.0))
