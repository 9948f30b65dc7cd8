"""The operands of m16n8k64 with scale_vec::4X as its 32 lanes hold them, and the twin of the product.

After the PTX ISA, "Warp Level Matrix Multiply-Accumulate", with lane 4 g + t; the same maps in CUDA are in
kernels/attend/csrc/nvfp4.cuh. Words are int64 that hold 32 bits.
"""

import torch
from comfyui_vc_attention.kernels import formats

LANE = torch.arange(32)
G, T = LANE // 4, LANE % 4
# key 32 a + 8 b + 2 c + d of a tile is column 2 b + d of octant 4 a + c of the K record
_A, _B, _C, _D = torch.meshgrid(*(torch.arange(n) for n in (4, 4, 4, 2)), indexing="ij")
KEY_ROW = (8 * (4 * _A + _C) + 2 * _B + _D).flatten()


def words_of(codes):
    """[.., 8] codes -> [..] words, the first code in the low nibble."""
    return (codes.long() << 4 * torch.arange(8)).sum(-1)


def scale_words_of(scales):
    """[.., 4] E4M3 bytes -> [..] words."""
    return (scales.long() << 8 * torch.arange(4)).sum(-1)


def a_words(codes):
    """A [16, 64] -> [32, 4]: register 2 h + r is row g + 8 r, columns 32 h + 8 t to + 7."""
    columns = 8 * T[:, None] + torch.arange(8)
    return torch.stack(
        [words_of(codes[(G + 8 * r)[:, None], columns + 32 * h]) for h in (0, 1) for r in (0, 1)], 1
    )


def b_words(codes):
    """B, its columns as rows [8, 64] -> [32, 2]: register h is column g, rows 32 h + 8 t to + 7."""
    rows = 8 * T[:, None] + torch.arange(8)
    return torch.stack([words_of(codes[G[:, None], rows + 32 * h]) for h in (0, 1)], 1)


def a_scale_words(scales, selector, others):
    """Scales [16, 4] of A: lane 2 selector + r of quad g has row g + 8 r, all other lanes have others."""
    word = torch.full((32,), others)
    for r in (0, 1):
        word[4 * G + 2 * selector + r] = scale_words_of(scales)[G + 8 * r]
    return word


def b_scale_words(scales, selector, others):
    """Scales [8, 4] of B: lane selector of quad g has column g."""
    word = torch.full((32,), others)
    word[4 * G + selector] = scale_words_of(scales)[G]
    return word


def doubled(codes):
    """Twice the value of E2M1 codes, integers."""
    return (2 * formats.from_e2m1(codes & 15)).long()


def ue4m3(codes):
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()


def twin(d, a, b, scale_a, scale_b, select_a, select_b):
    """What mma_nvfp4 does without the instruction, lane by lane: d fp32 [32, 4] -> fp32 [32, 4].

    d first, then the groups of 16 in ascending order; one rounding to fp32 a group.
    """
    row, column = LANE & 28, LANE % 4 * 8
    scales = [scale_a[row + 2 * select_a + i] for i in (0, 1)]
    scales += [scale_b[column + 4 * i + select_b] for i in (0, 1)]
    for group in range(4):
        half, sums = group // 2, torch.zeros(32, 4, dtype=torch.long)
        for t in (group % 2 * 2, group % 2 * 2 + 1):
            x = [a[row + t, 2 * half + i] for i in (0, 1)]
            y = [b[column + t + 4 * i, half] for i in (0, 1)]
            for nibble in range(8):
                for i in range(4):
                    sums[:, i] += doubled(x[i // 2] >> 4 * nibble) * doubled(y[i % 2] >> 4 * nibble)
        for i in range(4):
            scale = ue4m3(scales[i // 2] >> 8 * group & 255) * ue4m3(scales[2 + i % 2] >> 8 * group & 255)
            # the product has at most 20 bits, so float64 holds the sum before it is rounded
            d[:, i] = (0.25 * sums[:, i].double() * scale + d[:, i].double()).float()
    return d


def accumulator(d):
    """[32, 4] of the lanes -> [16, 8]."""
    out = torch.empty(16, 8, dtype=d.dtype)
    for i in range(4):
        out[G + 8 * (i // 2), 2 * T + i % 2] = d[:, i]
    return out


def record_rows(record):
    """A record [.., 9216] bytes -> packed codes [.., 128, 64] and E4M3 bytes [.., 128, 8] of its 128 rows."""
    codes = record[..., :8192].unflatten(-1, (16, 8, 4, 4, 4))  # octant, column, lane, 32 codes, bytes
    scales = record[..., 8192:].unflatten(-1, (8, 4, 4, 2, 4))  # column, octant % 4, octant / 4, step, bytes
    codes = codes.transpose(-3, -2).flatten(-3).flatten(-3, -2)
    scales = scales.movedim((-3, -4, -5), (-5, -4, -3)).flatten(-2).flatten(-4, -2)
    return codes, scales


def query_rows(words, scales):
    """A fragments int32 [.., 32, 8], scale words [.., 32] -> packed codes [.., 16, 64], bytes [.., 16, 8]."""
    codes = words.contiguous().view(torch.uint8).reshape(*words.shape[:-2], 8, 4, 2, 2, 2, 4)
    codes = codes.movedim((-2, -6, -4, -3, -5), (-6, -5, -4, -3, -2)).flatten(-4).flatten(-3, -2)
    packed = (
        scales.contiguous().view(torch.uint8).reshape(*scales.shape[:-1], 8, 2, 2, 4)
    )  # g, step, row, bytes
    return codes, packed.movedim((-2, -4, -3), (-4, -3, -2)).flatten(-2).flatten(-3, -2)
