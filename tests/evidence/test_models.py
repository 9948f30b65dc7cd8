"""Stage "models": rows of the bench as tables, and what happens where it cannot run."""

import pytest
import torch
from evidence import models


def row(name, step_ms, attention_ms, whole_step_s):
    share = attention_ms / step_ms
    return {"name": name, "tokens": 75_600, "step_ms": step_ms, "attention_ms": attention_ms, "share": share,
            "peak_gib": 6.9, "whole_step_s": whole_step_s}  # fmt: skip


ROWS = [row("cuDNN", 1000.0, 750.0, 10.0), row("auto, grouped: a kernel", 600.0, 350.0, 6.0),
        row("auto, plain", 500.0, 250.0, 5.0), row("int8, grouped: another", 800.0, 550.0, 8.0),
        row("int8, plain", 700.0, 450.0, 7.0)]  # fmt: skip


def test_a_clip_is_a_quarter_of_grouped_steps():
    tables = steps, clips = models.empty_tables()
    models.add_rows(tables, "wan", ROWS)
    assert len(steps.rows) == 5 and all(len(r) == len(t.columns) for t in tables for r in t.rows)
    cudnn, auto, off = clips.rows
    assert cudnn[1:3] == ["cuDNN", 400.0] and cudnn[-1] == pytest.approx(4.0)  # a quarter is no attention
    assert auto[1:3] == ["`auto`", pytest.approx(10 * 6 + 30 * 5)] and off[2] == pytest.approx(290.0)
    assert cudnn[3:5] == [pytest.approx(400 / 210), pytest.approx(400 / 290)]


def test_what_it_needs_is_named():
    (steps, _), data = models.run(torch.device("cpu"))
    assert not steps.rows and not data and "COMFYUI_PATH" in steps.notes[0]


def test_a_model_that_fails_hides_no_other(monkeypatch):
    def bench(kind, blocks):
        if kind == "wan":
            raise RuntimeError("bench_wan.py ended with 1: no such file")
        return ROWS

    monkeypatch.setenv("COMFYUI_PATH", "somewhere")
    monkeypatch.setattr(models, "bench", bench)
    saved = []
    (steps, clips), data = models.run(torch.device("cuda"), save=lambda *now: saved.append(now))
    assert len(saved) == 2 and list(data) == ["h3"] and len(steps.rows) == 5 and len(clips.rows) == 3
    (note,) = steps.notes
    assert note.startswith("Wan 2.1 14B") and note.endswith("bench_wan.py ended with 1: no such file")


def test_the_last_words_of_a_bench_that_fails(monkeypatch):
    monkeypatch.setattr(models, "BENCH", "no_such_file.py")
    with pytest.raises(RuntimeError, match=r"ended with 2: .*no_such_file"):
        models.bench("wan", 1)
    monkeypatch.setattr(models, "LIMIT_S", 0.0)
    with pytest.raises(RuntimeError, match="took more than 0 s"):
        models.bench("wan", 1)
