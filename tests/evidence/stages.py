"""Our recipes through the pack's reference stages, with the output error taken apart (Eq. 2)."""

from dataclasses import replace

import torch
from comfyui_vc_attention.kernels.attend import reference as attend_stage
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.formats import TILE, tile_count
from comfyui_vc_attention.kernels.prepare import reference as prepare_stage
from comfyui_vc_attention.kernels.prepare.reference import in_tile_order, in_tiles


def run_stages(q, k, v, recipe: Recipe, order=None, scale=None, rows=None):
    """(output, output had the values been exact, values as quantized, values), float32.

    q [B, H, M, D] some rows; outputs [B, H, M, D]; both values [B, H, L, D] in tile order. rows: q is all
    queries, of which these are attended, whole blocks of 128: at 4 bits codes depend on all of them (N6).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operands = operands_of(q, k, v, recipe, order, scale, rows)
    out = attend_stage.attend(operands)[0]
    ordered = in_tile_order(v.float(), order, None)
    return out, attend_exact_values(operands, ordered), decoded_values(operands, ordered.shape[2]), ordered


def operands_of(q, k, v, recipe, order, scale, rows=None):
    """What the reference prepares; rows as above."""
    made = prepare_stage.prepare(q.float(), k.float(), v.float(), recipe, order=order, softmax_scale=scale)
    return made if rows is None else some_queries(made, rows)


def attend_rows(q, k, v, recipe: Recipe, order, rows):
    """The reference's output [B, H, M, D] in M rows of q, whole blocks of 128."""
    some = (q, rows) if recipe.numerics == "nvfp4" else (q[:, :, rows], None)
    scale = q.shape[-1] ** -0.5
    return attend_stage.attend(operands_of(some[0], k, v, recipe, order, scale, some[1]))[0]


def some_queries(operands, rows):
    """The operands of `nvfp4` with these rows of its queries only."""
    scale = operands.q_scale.view(torch.uint8)[:, :, rows].view(operands.q_scale.dtype)
    means = operands.q_means
    if means is not None:
        means = means[:, :, rows[::TILE] // TILE]
    return replace(operands, q=operands.q[:, :, rows], q_scale=scale, q_means=means)


class ExactValues:
    """In the place of the quantized values in the attend stage: values [B, H, T, 128, D] as they are.

    means [B, H, T, D]: what the stage restores with a mass of its own; None where that is the sum of codes.
    """

    def __init__(self, ordered, means=None):
        self.dtype, self.codes, self.head_dim = ordered.dtype, in_tiles(ordered), ordered.shape[-1]
        self.scale, self.means = torch.ones_like(self.codes[:, :, :, 0]), means
        if means is not None:
            self.codes = self.codes - means[:, :, :, None]

    def weighted(self, p, j):
        return p @ self.codes[:, :, j, : p.shape[-1]]

    def restore(self, mass, j):
        return 0.0 if self.means is None else mass[..., None] * self.means[:, :, j, None]


def attend_exact_values(operands, ordered):
    """The attend stage's loop over ExactValues: the probabilities of Eq. 2 on values as they were."""
    means = attend_stage._Values(operands).means if operands.recipe.value_format != "fp8" else None
    exact = ExactValues(ordered, means)
    softmax = attend_stage.OnlineSoftmax(operands.q.shape[:3], exact.head_dim, exact.dtype, ordered.device)
    add_tile = attend_stage._ADD_TILE[operands.recipe.value_format]
    for j in range(tile_count(operands.k.shape[2])):
        t = attend_stage.scores(operands, j, exact.dtype)
        top = t.amax(-1)
        softmax.raise_maximum(top)
        add_tile(softmax, t, top, exact, j, operands.recipe)
    return softmax.result()


def decoded_values(operands, keys):
    """Values that the operands stand for, means restored: float32 [B, H, keys, D] in tile order."""
    stored = attend_stage._Values(operands)
    tiles = stored.codes
    if operands.recipe.value_format == "int8":
        tiles = tiles * operands.v_scale[:, :, :, None]
    if stored.means is not None:
        tiles = tiles + stored.means[:, :, :, None]
    if operands.recipe.value_format == "fp8":
        tiles = tiles * operands.v_scale[:, :, None, None]
    return tiles.flatten(2, 3)[:, :, :keys]
