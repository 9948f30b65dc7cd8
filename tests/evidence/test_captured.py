"""Captures of a model's attention, on an untrained model of one block."""

import pytest
import torch
from evidence import captured
from sample_model.model import WanVideoModel, initialise


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    model = initialise(WanVideoModel(layers=1)).eval()
    monkeypatch.setattr(captured, "load_model", lambda weights, device: model)


def test_captures_name_step_and_block_and_know_the_step_before():
    first, second = captured.captured_samples((0, 1), (0,), of_steps=2, cfg=2.0)
    assert first.name == "captured, step 1 of 2, block 1" and first.earlier is None
    assert second.q.shape == (1, 2, 1440, 128) and second.q.dtype == torch.bfloat16
    assert second.earlier.equal(first.v) and not second.v.equal(first.v)


def test_watched_counts_steps_and_branches():
    seen = []

    class Listener:
        def begin(self, *call):
            seen.append(call)

    class Model:
        head = None

        def __call__(self, x, timestep, context):
            return x

    watched = captured.Watched(Model(), 2, Listener())
    for timestep in (1000.0, 1000.0, 888.9, 888.9, 1000.0):
        watched(torch.zeros(1), torch.tensor([timestep]), None)
    assert seen == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (0, 0, 2)]


def test_long_captures_gather_heads():
    q, _, v = captured.captured_long((2, 4, 6), 3)
    assert q.shape == v.shape == (1, 3, 48, 128)
    with pytest.raises(ValueError, match="got a request for 99"):
        captured.captured_long((1, 2, 2), 99)
