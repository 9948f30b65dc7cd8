"""The committed tables hold: rows made again here, and bounds that other tests take from them."""

from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels.config import resolve_demean
from comfyui_vc_attention.kernels.testing import ERROR_LIMITS, relative_l2
from evidence import measures
from evidence.bounds import MARGIN, SAME, bound, measured, results, row_of
from evidence.captured import captured_samples
from evidence.methods import MAIN, RECIPES, all_methods
from evidence.samples import made_sample
from evidence.structured import CALIBRATION_GRID

METHODS = {method.name: method for method in all_methods()}
OURS = [f"{name}, {how}" for name in RECIPES for how in ("no means", "means, grouped")]
SELF_TEST = 2.3  # times the table: its limits are for the worst block of 128 rows of short calls


class Rows:
    """A sample, and exact attention in as many rows as the tables measure."""

    def __init__(self, sample):
        self.sample, self.q = sample, sample.rows(results("fidelity")["size"]["rows"])[0]
        self.expected = measures.exact_rows(self.q, sample.k, sample.v)

    def error(self, method):
        with torch.inference_mode():
            return relative_l2(METHODS[method].run(self.sample, self.q).out, self.expected)


@pytest.fixture(scope="module")
def captured():
    return [Rows(sample) for sample in captured_samples(steps=(1,))]


@pytest.fixture(scope="module")
def gauss():
    return Rows(made_sample("gauss", 2, CALIBRATION_GRID))


@pytest.mark.parametrize("method", OURS)
def test_captured_rows_are_no_worse_than_the_tables(captured, method):
    """The same tensors: what makes a recipe worse by more than another machine's rounding fails here."""
    ratios = [rows.error(method) / measured(method, rows.sample.name) for rows in captured]
    assert sum(ratios) / len(ratios) < SAME, ratios


@pytest.mark.parametrize("method", ["int8_int8, means, sequence", "int8_fp8 + ExpCast, means, sequence"])
def test_rows_of_long_calls_are_no_worse_than_the_tables(gauss, method):
    """Other draws of the same kind: a GPU's generator makes other numbers of one seed."""
    assert list(CALIBRATION_GRID) == results("fidelity")["size"]["grid"]
    assert gauss.error(method) < bound(method)


def test_no_kernel_is_worse_at_any_length():
    table = results("length")["tables"][0]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert max(row["keys"] for row in rows) >= 400_000 and {row["layout"] for row in rows} == {
        "contiguous",
        "fused",
    }
    for row in rows:
        recipe = recipe_of(row["kernel"])
        later = replace(recipe, demean=resolve_demean(None, recipe.value_format))
        assert row["error"] < bound(row_of(later)), row
        assert row["error grouped"] < bound(row_of(recipe, "grouped")), row


def recipe_of(kernel):
    """What a row of the table ran: a reference's name says it, a kernel chose as this card does."""
    if kernel.startswith("reference "):
        return RECIPES[kernel.removeprefix("reference ")]
    numerics = next((r.numerics for r in RECIPES.values() if r.numerics in kernel), "int8_fp8")
    return RECIPES.get(f"{numerics} + ExpCast") or RECIPES[numerics]


@pytest.mark.parametrize("numerics", ERROR_LIMITS)
def test_the_self_test_asks_for_the_recipe(numerics):
    names = [name for name in RECIPES if name.startswith(numerics)]
    worst = max(measured(f"{name}, means, sequence") for name in names)
    assert MARGIN * worst < ERROR_LIMITS[numerics] < SELF_TEST * worst


@pytest.mark.parametrize("tensors", ["structured", "captured, step 2 of 10, block 1"])
def test_formats_rank_as_their_bits_in_the_tables(tensors):
    ranked = [measured(name, tensors) for name in MAIN]
    assert ranked == sorted(ranked)


def test_unknown_tensors_are_named():
    with pytest.raises(ValueError, match="got 'gaus'"):
        measured("int8_int8, no means", "gaus")
