"""choices.md is what the tables give, every choice holds there, and defaults are those of the code."""

import json
import re

import pytest
from evidence.bounds import TABLES
from evidence.choices import (
    FAILS,
    HOLDS,
    STAGES,
    WAITS,
    Grid,
    Numbers,
    all_choices,
    compared,
    lookup,
    page,
    results,
    state,
)

CHOICES = all_choices()
NAMES = [choice.name for choice in CHOICES]


def test_the_page_is_that_of_the_tables():
    written = (TABLES / "choices.md").read_text(encoding="utf-8")
    assert written == page(TABLES, CHOICES), "python tests/evidence choices writes it"


@pytest.mark.parametrize("choice", CHOICES, ids=NAMES)
def test_the_choice_holds(choice):
    numbers = Numbers(choice, TABLES)
    assert not numbers.missing and state(choice, numbers) == HOLDS


@pytest.mark.parametrize("choice", CHOICES, ids=NAMES)
def test_defaults_are_those_of_the_code(choice, monkeypatch):
    monkeypatch.setattr("comfyui_vc_attention.kernels.registry._triton_missing", lambda: None)
    assert choice.defaults
    for default in choice.defaults:
        assert default.read() == default.value, default.name


@pytest.mark.parametrize("choice", CHOICES, ids=NAMES)
def test_words_have_no_numbers_of_their_own(choice):
    """Numbers stand in the tables of the page; the paper's and quotes say where they are from."""
    for text in (choice.name, choice.question, choice.decided, choice.claim):
        assert not re.search(r"\d\.\d|\d *%|\d dB", text.replace("Table 1", "")), text


@pytest.mark.parametrize("choice", CHOICES, ids=NAMES)
def test_quotes_stand_where_they_are_said_to(choice, pack_root):
    for quote in choice.quotes:
        assert quote.text in (pack_root / quote.place).read_text(encoding="utf-8"), quote.label


def test_names_differ():
    assert len(set(NAMES)) == len(NAMES) > 25


def test_a_row_that_is_not_there_is_not_measured(tmp_path):
    table = {"title": "T, u", "columns": ["a", "b"], "rows": [[1, 2], [3, 4], [3, 5]]}
    (tmp_path / "speed.json").write_text(json.dumps({"tables": [table]}), encoding="utf-8")
    assert lookup(tmp_path, "speed", "T", {"a": 1}) == {"a": 1, "b": 2}
    with pytest.raises(LookupError, match="got 2"):
        lookup(tmp_path, "speed", "T", {"a": 3})
    for title, where in (("T", {"a": 2}), ("T", {"c": 1}), ("U", {"a": 1})):
        assert lookup(tmp_path, "speed", title, where) is None


@pytest.mark.parametrize("stage", STAGES)
def test_a_page_of_an_unfinished_run_says_what_waits(stage, tmp_path):
    for each in STAGES:
        whole = results(TABLES, each)
        tables = [{**table, "rows": []} for table in whole["tables"]] if each == stage else whole["tables"]
        (tmp_path / f"{each}.json").write_text(json.dumps({**whole, "tables": tables}), encoding="utf-8")
    written = page(tmp_path, CHOICES)
    assert f"| {WAITS} |" in written and f"| {FAILS} |" not in written


def test_what_loses_is_listed_and_a_false_claim_fails():
    choice = next(each for each in CHOICES if each.name.startswith("Rounding of INT8"))
    numbers = Numbers(choice, TABLES)
    assert state(choice, numbers) == HOLDS
    numbers.cells["together", "N(0, 1)"] = 2 * numbers.cells["alone", "N(0, 1)"]
    assert state(choice, numbers) == FAILS
    assert "more on N(0, 1) (+100.0%)" in compared(numbers, "together", "alone")


def test_clips_are_compared_one_by_one():
    choice = next(each for each in CHOICES if each.name.startswith("Rotation of Q and K, INT8"))
    numbers = Numbers(choice, TABLES)
    numbers.each = {"c_int8": [50.0, 52.0], "c_int8_not": [49.0, 50.0, 70.0]}
    assert numbers.gain("c_int8", "c_int8_not") == (1.5, pytest.approx(0.5), 2)
    assert numbers.nearer("c_int8", "c_int8_not") and not numbers.nearer("c_int8_not", "c_int8")
    assert not numbers.nearer("c_int8", "c_int8_not", errors=3.0)
    assert state(choice, numbers) == FAILS


def test_every_stage_is_looked_at():
    grids = [grid for choice in CHOICES for grid in choice.grids]
    assert all(isinstance(grid, Grid) and grid.rows for grid in grids)
    assert {grid.stage for grid in grids} == {"fidelity", "clips", "length", "speed"}
    assert all(results(TABLES, stage)["finished"] for stage in STAGES)
