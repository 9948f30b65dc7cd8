"""The shared frame: which keys of the last tile exist, maxima after scales, the bound on a score."""

import pytest
import torch
from comfyui_vc_attention.kernels import formats
from comfyui_vc_attention.kernels.attend.triton_frame import (
    capability_of,
    exists_in_tile,
    has_packing_casts,
    largest_factor,
    launch_shape,
    scaled_scores,
    tile_maximum,
    tile_scores,
)
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.prepare.triton_int8_fp8 import prepare
from comfyui_vc_attention.kernels.prepare.triton_layout import key_of_k_row, key_of_v_column
from comfyui_vc_attention.kernels.testing import sample_qkv

triton = pytest.importorskip("triton")
tl = triton.language

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def exists_kernel(out, left):
    b_exists = tl.reshape(tl.broadcast_to(exists_in_tile(left), [16, 8, 4, 2, 2]), [16, 128])
    o_out = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + o_out, b_exists.to(tl.int32))


@triton.jit
def scores_kernel(q, k, k_scale, out, maximum, left, MASKED: tl.constexpr):
    o_m, o_n = tl.arange(0, 64), tl.arange(0, 128)
    b_q = tl.load(q + o_m[:, None] * 128 + o_n[None, :])
    b_ones = tl.full([64], 1.0, tl.float32)
    p_k = k + o_n[:, None] * 128 + o_n[None, :]
    b_s, b_scale = tile_scores(b_q, b_ones, tl.load(p_k), k_scale, 64, False)
    b_x = scaled_scores(b_s, b_scale, b_ones * 0.5, left, 64, MASKED)
    tl.store(out + o_m[:, None] * 128 + o_n[None, :], b_x)
    tl.store(maximum + o_m, tile_maximum(b_s, b_scale, left, 64, False, MASKED))


@pytest.mark.parametrize("left", [1, 31, 32, 33, 127])
def test_the_first_keys_exist(left):
    out = torch.empty(16, 128, dtype=torch.int32, device=DEVICE)
    exists_kernel[(1,)](out, left)
    assert torch.equal(out[3].bool().cpu(), key_of_v_column() < left)


@pytest.mark.parametrize("left", [128, 40])
def test_scores_carry_the_scale_of_their_key(left):
    generator = torch.Generator().manual_seed(6)
    q, k = (torch.randint(-127, 128, (n, 128), generator=generator, dtype=torch.int8) for n in (64, 128))
    scale = torch.tensor([1.0, 8.0, 0.25, 0.0 if left < 96 else 2.0])
    out, maximum = torch.empty(64, 128, device=DEVICE), torch.empty(64, device=DEVICE)
    stored = k[key_of_k_row()].to(DEVICE)
    scores_kernel[(1,)](q.to(DEVICE), stored, scale.to(DEVICE), out, maximum, left, MASKED=left < 128)
    expected = (q.double() @ k.double().T) * scale.repeat_interleave(32).double()
    expected[:, left:] = -torch.inf
    out = out.cpu()[:, key_of_v_column().argsort()].double()
    torch.testing.assert_close(out, expected + 0.5, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(maximum.cpu().double(), expected.amax(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("numerics", ["int8_fp8", "fp8_fp8"])
def test_no_score_passes_the_bound(numerics):
    q, k, v = sample_qkv("gauss", (1, 1, 2, 64), device=DEVICE)
    operands = prepare(q, k, v, Recipe(numerics), softmax_scale=1.0)
    top = 448 if numerics == "fp8_fp8" else 127
    assert largest_factor(operands, 8.0) * top * top * 64 == pytest.approx(8 * formats.LARGEST_SCORE_LOG2)


def test_a_cpu_gets_the_plain_path():
    cpu = torch.device("cpu")
    assert not has_packing_casts(cpu)
    assert capability_of(cpu) is None


@pytest.mark.parametrize(
    ("capability", "int8_values", "fp8_values"),
    [
        ((9, 0), (64, 3), (64, 3)),
        ((10, 0), (64, 3), (64, 3)),
        ((8, 0), (32, 2), (64, 1)),
        ((8, 9), (32, 2), (64, 1)),
        ((12, 0), (32, 2), (64, 1)),
        (None, (32, 2), (64, 1)),
    ],
)
def test_launch_shapes_are_the_measured_ones(capability, int8_values, fp8_values):
    assert launch_shape(capability, fp8_values=False) == int8_values
    assert launch_shape(capability, fp8_values=True) == fp8_values
