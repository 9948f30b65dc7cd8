import pytest
import torch
from comfyui_vc_attention.kernels import benchmark
from comfyui_vc_attention.kernels.benchmark import (
    SHAPES,
    Exact,
    Result,
    Shape,
    count_of_functions,
    fitting,
    guarded,
    make_inputs,
    median_ms,
    run_benchmark,
    shape_named,
    table,
)
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2

from tests.evidence.bounds import bound

CPU = torch.device("cpu")
SMALL = Shape("small", 2, 256)


@pytest.fixture(scope="module")
def results():
    return list(run_benchmark(SMALL, CPU, torch.bfloat16, seconds=0.0))


def test_every_function_is_told_measured_or_refused(results):
    assert len(results) == count_of_functions()
    for result in results:
        assert bool(result.refusal) != bool(result.milliseconds), result


def test_reference_runs_and_errs_a_little(results):
    (ours,) = [r for r in results if r.name.startswith("reference")]
    assert 0 < ours.error < bound("int8_int8, means, sequence")
    assert 0 < ours.grouped_error < bound("int8_int8, means, grouped")
    assert min(ours.attend_milliseconds, ours.grouped_milliseconds, ours.grouping_milliseconds) > 0


def test_pytorch_errs_by_its_rounding_alone(results):
    assert results[0].name == "PyTorch" and 0 < results[0].error < 0.005


def test_error_in_a_few_rows_stands_for_all():
    q, k, v = make_inputs(Shape("x", 6, 700), "clustered", torch.float32, CPU)
    exact = exact_attention(q, k, v)[0]
    out = exact + 0.03 * exact.std() * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    assert Exact(q, k, v).error(out) == pytest.approx(relative_l2(out, exact), rel=0.1)


def test_inputs_have_the_shape_and_differ_by_head():
    q, _, v = make_inputs(SMALL, "gauss", torch.float16, CPU)
    assert q.shape == (1, 2, 256, 128) and v.dtype == torch.float16
    assert not torch.equal(q[:, 0], q[:, 1])


def test_large_shapes_are_cut_without_a_gpu_and_say_so():
    cut = fitting(shape_named("Wan 14B, 1280x720, 81 frames"), CPU)
    assert (cut.heads, cut.tokens) == (2, 1024) and "cut to 2 heads" in cut.name
    assert fitting(SMALL, CPU) is SMALL
    assert fitting(SHAPES[1], torch.device("cuda")) is SHAPES[1]


def test_unknown_shapes_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="small test"):
        shape_named("Wan 99B")


def test_a_function_that_raises_hides_no_other():
    def broken():
        raise RuntimeError("CUDA out of memory\nmore")

    assert guarded("x", broken) == Result("x", "failed: CUDA out of memory")

    def refusing():
        raise AssertionError("Input tensors must be in float16 or bfloat16")

    assert guarded("y", refusing).refusal.startswith("failed: Input tensors must be")
    with pytest.raises(KeyboardInterrupt):
        guarded("x", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_median_takes_at_least_three():
    calls = []
    assert median_ms(lambda: calls.append(1), CPU, 0.0) >= 0 and len(calls) == 3


@pytest.mark.parametrize(
    ("milliseconds", "calls", "waits"),
    [(0.5, 3 + 6 * 20, 2), (6.0, 3 + 6 * 2, 2), (10.0, 3 + 6, 2), (500.0, 3, 1)],
)
def test_a_gpus_calls_follow_each_other_without_a_pause(monkeypatch, milliseconds, calls, waits):
    """The first call also takes 40 ms to wake the card: it must not count."""
    clock, called, waited = [0.0], [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def synchronize(self):
            waited.append(1)

        def elapsed_time(self, end):
            return end.at - self.at

    def call():
        clock[0] += milliseconds + (0 if called else 40)
        called.append(1)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert median_ms(call, torch.device("cuda"), 0.05) == pytest.approx(milliseconds)
    assert (len(called), len(waited)) == (calls, waits)


def test_table_compares_with_pytorch():
    rows = [
        Result("PyTorch", milliseconds=10.0, error=0.002),
        Result("ours", None, 4.0, 3.0, 4.5, 1.0, 0.01, 0.009, 2**20),
        Result("sage", "not installed"),
    ]
    lines = table(SMALL, rows)
    assert lines[1] == "fastest: ours, 4.00 ms, 2.50x PyTorch, error 1.00%"
    assert "2.50x" in lines[4] and "1.00%" in lines[4] and "0.90%" in lines[4]
    assert lines[5].endswith("not installed")
    assert len(table(SMALL, rows[2:])) == 3


def test_command_prints_the_table(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "fitting", lambda shape, device: SMALL)
    assert benchmark.main(["--seconds", "0"]) == 0
    assert "small: 2 heads of 128, 256 tokens" in capsys.readouterr().out
