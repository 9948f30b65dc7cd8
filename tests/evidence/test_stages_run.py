"""The stages that make tables run on a CPU at tiny sizes, and what they write can be read and drawn."""

import importlib
import json

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.kernels.benchmark_peers import Peer, pytorch
from comfyui_vc_attention.kernels.registry import kernel_named
from evidence import fidelity, larger, length, plots, speed, tables
from evidence.length import inputs
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
    weights = tmp_path / "weights"
    weights.write_bytes(b"one")
    made, data = fidelity.run(torch.device("cpu"), sizes, larger=weights)
    titles = [table.title for table in made]
    assert made[0].columns[-2:] == ["captured (mean of 1)", "larger model, captured (mean of 1)"]
    assert titles[0] == "Output error" and "Token orders (Table 1, Figure 4)" in titles
    text = tables.write("fidelity", made, data, tmp_path, FACTS).read_text(encoding="utf-8")
    assert "card CPU, commit abc" in text and "not installed" not in text.split("## Output error")[0]
    earlier = json.loads((tmp_path / "fidelity.json").read_text())
    assert earlier["numbers"]["gauss"]
    monkeypatch.setattr(fidelity, "measure", None)  # all is measured, also what the larger model gave
    again, _ = fidelity.run(torch.device("cpu"), sizes, earlier=earlier)
    assert [table.rows for table in again] == [table.rows for table in made]
    weights.write_bytes(b"another")
    with pytest.raises(TypeError):  # measure is None, and what other weights gave does not count
        fidelity.run(torch.device("cpu"), sizes, larger=weights, earlier=earlier)
    if importlib.util.find_spec("matplotlib"):
        assert [p.name for p in plots.draw("fidelity", tmp_path)] == [
            "fidelity-structured.png", "fidelity-captured.png", "fidelity-clusters.png",
        ]  # fmt: skip


def test_length_measures_both_layouts():
    (table,), data = length.run(torch.device("cpu"), lengths=(130, 400))
    kernels = [row for row in table.rows if row[0] == "reference"]
    assert [row[1:4] for row in kernels] == [
        [130, 2, "contiguous"], [400, 2, "contiguous"], [130, 2, "fused"],
    ]  # fmt: skip
    assert all(0.005 < error < 0.03 for row in kernels for error in row[4:])
    same = {row[1]: row[4] for row in table.rows if row[0] == "reference int8_int8"}
    assert set(same) == {130, 400} and same[400] == pytest.approx(kernels[1][4], rel=0.1)
    assert {row[0] for row in table.rows} == {"reference", *(f"reference {name}" for name in length.RECIPES)}
    assert data["longest"] == 400


def test_sampled_rows_reach_both_ends():
    assert length.sampled(100) == list(range(100))
    rows = length.sampled(1000)
    assert len(rows) == 384 and rows[0] == 0 and rows[-1] == 999


def test_speed_without_a_gpu_says_so():
    (table,), _ = speed.run(torch.device("cpu"))
    assert table.rows == [] and table.notes == ["Not measured: needs a GPU."]


@pytest.fixture
def small_speed(monkeypatch):
    """Stage speed on a CPU: the reference is its only kernel, and every time is a millisecond."""
    from bench import timing

    def turns(calls, rounds=1, warmup=0):
        return {name: (call(), 1.0)[1] for name, call in calls.items()}

    monkeypatch.setattr(timing, "alone_ms", lambda call, *rest: (call(), 1.0)[1])
    monkeypatch.setattr(timing, "interleaved_ms", turns)
    monkeypatch.setattr(timing, "peak_extra_bytes", lambda call: (call(), 2**20)[1])
    kernel = kernel_named("reference"), VCConfig(value_format="int8")
    monkeypatch.setattr(speed, "chosen_kernels", lambda *rest: iter([kernel]))
    failing = Peer("a package", lambda q, k, v: {}["no such kernel"], lambda q: None)
    monkeypatch.setattr(speed, "PEERS", (Peer("PyTorch cuDNN", pytorch, lambda q: None), failing))
    monkeypatch.setattr(tables, "FAILURES", (*tables.FAILURES, KeyError))
    monkeypatch.setattr(
        speed, "captured_long", lambda grid, heads, device: inputs(384, heads, "fused", device)
    )
    sizes = {"LENGTHS": (130, 256), "HEADS": 2, "HEAD_COUNTS": (1,), "HEADS_LENGTH": 130, "LONGEST": (300, 1),
             "PARTS_SHAPE": (130, 1), "PAPER_SHAPES": {"Wan": ((2, 12, 16), 2)}}  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(speed, name, value)


def test_speed_makes_every_table_and_names_what_failed(small_speed, tmp_path):
    saved = []
    first = tables.Table("Speed over length", "", speed.COLUMNS)
    made, data = speed.measure_all(torch.device("cpu"), first, lambda *now: saved.append(now))
    assert [table.title.split(" (")[0] for table in made] == [
        "Speed over length", "The paper's shapes", "Order time", "Schedules", "Preparation ladder",
        "Speed over heads",
    ]  # fmt: skip
    assert [row[0] for row in first.rows] == ["cuDNN bf16", "reference"] * 3
    assert all(len(row) == len(table.columns) for table in made for row in table.rows)
    assert len(first.notes) == 3 and all("a package" in n and "no such kernel" in n for n in first.notes)
    assert [row[3] for row in made[1].rows[::2]] == [
        f"Wan, {kind}" for kind in ("N(0, 1)", "structured", "captured")
    ]
    assert len(saved) == 4 * 7 + 2
    tables.write("speed", made, data, tmp_path, FACTS)
    if importlib.util.find_spec("matplotlib"):
        assert plots.draw("speed", tmp_path)


def test_cudnn_is_timed_before_and_after_the_rest(small_speed, monkeypatch):
    times = iter((4.0, 1.5, 2.0))
    monkeypatch.setattr(speed, "alone", lambda call, *count: next(times))
    monkeypatch.setattr(speed, "chosen_kernels", lambda *rest: iter(()))
    monkeypatch.setattr(speed, "PEERS", (speed.PEERS[0], Peer("another", pytorch, lambda q: None)))
    monkeypatch.setattr(speed.Shape, "in_turns", lambda self, call, ms: None)
    table = tables.Table("Speed over length", "", speed.COLUMNS)
    speed.time_shape(table, *inputs(130, 1, "fused", torch.device("cpu")), "some", False, lambda: None)
    cudnn, other = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert cudnn["kernel ms"] == cudnn["call ms"] == 3.0 and cudnn["call over cuDNN"] == 1.0
    assert other["call ms"] == 1.5 and other["call over cuDNN"] == 2.0 and other["kernel over cuDNN"] is None


def test_speed_goes_on_where_it_was_cut(small_speed, monkeypatch):
    def measured(earlier=None):
        by_length = tables.Table("Speed over length", "", speed.COLUMNS)
        return speed.measure_all(torch.device("cpu"), by_length, lambda *now: None, earlier)[0]

    made = []

    class Counted(speed.Shape):
        def __init__(self, q, *rest):
            made.append(q.shape[2])
            super().__init__(q, *rest)

    monkeypatch.setattr(speed, "PEERS", speed.PEERS[:1])
    monkeypatch.setattr(speed, "Shape", Counted)
    first = measured()
    earlier = {"tables": [{**vars(table), "rows": list(table.rows)} for table in first]}
    del earlier["tables"][0]["rows"][2:3]  # of the second shape: it is measured again
    made.clear()
    assert [len(table.rows) for table in measured(earlier)] == [len(table.rows) for table in first]
    assert made == [256]


def test_schedules_add_up_what_was_measured():
    def row(name, tokens, call, grouped):
        cells = dict.fromkeys(speed.COLUMNS) | {"kernel": name, "tokens": tokens, "heads": 40}
        return list((cells | {"call ms": call, "call grouped ms": grouped}).values())

    by_length = tables.Table("", "", speed.COLUMNS, [row("ours", 75_600, 100.0, 110.0)])
    by_length.rows += [row("ours", 4096, 1.0, 1.0), row("a peer", 75_600, 200.0, None)]
    order_times = tables.Table("", "", [], [["k-means", 128, "as shipped", 2.0, 0.02]])
    order_times.rows += [["k-means, warm", 128, "as shipped", 1.0, 0.01], ["k-means", 128, 1, 9.0, 0.09]]
    made = {tuple(row[:2]): row[2:] for row in speed.schedule_table(by_length, order_times).rows}
    assert made["no step", 4] == [0, pytest.approx(160.0), 1.0]
    # a block: 30 plain and 10 grouped steps, one order from nothing and two warm ones
    assert made["first quarter", 4][:2] == [3, pytest.approx(40 * (3.0 + 1.1 + 0.004))]
    assert made["uniform quarter", 4][0] == 10 and made["every step", 4][0] == 10


def test_what_a_run_that_was_cut_short_leaves_says_so(tmp_path):
    table = tables.Table("Times", "", ["a"], [[1.0]])
    text = tables.write("speed", [table], {}, tmp_path, FACTS).read_text(encoding="utf-8")
    assert "Not finished" in text and not json.loads((tmp_path / "speed.json").read_text())["finished"]
    assert tables.unfinished("speed", tmp_path, FACTS)["tables"][0]["rows"] == [[1.0]]
    assert not tables.unfinished("speed", tmp_path, {**FACTS, "commit": "another"})
    earlier = tables.unfinished("speed", tmp_path, FACTS)
    more = tables.Table("Times", "", ["a"], [["new", 2.0]])
    earlier["tables"][0]["rows"] = [["old", 1.0], ["new", 1.0]]
    earlier["tables"].append({**vars(more), "title": "Others"})
    tables.write("speed", [more], {}, tmp_path / "again", FACTS, earlier=earlier)
    kept = json.loads((tmp_path / "again" / "speed.json").read_text())["tables"]
    assert [table["rows"] for table in kept] == [[["new", 2.0], ["old", 1.0]], [["new", 2.0]]]
    for commit in ("unknown", "abc and changes"):
        tables.write("speed", [table], {}, tmp_path / "loose", {**FACTS, "commit": commit})
        assert not tables.unfinished("speed", tmp_path / "loose", {**FACTS, "commit": commit})
    text = tables.write("speed", [table], {}, tmp_path, FACTS, finished=True).read_text(encoding="utf-8")
    assert "Not finished" not in text and len(list(tmp_path.glob("speed.*"))) == 2
    assert not tables.unfinished("speed", tmp_path, FACTS) and not tables.unfinished("clips", tmp_path, FACTS)


def test_without_a_stage_every_stage_runs(capsys):
    from evidence import __main__ as command

    assert command.parse([]).stages == list(command.STAGES)
    assert command.parse(["speed", "readme"]).stages == ["speed", "readme"]
    with pytest.raises(SystemExit):
        command.parse(["sped"])
    assert "no such stage: sped; choose from fidelity" in capsys.readouterr().err


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


def test_what_is_there_stays_where_nothing_can_be_measured(tmp_path, capsys, monkeypatch):
    from evidence.__main__ import run_stage

    monkeypatch.setattr(plots, "draw", lambda stage, out: [])
    full, empty = (tables.Table("Length", "?", ["keys"], rows, ["Not measured."]) for rows in ([[1]], []))

    def run(made):
        return lambda save: ([made], {})

    run_stage("length", run(full), tmp_path, FACTS, {"seconds": 100.0})
    first = (tmp_path / "length.json").read_text(encoding="utf-8")
    assert 100.0 <= json.loads(first)["seconds"] < 110.0  # with what the part before took
    run_stage("length", run(empty), tmp_path, FACTS, None)
    assert (tmp_path / "length.json").read_text(encoding="utf-8") == first
    assert "Not measured. " in capsys.readouterr().out
    run_stage("length", run(empty), tmp_path / "new", FACTS, None)
    assert json.loads((tmp_path / "new" / "length.json").read_text(encoding="utf-8"))["finished"]
