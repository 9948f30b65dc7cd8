"""The parametric attention agrees with the pack's stages where both can say the same."""

from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.testing import relative_l2, sample_qkv
from evidence import dense
from evidence.dense import WHOLE, Numerics, weights_and_values
from evidence.methods import DENSE_FP8, DENSE_INT8, DENSE_NVFP4, INT8_CODE_MASS
from evidence.stages import run_stages

AS_STAGES = {
    "int8_int8": (Recipe("int8_int8"), DENSE_INT8),
    "int8_fp8 + ExpCast": (Recipe("int8_fp8", expcast=True), DENSE_FP8),
    "int8_fp8": (Recipe("int8_fp8"), replace(DENSE_FP8, p="e4m3")),
    "nvfp4": (Recipe("nvfp4", smooth_q=True), DENSE_NVFP4),
}


@pytest.mark.parametrize("name", AS_STAGES)
def test_same_output_and_values_as_the_stages(name):
    recipe, numerics = AS_STAGES[name]
    q, k, v = sample_qkv("clustered", (1, 2, 128, 128), keys=400)
    order = torch.rand(1, 2, 400, generator=torch.Generator().manual_seed(1)).argsort(-1).int()
    out, exact_value_out, quantized, ordered = run_stages(q, k, v, recipe, order)
    dense_out, dense_exact_value_out, values, dense_ordered = dense.outputs(q, k, v, numerics, order)
    assert torch.equal(dense_ordered, ordered)
    # means are kept in other 16-bit formats, and codes may round apart
    assert relative_l2(values, quantized) < (1e-3 if name == "int8_int8" else 5e-3)
    # at 4 bits a code that rounds apart moves those that follow in its row (N6)
    apart = 1.5e-2 if name == "nvfp4" else 0.0
    assert relative_l2(dense_exact_value_out, exact_value_out) < 3e-3 + apart
    assert relative_l2(dense_out, out) < 5e-3 + apart


def test_exact_mass_returns_what_rounding_takes_from_a_tile():
    # one key has nearly all the weight of its tile; the others round to nothing beside it
    q, k = torch.zeros(1, 1, 1, 128), torch.zeros(1, 1, 128, 128)
    q[..., 0], k[..., 0, 0] = 8.0, 9.0
    v = torch.ones(1, 1, 128, 128)
    v[:, :, 0] = 0.0
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    lost = dense.outputs(q, k, v, replace(INT8_CODE_MASS, qk="exact"))[0]
    kept = dense.outputs(q, k, v, replace(DENSE_INT8, qk="exact"))[0]
    assert relative_l2(lost, expected) > 0.9
    assert relative_l2(kept, expected) < relative_l2(lost, expected)


def test_exact_numerics_are_exact():
    q, k, v = sample_qkv("peaked", (1, 1, 64, 128), keys=300)
    weights, values = weights_and_values(q, k, v, Numerics(qk="exact", p="exact", v="exact"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert relative_l2(weights @ values, expected) < 1e-5


def test_lanes_put_every_fourth_pair_of_keys_in_a_group():
    numerics = Numerics(k_group=4, k_lanes=True)
    seen = []
    x = torch.arange(20.0).view(1, 1, 20, 1)
    made = dense._lanes(x, numerics, lambda k, *rest: seen.append(k.flatten().tolist()) or k)
    assert seen[0][:8] == [0, 1, 8, 9, 2, 3, 10, 11]
    assert made.equal(x)


def test_smoothed_queries_change_no_exact_score():
    q, k, _ = sample_qkv("clustered", (1, 1, 256, 128))
    plain, smooth = (dense.scores(q, k, Numerics(qk="exact", smooth_q=s), 1.0) for s in (False, True))
    torch.testing.assert_close(plain, smooth, atol=2e-3, rtol=1e-4)


def test_finer_scales_are_never_worse():
    k = sample_qkv("k_outlier_channels", (1, 1, 512, 128))[1]
    errors = [relative_l2(dense.rounded_rows(k, "int8", group), k) for group in (8, 32, WHOLE)]
    assert errors == sorted(errors)
