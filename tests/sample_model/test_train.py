"""The training loop, on a few small steps; the model it made is judged in test_trained_model.py."""

import json

import pytest
import torch
from safetensors import safe_open
from sample_model.model import load_model
from sample_model.train import FILE_NAME, flow_loss, learning_rate, main


def test_smoke_run_writes_a_loadable_file(tmp_path):
    main(["--out", str(tmp_path), "--smoke", "--steps", "3"])
    assert len(json.loads((tmp_path / "loss.json").read_text())["loss"]) == 1
    model = load_model(tmp_path / FILE_NAME)
    assert len(model.blocks) == 6
    with safe_open(str(tmp_path / FILE_NAME), "pt") as file:
        assert file.metadata()["license"] == "Apache-2.0"
        assert {str(file.get_slice(name).get_dtype()) for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_the_exact_velocity_has_no_loss():
    point = torch.randn(1, 16, 1, 2, 2, generator=torch.Generator().manual_seed(0)).expand(8, -1, -1, -1, -1)

    def exact(x, timestep, context):
        return (x - point) / (timestep.view(-1, 1, 1, 1, 1) / 1000.0)

    loss = flow_loss(exact, point, None, torch.Generator().manual_seed(1))
    assert loss < 1e-6


@pytest.mark.parametrize("steps", [50, 4000])
def test_rate_rises_then_falls(steps):
    rates = [learning_rate(step, steps, 1.0) for step in range(steps)]
    assert max(rates) == pytest.approx(1.0, abs=0.02)
    assert rates[0] < 0.25
    assert rates[-1] < 0.03
