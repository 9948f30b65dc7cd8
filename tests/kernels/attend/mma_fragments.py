"""The warp instructions of kernels/attend/csrc/mma.cuh and where its lanes point them, in Python.

After the PTX ISA, "Warp Level Matrix Load" and "Multiply-Accumulate", with lane 4 g + t. Shared memory is a
vector of bytes; a register holds one 32-bit word, here its bytes or its 16-bit elements.
"""

import torch

LANE = torch.arange(32)
G, T = LANE // 4, LANE % 4


def swizzled(rows):
    """[R, 128] bytes -> the image: 16-byte chunk c of row r at 16 (c ^ r % 8)."""
    chunks = rows.unflatten(-1, (8, 16))
    place = torch.arange(8)[None] ^ (torch.arange(len(rows))[:, None] % 8)
    return torch.empty_like(chunks).scatter(1, place[..., None].expand_as(chunks), chunks).flatten()


def a_address(image):
    return image + (LANE & 15) * 128 + (((LANE >> 4) ^ (LANE & 7)) << 4)


def b_address(image):
    return image + ((LANE & 7) + (LANE >> 4) * 8) * 128 + ((((LANE >> 3) & 1) ^ (LANE & 7)) << 4)


def step_address(first, step):
    return first ^ (step << 5)


def mean_address(means, j):
    """Where restore_means points at the means of channel groups j to j + 3."""
    return means + (LANE & 7) * 128 + j // 8 * 1024 + (((j % 8 + (LANE >> 3)) ^ (LANE & 7)) << 4)


def load_matrices(memory, at, transposed=False):
    """ldmatrix.x4 of lanes that point at `at`: [32 lanes, 4 registers, 2 elements, 2 bytes]."""
    rows = memory[at[:, None] + torch.arange(16)].unflatten(0, (4, 8)).unflatten(2, (8, 2))
    if transposed:
        rows = rows.transpose(1, 2)
    # a lane holds elements 2 t and 2 t + 1 of row g of each matrix
    return torch.stack([rows[:, G, 2 * T], rows[:, G, 2 * T + 1]], 2).transpose(0, 1)


def product(a, b):
    """m16n8k32: bytes a [32, 4, 4], b [32, 2, 4] as int64 -> sums [32, 4]."""
    rows, columns = torch.zeros(16, 32, dtype=torch.long), torch.zeros(8, 32, dtype=torch.long)
    for i in range(4):
        for byte in range(4):
            rows[G + i % 2 * 8, i // 2 * 16 + 4 * T + byte] = a[:, i, byte]
    for i in range(2):
        for byte in range(4):
            columns[G, 16 * i + 4 * T + byte] = b[:, i, byte]
    sums = rows @ columns.T
    return torch.stack([sums[G + i // 2 * 8, 2 * T + i % 2] for i in range(4)], 1)


def b_registers(loaded, second):
    """The two registers of one group of 8 columns out of load_matrices: [32, 2, 4 bytes]."""
    return loaded[:, 2 * second : 2 * second + 2].flatten(2)
