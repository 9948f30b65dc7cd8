"""Number formats, and what the paper states about ExpCast (Eq. 7 to 15)."""

import math

import pytest
import torch
from comfyui_vc_attention.kernels import expcast_codes, formats

OCTAVE = -torch.arange(1, 200_001, dtype=torch.float64) / 200_000  # u over one doubling


def decode(codes):
    return codes.view(torch.float8_e4m3fn).double()


def cast_codes(u):
    """The byte of the conventional path: exponentiate in high precision, then cast."""
    return formats.to_e4m3((256 * torch.exp2(u.double())).float()).view(torch.uint8)


def test_the_papers_example():
    u = torch.tensor([-1.60])
    assert expcast_codes(u).item() == 107 == 8 * 13 + 3
    assert decode(expcast_codes(u)).item() == 88
    assert cast_codes(u).item() == 107


def test_same_byte_on_79_6_percent_of_a_doubling_and_one_code_apart_elsewhere():
    difference = expcast_codes(OCTAVE.float()).int() - cast_codes(OCTAVE).int()
    assert difference.abs().max() == 1
    assert (difference == 0).double().mean().item() == pytest.approx(0.796, abs=5e-4)


def test_every_doubling_looks_the_same_in_the_normal_range():
    codes = expcast_codes(OCTAVE.float())
    for octave in range(1, 14):
        shifted = expcast_codes((OCTAVE - octave).float())
        assert (shifted.int() - (codes.int() - 8 * octave)).abs().max() <= 1
        assert (shifted.int() == codes.int() - 8 * octave).double().mean() > 0.9999


def test_decoded_ratio_stays_in_its_bounds():
    ratio = decode(expcast_codes(OCTAVE.float())) / (256 * torch.exp2(OCTAVE))
    assert ratio.min() >= 0.92899 and ratio.max() <= 1.0746
    # the bounds are tight: the interval is attained, not only contained
    assert ratio.min() < 0.9295 and ratio.max() > 1.0740


def test_mean_ratio_is_the_constant_of_the_log_sum_exp():
    ratio = decode(expcast_codes(OCTAVE.float())) / (256 * torch.exp2(OCTAVE))
    assert ratio.mean().item() == pytest.approx(formats.EXPCAST_MEAN_RATIO, abs=2e-5)


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0, 20.0])
def test_total_variation_of_a_row_stays_under_the_bound(spread):
    scores = spread * torch.randn(200, 4096, generator=torch.Generator().manual_seed(int(spread * 10)))
    u = (scores - scores.amax(1, keepdim=True)).double() * math.log2(math.e)
    exact = torch.softmax(u * math.log(2), 1)
    decoded = decode(expcast_codes(u.float()))
    ours = decoded / decoded.sum(1, keepdim=True)
    underflow = u < -14
    tau = torch.maximum((exact * underflow).sum(1), (ours * underflow).sum(1))
    total_variation = 0.5 * (exact - ours).abs().sum(1)
    assert (total_variation < 0.0364 + tau).all()
    assert total_variation.max() > 0.001  # not trivially zero


def test_ends_of_the_range():
    u = torch.tensor([0.0, -torch.inf, float("nan"), -14.0, -14.95, -15.1, -1e30])
    assert expcast_codes(u).tolist() == [120, 0, 0, 8, 0, 0, 0]
    assert decode(expcast_codes(torch.zeros(1))).item() == 256


def test_no_code_is_nan():
    assert expcast_codes(torch.linspace(-40, 0, 100_001)).max() == 120


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_rotation_keeps_dot_products(head_dim):
    h = formats.hadamard_matrix(head_dim, torch.float64)
    torch.testing.assert_close(h @ h.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (h.abs() * math.sqrt(head_dim)).round().unique().tolist() == [1.0]


def test_rotation_refuses_other_head_dims():
    with pytest.raises(ValueError, match="power of two of at most 128, got 96"):
        formats.hadamard_matrix(96)


def test_signs_are_balanced_and_fixed():
    signs = formats.hadamard_signs(128)
    assert set(signs) == {1.0, -1.0} and 48 <= signs.count(1.0) <= 80
    assert formats.hadamard_signs(64) == signs[:64]


def test_int8_rounds_to_nearest_even_and_never_gives_minus_128():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 300.0, -300.0])
    assert formats.to_int8(x).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -127]


def test_e4m3_rounds_to_nearest_even_and_saturates():
    x = torch.tensor([1.0625, 1.1875, 500.0, -500.0, 2**-10, 1.5 * 2**-9])
    assert formats.to_e4m3(x).float().tolist() == [1.0, 1.25, 448.0, -448.0, 0.0, 2 * 2**-9]


def test_e2m1_ties_go_to_even():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.from_e2m1(formats.to_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert formats.from_e2m1(formats.to_e2m1(-ties)).tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_e2m1_is_the_nearest_value():
    x = torch.linspace(-8, 8, 4001)
    table = formats.from_e2m1(torch.arange(16))
    nearest = (x[:, None] - table).abs().amin(1)
    assert torch.equal((x - formats.from_e2m1(formats.to_e2m1(x))).abs(), nearest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_e2m1_next_to_a_tie_and_of_what_is_no_number(dtype):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    down, up = (torch.nextafter(ties, torch.full_like(ties, far)) for far in (0.0, 9.0))
    assert formats.to_e2m1(down).tolist() == list(range(7)) and formats.to_e2m1(up).tolist() == list(
        range(1, 8)
    )
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0], dtype=dtype)
    assert formats.to_e2m1(odd).tolist() == [7, 15, 0, 8]


def test_nibbles_pack_and_unpack():
    codes = torch.arange(32, dtype=torch.uint8).reshape(2, 16) % 16
    packed = formats.pack_nibbles(codes)
    assert packed[0, 0].item() == 0x10  # even index in the low nibble
    assert torch.equal(formats.unpack_nibbles(packed), codes)
