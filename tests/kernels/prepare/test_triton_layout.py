"""Where keys sit inside a tile: one place each, one lane per K scale, the same lane for P and score."""

import torch
from comfyui_vc_attention.kernels.prepare.triton_layout import key_of_k_row, key_of_v_column


def test_every_key_has_one_place():
    for keys in (key_of_k_row(), key_of_v_column()):
        assert torch.equal(keys.sort().values, torch.arange(128))


def test_a_lane_of_four_sees_one_k_scale():
    lane = torch.arange(128) % 8 // 2  # which lane of four holds a column of a score tile
    assert torch.equal(key_of_k_row() // 32, lane)


def test_probabilities_stay_in_their_lane():
    place = torch.arange(128)
    score_lane, operand_lane = place % 8 // 2, place % 16 // 4
    assert torch.equal(score_lane[key_of_k_row().argsort()], operand_lane[key_of_v_column().argsort()])


def test_registers_keep_their_order():
    # reshape to [a, b, t, c] and exchange b and t, as the kernel does
    assert torch.equal(key_of_k_row().view(8, 2, 4, 2).transpose(1, 2).reshape(128), key_of_v_column())
