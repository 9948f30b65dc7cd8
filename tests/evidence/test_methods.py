"""The methods on small tensors: all run or say why not, and their order of merit is what it must be."""

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, vc_attention
from comfyui_vc_attention.kernels.testing import relative_l2
from evidence import measures
from evidence.methods import MAIN, all_methods
from evidence.samples import MADE_KINDS, made_sample


@pytest.fixture(scope="module")
def errors():
    sample = made_sample("structured", 1, (1, 16, 20))
    q, _ = sample.rows(128)
    expected = measures.exact_rows(q, sample.k, sample.v)
    found = {}
    for method in all_methods():
        refusal = method.why_not(sample)
        found[method.name] = refusal or measures.of_output(method.run(sample, q), expected)
    return found


def test_every_method_runs_or_says_why_not(errors):
    assert len(errors) == len(all_methods())
    assert set(MAIN) <= set(errors)
    for name, found in errors.items():
        if isinstance(found, str):
            assert "(package)" in name and found
        else:
            assert 0 < found["error"] < 0.4, name


def test_formats_rank_as_their_bits(errors):
    ranked = [errors[name]["error"] for name in MAIN]
    assert ranked == sorted(ranked)


def test_exact_parts_bound_the_whole(errors):
    whole = errors["int8_int8, means, grouped"]["error"]
    assert errors["int8_int8, QK exact, grouped"]["error"] < whole
    assert errors["int8_int8, P and V exact, grouped"]["error"] < whole


def test_terms_add_up_to_the_error(errors):
    for found in errors.values():
        if not isinstance(found, str) and "value_term" in found:
            assert found["error"] <= found["probability_term"] + found["value_term"] + 1e-6


def test_rows_by_the_stages_are_rows_of_the_whole_call():
    sample = made_sample("structured", 1, (1, 16, 20))
    q, rows = sample.rows(128)
    recipe = next(m for m in all_methods() if m.name == "int8_int8, means, sequence")
    whole = vc_attention(sample.q.float(), sample.k.float(), sample.v.float(), VCConfig(value_format="int8"),
                         kernel="reference")  # fmt: skip
    assert relative_l2(recipe.run(sample, q).out, whole[:, :, rows]) < 1e-5


@pytest.mark.parametrize("kind", MADE_KINDS)
def test_kinds_are_seeded_and_finite(kind):
    first, again = (made_sample(kind, 1, (1, 8, 16), seed=5) for _ in range(2))
    assert first.q.dtype == torch.bfloat16 and first.v.shape == (1, 1, 128, 128)
    assert all(getattr(first, name).equal(getattr(again, name)) for name in "qkv")
    assert first.k.isfinite().all()


def test_rows_come_in_blocks():
    sample = made_sample("gauss", 1, (4, 16, 20))
    q, rows = sample.rows(256)
    assert rows.tolist() == [*range(128), *range(1152, 1280)]
    assert q.equal(sample.q[:, :, rows])
    with pytest.raises(ValueError, match="got 'random'"):
        sample.order("random")
