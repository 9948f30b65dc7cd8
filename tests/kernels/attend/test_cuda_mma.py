"""The frame of the mma.sync kernels: its lanes find the right bytes, and host and device agree."""

import re

import pytest
import torch
from comfyui_vc_attention.kernels.attend import cuda_int8_fp8_sm89, cuda_int8_int8, cuda_mma

from .compiled import constant, packed_size, struct_size
from .mma_fragments import (
    G,
    T,
    a_address,
    b_address,
    b_registers,
    load_matrices,
    mean_address,
    product,
    step_address,
    swizzled,
)

FRAME = (cuda_mma.CSRC / "mma_frame.cuh").read_text()
A_IMAGE, B_IMAGE = 2048 * 5, 57600  # as the second warp of the second image, and the first value slot


def random_codes(low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def memory_of(image, at):
    memory = torch.full((2**17,), 99, dtype=torch.int16)
    memory[at : at + image.numel()] = image.to(torch.int16)
    return memory


def scores_of(q, k_rows):
    """multiply_qk of mma_frame.cuh: q [16, 128], k_rows [128, 128] -> a lane's [32, 64]."""
    q_memory, k_memory = memory_of(swizzled(q), A_IMAGE), memory_of(swizzled(k_rows), B_IMAGE)
    s = torch.zeros(32, 64, dtype=torch.long)
    for step in range(4):
        a = load_matrices(q_memory, step_address(a_address(A_IMAGE), step)).flatten(2).long()
        for i in range(0, 64, 8):
            b = load_matrices(k_memory, step_address(b_address(B_IMAGE), step) + i * 256).long()
            s[:, i : i + 4] += product(a, b_registers(b, 0))
            s[:, i + 4 : i + 8] += product(a, b_registers(b, 1))
    return s


def test_scores_probabilities_and_values_meet():
    """Scores in the K image's order, packed as the kernel packs, times the V image: in key order again."""
    key = torch.arange(128)
    a, i, b = key // 32, key % 32 // 4, key % 4
    k_row, v_byte = 16 * i + 8 * (b // 2) + 2 * a + b % 2, 16 * i + 4 * a + b
    q, k = random_codes(-127, 128, 16, 128), random_codes(-127, 128, 128, 128)
    k_rows = torch.empty_like(k)
    k_rows[k_row] = k
    s = scores_of(q, k_rows)
    exact = q @ k.T
    # column e of word i of lane t is key 32 t + 4 i + e
    for word in range(8):
        for e in range(4):
            at = 8 * word + 4 * (e // 2) + e % 2
            assert torch.equal(s[:, at], exact[G, 32 * T + 4 * word + e])
            assert torch.equal(s[:, at + 2], exact[G + 8, 32 * T + 4 * word + e])
    p = s % 256
    v = random_codes(-127, 128, 128, 128)  # [keys, channels]
    v_rows = torch.empty_like(v)
    v_rows[:, v_byte] = v.T
    v_memory = memory_of(swizzled(v_rows), B_IMAGE)
    bytes_of = torch.tensor([0, 1, 4, 5])
    for part in range(2):
        for block in range(0, 32, 8):
            n = torch.zeros(32, 8, dtype=torch.long)
            for step in range(4):
                at = step_address(b_address(B_IMAGE), step) + part * 8192 + block * 256
                loaded = load_matrices(v_memory, at).long()
                words = [p[:, 8 * (2 * step + h) + 2 * r + bytes_of] for h in (0, 1) for r in (0, 1)]
                fragment = torch.stack(words, 1)
                n[:, :4] += product(fragment, b_registers(loaded, 0))
                n[:, 4:] += product(fragment, b_registers(loaded, 1))
            expected = exact % 256 @ v
            for e in range(8):
                channel = 64 * part + 2 * block + 8 * (e // 4) + 2 * T + e % 2
                assert torch.equal(n[:, e], expected[G + 8 * (e // 2 % 2), channel])


def test_lanes_of_a_load_meet_no_bank_twice():
    for at in (a_address(0), b_address(0), mean_address(0, 4)):
        for matrix in at.view(4, 8):
            assert len(set((matrix // 16 % 8).tolist())) == 8


@pytest.mark.parametrize("second_half", [0, 1])
def test_means_of_eight_tiles(second_half):
    """A lane gets tiles 2 t and 2 t + 1 of channel 8 j + g, out of the preparation's image of 16 tiles."""
    means = random_codes(0, 2**15, 16, 128)
    as_bytes = torch.stack([means & 255, means >> 8], -1)  # [tile, channel, byte]
    record = torch.cat([swizzled(half.flatten(1)) for half in as_bytes.split(64, 1)])
    # load_values: 1024 bytes of each half
    at = torch.arange(128) * 16
    source = second_half * 1024 + at + at // 1024 * 1024
    memory = memory_of(record[(source[:, None] + torch.arange(16)).flatten()], B_IMAGE)
    for j in range(0, 16, 4):
        loaded = load_matrices(memory, mean_address(B_IMAGE, j), transposed=True).long()
        words = loaded[..., 0] + 256 * loaded[..., 1]
        for i in range(4):
            for e in range(2):
                assert torch.equal(words[:, i, e], means[8 * second_half + 2 * T + e, 8 * (j + i) + G])


def test_f16s_smallest_steps_are_rounded_integers():
    """pack_probabilities of cuda_int8_int8.cu on older cards: the bits of x * 2^-24 in f16 are round(x)."""
    x = torch.cat([torch.linspace(0, 255.49, 100_003), torch.arange(256.0), torch.arange(255) + 0.5])
    assert torch.equal((x * 2**-24).half().view(torch.int16).int(), x.round().int())


@pytest.mark.parametrize("module", [cuda_int8_int8, cuda_int8_fp8_sm89], ids=lambda m: m.SOURCE.stem)
def test_host_and_device_agree_on_the_layout(module):
    source = module.SOURCE.read_text()
    known = dict(
        re.findall(r"(?m)^\s*#define (KEY_SCALES|VALUE_RECORD|VALUE_BYTES|WARPS) (.+)$", source + FRAME)
    )
    known |= {"HEAD_DIM": 128} | dict(re.findall(r"constexpr int (\w+) = ([^;]+);", FRAME))
    for name, expression in known.items():
        # in the order of the sources, but VALUE_RECORD comes first
        known[name] = constant(expression, known)
        if name == "SHARED_BYTES":
            break
    assert known["SHARED_BYTES"] == module.SHARED_BYTES <= 99 * 1024
    assert known["THREADS"] == cuda_mma.THREADS and known["BLOCK_ROWS"] == cuda_mma.BLOCK_ROWS
    assert packed_size(FRAME, "Call") == struct_size(cuda_mma.CALL)
