"""Schedules of grouping and the comparison of clips, on an untrained model of one block."""

import json
from dataclasses import replace

import pytest
import torch
from evidence import clips
from evidence.clip_attention import EveryStep, HybridAttention, Policy, ScheduledAttention, TorchAttention
from evidence.methods import FP8, INT8
from sample_model.model import WanVideoModel, initialise


@pytest.fixture(scope="module")
def model():
    model = initialise(WanVideoModel(layers=1)).eval().requires_grad_(False)
    model.blocks[0].modulation[:, 2] = 3.0  # the gate of self-attention, almost shut before training
    return model


def test_policies_place_the_grouping():
    def steps(**choices):
        return [i for i in range(8) if Policy(**choices).groups(i, 8)]

    assert steps() == [0, 1]
    assert steps(where="uniform") == [0, 4]
    assert steps(where="all") == list(range(8)) and steps(where="none") == []
    with pytest.raises(ValueError, match="got 'last'"):
        steps(where="last")


def play(policy, steps=8, recipe=FP8):
    """The attention after a schedule of one block and one branch, and the operands' facts of each step."""
    attention = ScheduledAttention(recipe, policy, clusters=4)
    seen, stages = [], attention.stages

    def prepare(*tensors, order, **options):
        seen.append((order is not None, tensors[3].demean))
        return stages.prepare(*tensors, order=order, **options)

    attention.stages = stages._replace(prepare=prepare)
    q = torch.randn(1, 1, 130, 128, generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        attention.begin(step, 0, steps)
        attention(q, q, q)
    return attention, seen


def test_window_groups_and_demeans_and_then_runs_plain():
    attention, seen = play(Policy())
    assert seen == [(True, True)] * 2 + [(False, False)] * 6
    assert attention.orderings == 1
    attention.begin(0, 0, 8)
    assert not attention.groupings  # another run starts anew


def test_4_bits_are_for_the_middle():
    class Named(EveryStep):
        def __call__(self, *qkv):
            return self

    middle, ends = Named(), Named()
    attention, ran = HybridAttention(middle, ends), []
    for step in range(20):
        attention.begin(step, 0, 20)
        ran.append(attention(None, None, None) is middle)
    assert ran == [4 <= step < 16 for step in range(20)]


def test_reuse_counts_steps():
    assert [play(Policy("all", reuse=n))[0].orderings for n in (1, 2, 4, 8)] == [8, 4, 2, 1]


def test_kept_order_and_plain_means():
    assert play(Policy(keep_order=True))[1][2:] == [(True, False)] * 6
    assert play(Policy(keep_order=True, plain_means=True))[1][2:] == [(True, True)] * 6
    assert play(Policy(plain_means=True))[1][2:] == [(False, True)] * 6
    assert play(Policy(), recipe=INT8)[1][2:] == [(False, True)] * 6  # as the pack has it
    assert play(Policy(plain_means=False), recipe=INT8)[1][2:] == [(False, False)] * 6
    assert (
        play(Policy("none", plain_means=True), recipe=replace(INT8, demean=False))[1] == [(False, False)] * 8
    )


def test_clips_of_fewer_bits_are_further_away(model):
    attentions = {
        "exact": TorchAttention(), "half": TorchAttention(True), "fp8": ScheduledAttention(FP8, clusters=8),
    }  # fmt: skip
    made = {name: clips.make_clips(model, a, [0], 1, ["a red circle"]) for name, a in attentions.items()}
    found = {name: clips.compare(clip, made["exact"])[0] for name, clip in made.items()}
    same = {"PSNR": clips.EQUAL_PSNR, "standard error": 0.0, "SSIM": 1.0, "GMSD": 0.0}
    assert same.items() <= found["exact"].items()
    assert found["half"]["PSNR"] > found["fp8"]["PSNR"] > 20
    assert attentions["fp8"].orderings == 2  # a branch with the prompt and one without


def test_gain_is_of_the_same_clips():
    assert clips.gain([3.0, 5.0], [1.0, 2.0, 50.0]) == (2.5, pytest.approx(0.5))
    assert clips.gain([3.0], None) == (None, None)


def test_tables_of_a_run(model, monkeypatch):
    monkeypatch.setattr(clips, "load_model", lambda weights, device: model)
    half, slow = TorchAttention(True), TorchAttention(True)
    slow.kernel = "reference"
    rows = {"PyTorch, 16 bit": ("torch", half), "nvfp4, no step grouped": ("ours", slow)}
    monkeypatch.setattr(clips, "DEFAULT", "nvfp4, no step grouped, ours")
    monkeypatch.setattr(clips, "main_rows", lambda device: rows)
    schedules = {
        ("int8_int8", "first quarter"): ("kernel", half),
        ("int8_int8", "no step"): ("kernel", TorchAttention()),
    }
    monkeypatch.setattr(clips, "ablation_rows", lambda device: schedules)
    monkeypatch.setattr(clips, "SLOW_SEEDS", 1)
    saved = []

    def cut_short(tables, data):
        saved.append({**data, "tables": [{**vars(table), "rows": list(table.rows)} for table in tables]})

    tables, data = clips.run(torch.device("cpu"), seeds=2, steps=1, save=cut_short)
    assert [[row[:2] for row in table.rows] for table in tables] == [
        [["PyTorch, 16 bit", "torch"], ["nvfp4, no step grouped", "ours"]], [["int8_int8", "kernel"]] * 2,
    ]  # fmt: skip
    assert data["steps"] == 1 and [row[2] for row in tables[0].rows] == [2, 1]  # the slow one has fewer
    assert [row[10] for row in tables[0].rows] == [0.0, 0.0]  # of one kind; the base comes after its like
    first, second = (dict(zip(tables[1].columns, row, strict=True)) for row in tables[1].rows)
    assert first["over first quarter"] == 0.0 and second["over first quarter"] > 0
    assert second["PSNR"] == clips.EQUAL_PSNR and second["worst"] == second["median"] == second["PSNR"]
    # a row in the middle that failed is made again, and what comes after it is not lost meanwhile
    holed = json.loads(json.dumps(saved[-1]))
    del holed["tables"][0]["rows"][0], holed["PSNR of each clip"]["PyTorch, 16 bit, torch"]
    saved.append(holed)
    made, make = [], clips.make_clips
    monkeypatch.setattr(clips, "make_clips", lambda *args: made.append(1) or make(*args))
    for before, missing in zip(list(saved), (3, 2, 1, 0, 1), strict=True):
        made.clear()
        kept = []

        def keep(tables, data, kept=kept):
            kept.append(sum(len(table.rows) for table in tables))

        again = clips.run(torch.device("cpu"), seeds=2, steps=1, earlier=before, save=keep)
        assert len(made) == 1 + missing  # the exact clips, and what was not there
        assert all(rows >= 4 - missing for rows in kept)
        assert again[0] == tables and again[1] == data


def test_rows_cover_the_recipes_and_the_papers_ablation():
    names = clips.main_rows(torch.device("cpu"))
    assert {"int8_int8, window of a quarter", "SageAttention 2", "nvfp4, no step grouped",
            "nvfp4, int8_int8 in the first and last fifth, every step grouped"} <= set(names)  # fmt: skip
    rows = list(clips.ablation_rows(torch.device("cpu")))
    assert {"first quarter", "uniform quarter", "every step"} <= {policy for _, policy in rows}
    # the one that says again what the pack does is left out
    assert ("int8_int8", "first quarter, then no means") in rows
    assert ("int8_int8", "first quarter, then means in token order") not in rows
    assert ("int8_fp8 + ExpCast", "first quarter, then no means") not in rows
