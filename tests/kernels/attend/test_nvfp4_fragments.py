"""The lanes' maps of the 4-bit product: what is put in comes out, and the twin multiplies what it should."""

import pytest
import torch
from comfyui_vc_attention.kernels import formats

from . import nvfp4_fragments as f


def draw(*shape, low=0, high=16, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def values(codes, scales):
    """float64 of codes [n, 64] with scales [n, 4]."""
    return formats.from_e2m1(codes, torch.float64) * f.ue4m3(scales).repeat_interleave(16, 1)


@pytest.mark.parametrize("select_a", [0, 1])
@pytest.mark.parametrize("select_b", [0, 1, 2, 3])
def test_the_twin_multiplies(select_a, select_b):
    a, b = draw(16, 64), draw(8, 64, seed=1)
    # of one binade, so that every sum is exact in fp32, whatever its order
    scale_a, scale_b = draw(16, 4, low=0x38, high=0x40, seed=2), draw(8, 4, low=0x38, high=0x40, seed=3)
    words = f.a_scale_words(scale_a, select_a, 0x7E7E7E7E), f.b_scale_words(scale_b, select_b, 0x7E7E7E7E)
    d = f.twin(torch.zeros(32, 4), f.a_words(a), f.b_words(b), *words, select_a, select_b)
    exact = values(a, scale_a) @ values(b, scale_b).T
    assert torch.equal(f.accumulator(d).double(), exact)


def test_the_twin_adds_groups_of_16_in_order():
    a, b = draw(16, 64, seed=4), draw(8, 64, seed=5)
    scale_a, scale_b = draw(16, 4, high=0x7F, seed=6), draw(8, 4, high=0x7F, seed=7)
    start = 1000 * torch.rand(32, 4, generator=torch.Generator().manual_seed(8))
    expected = f.accumulator(start)
    for group in range(4):
        part = slice(16 * group, 16 * group + 16)
        product = values(a, scale_a)[:, part] @ values(b, scale_b)[:, part].T
        expected = (expected.double() + product).float()
    d = f.twin(
        start.clone(),
        f.a_words(a),
        f.b_words(b),
        f.a_scale_words(scale_a, 0, 0),
        f.b_scale_words(scale_b, 0, 0),
        0,
        0,
    )
    assert torch.equal(f.accumulator(d), expected)


def test_a_record_gives_back_its_rows():
    """Built by the words of test_the_twin_multiplies: octant j is columns 8 j to 8 j + 7, step by step."""
    codes, scales = draw(128, 128), draw(128, 8, high=0x7F, seed=1)
    record = torch.empty(9216, dtype=torch.uint8)
    words = record.view(torch.int32)[:2048].view(16, 32, 4)
    scale_words = record.view(torch.int32)[2048:].view(32, 4, 2)
    for j in range(16):
        octant = slice(8 * j, 8 * j + 8)
        for step in (0, 1):
            words[j, :, 2 * step : 2 * step + 2] = to_int32(
                f.b_words(codes[octant, 64 * step : 64 * step + 64])
            )
            lanes = f.LANE[j % 4 == f.T]
            of_step = f.b_scale_words(scales[octant, 4 * step : 4 * step + 4], j % 4, 0)
            scale_words[lanes, j // 4, step] = to_int32(of_step[lanes])
    packed, back = f.record_rows(record)
    assert torch.equal(formats.unpack_nibbles(packed).long(), codes) and torch.equal(back.long(), scales)


def test_query_fragments_give_back_their_rows():
    codes, scales = draw(16, 128), draw(16, 8, high=0x7F, seed=1)
    words, scale_words = torch.empty(32, 8, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    for step in (0, 1):
        words[:, 4 * step : 4 * step + 4] = to_int32(f.a_words(codes[:, 64 * step : 64 * step + 64]))
        scale_words += to_int32(f.a_scale_words(scales[:, 4 * step : 4 * step + 4], step, 0))
    packed, back = f.query_rows(words, scale_words)
    assert torch.equal(formats.unpack_nibbles(packed).long(), codes) and torch.equal(back.long(), scales)


def test_a_lane_has_eight_consecutive_keys_of_each_32():
    """So that its scores, column 2 t + e of octant j, are the second product's A fragment in key order."""
    assert torch.equal(f.KEY_ROW.sort().values, torch.arange(128))
    key_of_row = f.KEY_ROW.argsort()
    for t in range(4):
        held = [int(key_of_row[8 * j + 2 * t + e]) for j in range(16) for e in (0, 1)]
        assert held == [32 * (i // 8) + 8 * t + i % 8 for i in range(32)]


def to_int32(words):
    return (words & 0xFFFFFFFF).to(torch.int64).sub(torch.where(words >= 2**31, 2**32, 0)).to(torch.int32)
