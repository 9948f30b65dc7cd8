"""The Hopper kernels' shared-memory images, read back into the layout of the reference."""

import torch
from comfyui_vc_attention.kernels.operands import VCOperands

CHUNK = torch.arange(8)
# key 32 a + 4 i + b of a tile: its row in the K image, its byte in a V image row
_A, _I, _B = torch.meshgrid(torch.arange(4), torch.arange(8), torch.arange(4), indexing="ij")
K_ROW = (16 * _I + 8 * (_B // 2) + 2 * _A + _B % 2).flatten()
V_BYTE = (16 * _I + 4 * _A + _B).flatten()


def unswizzle(image):
    """[.., R, 128] bytes of a 128-byte-swizzled image -> the rows."""
    rows = torch.arange(image.shape[-2])[:, None] % 8
    index = (CHUNK[None] ^ rows).to(image.device)[..., None].expand(-1, -1, 16)
    chunks = image.unflatten(-1, (8, 16))
    return chunks.gather(-2, index.expand(chunks.shape)).flatten(-2)


def reference_layout(operands) -> VCOperands:
    """HopperOperands as the reference would hold them: absent keys are zero."""
    _, _, queries, keys = operands.shape
    qk = torch.int8 if operands.recipe.numerics.startswith("int8") else torch.float8_e4m3fn
    values = torch.int8 if operands.recipe.value_format == "int8" else torch.float8_e4m3fn
    k_image = operands.k[..., :16384].unflatten(-1, (128, 128))
    v_image = operands.v[..., :16384].unflatten(-1, (128, 128))
    k = unswizzle(k_image)[..., K_ROW.to(k_image.device), :].flatten(2, 3)[:, :, :keys]
    v = unswizzle(v_image)[..., V_BYTE.to(v_image.device)].transpose(-1, -2).flatten(2, 3)[:, :, :keys]
    v_scale = operands.v_scale
    if v_scale is None:
        v_scale = operands.v[..., 16384:16896].contiguous().view(torch.float32).nan_to_num()
        v_scale = torch.where(v_scale == 0, 1.0, v_scale)  # of a channel of zeros; the reference says 1
    if operands.key_count is not None:
        index = torch.arange(keys, device=k.device)[None] < operands.key_count[:, None]
        k, v = (torch.where(index[:, None, :, None], codes, 0) for codes in (k, v))
    return VCOperands(
        operands.recipe,
        q=unswizzle(operands.q).flatten(2, 3)[:, :, :queries].contiguous().view(qk),
        k=k.contiguous().view(qk),
        v=v.contiguous().view(values),
        q_scale=operands.q_scale[:, :, :queries],
        k_scale=operands.k[..., 16384:].contiguous().view(torch.float32).nan_to_num(),
        v_scale=v_scale,
        v_mean=None if operands.means is None else tile_means(operands),
        score_scale=operands.score_scale,
        key_count=operands.key_count,
        lse_shift=operands.lse_shift,
        out_dtype=operands.out_dtype,
    )


def tile_means(operands):
    """16-bit [B, H, T, 128] out of the images of 16 tiles, each two halves of [16 rows][64 channels]."""
    image = operands.means.view(torch.uint8).unflatten(-1, (2, 16, 128))
    rows = unswizzle(image).contiguous().view(operands.means.dtype)
    means = rows.transpose(3, 4).flatten(4).flatten(2, 3)[:, :, : operands.k.shape[2]]
    if operands.key_count is None:
        return means
    tile = torch.arange(means.shape[2], device=means.device)[None] * 128 < operands.key_count[:, None]
    return torch.where(tile[:, None, :, None], means, 0)


def ones_rows(operands):
    """E4M3 [B, H, T, 8, 128]: the rows that sum the probabilities, bytes in key order."""
    rows = unswizzle(operands.v[..., 16384:].unflatten(-1, (8, 128)))
    return rows[..., V_BYTE.to(rows.device)]
