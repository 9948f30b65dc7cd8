"""The stages that make tables run on a CPU at tiny sizes, and what they write can be read and drawn."""

import importlib
import json

import pytest
import torch
from evidence import fidelity, larger, length, plots, speed, tables
from evidence.methods import MAIN
from evidence.samples import made_sample

FACTS = {"card": "CPU", "commit": "abc"}


def test_fidelity_writes_tables_and_pictures(tmp_path, monkeypatch):
    captured = made_sample("structured", 1, (1, 16, 16), seed=1)
    captured.name = "captured, step 1 of 1, block 1"
    monkeypatch.setattr(fidelity, "captured_samples", lambda *args, **options: [captured])
    few = [m for m in fidelity.all_methods() if m.name in (*MAIN, "SageAttention 2") or m.source == "package"]
    monkeypatch.setattr(fidelity, "all_methods", lambda: few)
    monkeypatch.setattr(fidelity, "CLUSTERS", (16, 128))
    monkeypatch.setattr(fidelity, "ITERATIONS", (1, 10))
    sizes = fidelity.Sizes(1, (1, 16, 16), 128, kinds=("gauss", "structured"))
    made, data = fidelity.run(torch.device("cpu"), sizes, larger="a file")
    titles = [table.title for table in made]
    assert made[0].columns[-2:] == ["captured (mean of 1)", "larger model, captured (mean of 1)"]
    assert titles[0] == "Output error" and "Token orders (Table 1, Figure 4)" in titles
    text = tables.write("fidelity", made, data, tmp_path, FACTS).read_text(encoding="utf-8")
    assert "card CPU, commit abc" in text and "not installed" not in text.split("## Output error")[0]
    assert json.loads((tmp_path / "fidelity.json").read_text())["numbers"]["gauss"]
    if importlib.util.find_spec("matplotlib"):
        assert [p.name for p in plots.draw("fidelity", tmp_path)] == [
            "fidelity-structured.png", "fidelity-captured.png", "fidelity-clusters.png",
        ]  # fmt: skip


def test_length_measures_both_layouts():
    (table,), data = length.run(torch.device("cpu"), lengths=(130, 400))
    assert [row[1:4] for row in table.rows] == [
        [130, 2, "contiguous"], [400, 2, "contiguous"], [130, 2, "fused"],
    ]  # fmt: skip
    assert all(0.005 < error < 0.03 for row in table.rows for error in row[4:])
    assert data["longest"] == 400


def test_sampled_rows_reach_both_ends():
    assert length.sampled(100) == list(range(100))
    rows = length.sampled(1000)
    assert len(rows) == 384 and rows[0] == 0 and rows[-1] == 999


def test_speed_without_a_gpu_says_so():
    (table,), _ = speed.run(torch.device("cpu"))
    assert table.rows == [] and table.notes == ["Not measured: needs a GPU."]


def test_long_calls_are_repeated_less():
    assert speed.rounds_for(4096, 40) == 10 and speed.rounds_for(150_000, 56) == 3


def test_papers_shapes_have_the_papers_tokens():
    tokens = [t * y * x for (t, y, x), _ in speed.PAPER_SHAPES.values()]
    assert tokens == [75_600, 37_440, 111_600, 73_500]


@pytest.mark.parametrize(
    ("cell", "text"),
    [(None, "–"), (12345, "12,345"), (0.012345, "0.01235"), (1.81e-4, "1.81e-04"), (204.26, "204.3")],
)
def test_cells_are_short(cell, text):
    assert tables.shown(cell) == text


def test_larger_model_trains_and_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(
        larger, "parse", lambda argv, parse=larger.parse: parse([*argv, "--steps", "2", "--batch", "1"])
    )
    path = larger.run(torch.device("cpu"), tmp_path, smoke=True)
    assert path.stat().st_size > 1e6
