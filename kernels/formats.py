"""Number formats, tile sizes and the constants of the recipes. Each constant lives here once."""

import functools
import math

import torch

TILE = 128  # consecutive keys that share one tile mean; the unit of the kernel loop (paper 3.2, B_v)
# Consecutive keys of a tile that share one K scale: 8 would leave 3% less error on N(0, 1), 128 has 4% more
# (tests/evidence, "Output error": K scale per N keys); 32 is free in the accumulator layout
K_GROUP = 32
MICRO = 16  # elements that share one NVFP4 microscale, along the contraction
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

INT8_MAX = 127.0
UINT8_MAX = 255.0
# Keys that a tile's rounding error is averaged over besides its own (I1): few keys have no small step to make
# up for it with (chosen: least error at 128 keys, none added at any number)
ROUNDING_PRIOR = 32
E4M3_MAX = 448.0  # largest finite float8_e4m3fn
E2M1_MAX = 6.0
E2M1_BELOW = 4.0  # the value below: as a group's largest it leaves finer steps for the others
NVFP4_MAX = E4M3_MAX * E2M1_MAX  # 2688: largest value of a code times a microscale
V_FP8_MAX = 224.0  # V is scaled to half of E4M3, so that |v - mean| <= 2 amax cannot saturate

P_FP8_SCALE = 256.0  # the row maximum lands on 2^8, code 120 (Eq. 7)
EXPCAST_SLOPE = 8.0  # E4M3 codes per octave
EXPCAST_OFFSET = 119.65  # 8 * 8 + 56 + beta, beta = -0.35 centres the straight-line error (Eq. 7)
EXPCAST_TOP = 120  # code of 256
EXPCAST_MEAN_RATIO = 1.00928  # mean of decoded over exact probability across one octave (Eq. 10)

# past this many octaves float32 no longer resolves a score to a fraction of a code, and a code could leave
# its range; INT8 scores of that size are one-hot and wrong by more than the cap moves them (C4)
LARGEST_SCORE_LOG2 = float(1 << 17)

HEAD_DIMS = (64, 128)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Drawn once at random; bit c set means channel c is negated before the Hadamard transform. A fixed sign
# vector breaks up channels that would line up with a Hadamard row.
SIGN_BITS = 0x1A85097CB382486493F33B1BA42DD34F


@functools.cache
def hadamard_signs(head_dim: int) -> tuple[float, ...]:
    """The fixed vector of +1 and -1 that is applied before the Hadamard transform."""
    return tuple(-1.0 if SIGN_BITS >> c & 1 else 1.0 for c in range(head_dim))


def hadamard_matrix(head_dim: int, dtype=torch.float32, device=None) -> torch.Tensor:
    """Rotation of C2: diag(sign) @ H / sqrt(D), [D, D]; a row vector times it is rotated.

    Raises ValueError unless head_dim is a power of two of at most 128.
    """
    if head_dim & (head_dim - 1) or not 1 <= head_dim <= 128:
        raise ValueError(f"rotation needs head_dim a power of two of at most 128, got {head_dim}")
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < head_dim:  # Sylvester's construction
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    signs = torch.tensor(hadamard_signs(head_dim), dtype=torch.float64)
    return (signs[:, None] * h / math.sqrt(head_dim)).to(dtype).to(device)


def tile_count(keys: int) -> int:
    return -(-keys // TILE)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to nearest even into float8_e4m3fn, saturating at +-448 (torch's cast gives NaN there)."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Round to nearest even into int8, clamped to +-127."""
    return torch.round(x).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIE_DOWN = (0.25, 1.25, 2.5, 5.0)  # midpoints whose even neighbour is the lower code
_E2M1_TIE_UP = (0.75, 1.75, 3.5)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 (bit 3 is the sign), uint8; round to nearest even, saturating at +-6."""
    wide = x if x.dtype == torch.float64 else x.float()
    size = torch.nan_to_num(wide.abs(), nan=0.0, posinf=E2M1_MAX)
    code = torch.bucketize(size, _e2m1_edges(size.dtype, size.device)).to(torch.uint8)
    return code + 8 * torch.signbit(x).to(torch.uint8)


def from_e2m1(codes: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """Values of E2M1 codes 0..15."""
    return _e2m1_table(dtype, codes.device)[codes.long()]


# Made once per device: a tensor from Python numbers makes the host wait for the GPU, and the 4-bit reference
# would make one for every channel.
@functools.cache
def _e2m1_edges(dtype, device):
    """Largest magnitude of each code but the last."""
    with torch.inference_mode(False):
        down, up = (torch.tensor(ties, dtype=dtype) for ties in (_E2M1_TIE_DOWN, _E2M1_TIE_UP))
        return torch.cat([down, torch.nextafter(up, torch.zeros_like(up))]).sort().values.to(device)


@functools.cache
def _e2m1_table(dtype, device):
    with torch.inference_mode(False):
        return torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=dtype, device=device)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte along the last dimension, even index in the low nibble (N5)."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def expcast_codes(u: torch.Tensor) -> torch.Tensor:
    """E4M3 byte of 2^8 * 2^u by one multiply-add: clip[0,120](RNE(8 u + 119.65)) (Eq. 7, F2).

    u: float32, log2 of p over the row's maximum, <= 0. Returns uint8 of u's shape; -inf and NaN give 0.
    """
    code = torch.round(EXPCAST_SLOPE * u.float() + EXPCAST_OFFSET)
    return torch.nan_to_num(code, nan=0.0, neginf=0.0).clamp(0, EXPCAST_TOP).to(torch.uint8)
