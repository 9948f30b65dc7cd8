"""Pictures are drawn of whole results, of what a run that was cut short left, and of names not known yet."""

import copy
import json

import pytest
from evidence import marks, plots, tables

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

H200 = tables.RESULTS / "h200"
PAINTINGS = [(stage, name) for stage, named in plots.PICTURES.items() for name in named]


def results(stage):
    return json.loads((H200 / f"{stage}.json").read_text(encoding="utf-8"))


def painted(stage, name, data):
    """The figure, laid out, or None where there is nothing to paint."""
    figure = Figure(layout="constrained")
    if not plots.PICTURES[stage][name](figure, data):
        return None
    marks.sign(figure, "a card")
    figure.draw_without_rendering()
    return figure


def words(figure):
    """Every text of a figure: titles, labels, names of lines, the legend."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def changed(data, title, change):
    """A copy of data with change(rows as dicts) -> such rows in the place of one table's."""
    data = copy.deepcopy(data)
    entry = next(each for each in data["tables"] if each["title"].startswith(title))
    rows = change([dict(zip(entry["columns"], row, strict=True)) for row in entry["rows"]])
    entry["columns"] = list(rows[0])
    entry["rows"] = [list(row.values()) for row in rows]
    return data


@pytest.mark.parametrize(("stage", "name"), PAINTINGS)
def test_every_axis_of_the_committed_results_says_what_it_shows(stage, name):
    data = results(stage)
    figure = painted(stage, name, data)
    if figure is None and not data["finished"]:
        pytest.skip("the committed results end before it")
    assert figure.get_suptitle()
    for axes in figure.axes:
        for line in axes.lines:  # no mark is cut off
            for values, limits in ((line.get_xdata(), axes.get_xlim()), (line.get_ydata(), axes.get_ylim())):
                assert line.get_marker() == "None" or all(min(limits) <= x <= max(limits) for x in values)
        assert axes.get_xlabel()
        # sorted names stand for a label; a panel may share its neighbour's
        assert axes.get_ylabel() or labels(axes) or axes is figure.axes[-1]
    sizes = [text.get_fontsize() for text in figure.texts] + [figure.axes[0].xaxis.label.get_fontsize()]
    assert min(sizes) >= marks.SMALL - 1


@pytest.mark.parametrize(("stage", "name"), PAINTINGS)
def test_results_that_were_cut_short_do_not_fail(stage, name):
    whole = results(stage)
    for rows in (0, 1):
        data = {**whole, "tables": [{**table, "rows": table["rows"][:rows]} for table in whole["tables"]]}
        assert painted(stage, name, data) is None or rows
    assert painted(stage, name, {**whole, "tables": []}) is None
    for kept in range(1, len(whole["tables"])):
        plots.PICTURES[stage][name](Figure(), {**whole, "tables": whole["tables"][:kept]})
    blank = [{**table, "rows": [measured_out(row) for row in table["rows"]]} for table in whole["tables"]]
    painted(stage, name, {**whole, "tables": blank})


def measured_out(row):
    """A row without what was measured: names and sizes alone."""
    return [None if isinstance(cell, float) else cell for cell in row]


def test_no_picture_of_an_earlier_run_stays(tmp_path):
    empty = tables.Table("Speed over length", "", ["kernel", "tokens"])
    tables.write("speed", [empty], {}, tmp_path, {"card": "CPU", "commit": "abc"})
    (tmp_path / "speed-length.png").write_bytes(b"old")
    assert plots.draw("speed", tmp_path) == [] and not list(tmp_path.glob("*.png"))


def test_the_corner_names_card_and_commit(tmp_path):
    text = (H200 / "length.json").read_text(encoding="utf-8")
    (tmp_path / "length.json").write_text(text, encoding="utf-8")
    assert [path.name for path in plots.draw("length", tmp_path)] == ["length-error.png"]
    assert (tmp_path / "length-error.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["length", "heads", "memory", "roofline", "shapes"])
def test_speed_names_kernels_and_peers_it_does_not_know(name):
    more = ("cuda_int8_fp8_sm90, expcast off", "SageAttention 2 (package)", "FlashAttention-4", "a new one")

    def add(rows):
        ours = [row for row in rows if row["kernel"] == "cuda_int8_fp8_sm90"]
        peers = [row for row in rows if row["kernel"].startswith("comfy")]
        return rows + [{**row, "kernel": more[0]} for row in ours] + [
            {**row, "kernel": peer} for row in peers for peer in more[1:]
        ]  # fmt: skip

    data = results("speed")
    for title in ("Speed over length", "Speed over heads", "The paper's shapes"):
        data = changed(data, title, add)
    said = words(painted("speed", name, data))
    shown = more[:1] if name == "roofline" else more  # peers have no rate of a kernel alone
    assert all(kernel in said for kernel in shown)
    assert marks.kernel_style(more[0]) != marks.kernel_style("cuda_int8_fp8_sm90")


def longer(rows, kernel=None):
    """The rows, and the first kernel's at 150,000 tokens of 12 heads, by this name if there is one."""
    row = next(row for row in rows if row["kernel"].startswith("cuda_"))
    return [*rows, {**row, "tokens": 150_000, "heads": 12, "kernel": kernel or row["kernel"]}]


def test_speed_joins_only_rows_of_one_shape():
    figure = painted("speed", "length", changed(results("speed"), "Speed over length", longer))
    for axes in figure.axes:
        joined = [line for line in axes.lines if line.get_linestyle() != "None"]
        assert joined and all(150_000 not in line.get_xdata() for line in joined)
        assert any(list(line.get_xdata()) == [150_000] for line in axes.lines)


def test_what_only_another_shape_has_is_named_in_the_legend():
    def add(rows):
        return longer(rows, "cuda_int8_fp8_sm90, expcast off")

    data = changed(results("speed"), "Speed over length", add)
    assert "expcast off" in words(painted("speed", "length", data))


def test_length_names_references_and_takes_the_usual_heads_for_its_lines():
    def add(rows):
        names = (
            "reference int8_fp8 + ExpCast",
            "reference int8_fp8",
            "reference nvfp4",
            "reference fp8_fp8 + ExpCast",
        )
        first = [{**row, "kernel": name} for name in names for row in rows[:1]]
        return rows + first + [{**rows[0], "heads": 1, "keys": 400_000, "layout": "fused"}]

    said = words(painted("length", "error", changed(results("length"), "Length", add)))
    assert "lines: 2 heads" in said and "filled: 1, 40, 56 heads" in said and "reference nvfp4" in said
    assert marks.kernel_style("reference int8_fp8") != marks.kernel_style("reference int8_fp8 + ExpCast")


def test_heads_take_the_number_that_the_table_of_lengths_has():
    (first, _) = painted("speed", "heads", results("speed")).axes
    assert all(40 in line.get_xdata() for line in first.lines)


def test_schedules_show_differences_where_there_are_some():
    def paired(rows):
        return [
            {**row, "over first quarter": 0.1 * i, "its standard error": 0.2} for i, row in enumerate(rows)
        ]

    data = results("clips")
    (axes,) = painted("clips", "schedules", changed(data, "Where grouping sits", paired)).axes
    assert any(list(line.get_xdata()) == [0.0, 0.0] for line in axes.lines)  # the line of no difference

    def without(rows):
        drop = ("over first quarter", "its standard error")
        return [{name: cell for name, cell in row.items() if name not in drop} for row in rows]

    said = words(painted("clips", "schedules", changed(data, "Where grouping sits", without)))
    assert "PSNR against exact attention" in said and "does not begin at 0" in said


def test_clips_are_counted_where_their_numbers_differ():
    def counted(rows):
        return [{**row, "clips": 32 if row["source"] == "recipe" else 128} for row in rows]

    (axes,) = painted("clips", "psnr", changed(results("clips"), "Clips", counted)).axes
    assert "SageAttention 2 [32]" in labels(axes)
    values = [label.split(" [")[0] for label in labels(axes)]
    assert values == sorted(values, key=lambda name: -psnr_of()[name])


def psnr_of():
    return {row["method"]: row["PSNR"] for row in tables.rows_of(results("clips"), "Clips")}
