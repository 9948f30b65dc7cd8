import pytest
import torch
from comfyui_vc_attention.kernels import group_tokens
from comfyui_vc_attention.kernels.testing import energy_removed, exact_attention, relative_l2, sample_qkv
from comfyui_vc_attention.nodes.run_record import ErrorProbe, RunRecord, energy_shares


def test_energy_shares_match_the_measure_of_the_kernels_tests():
    _, _, v = sample_qkv("clustered", (1, 2, 1024, 128))
    order = group_tokens(v, 64).order
    plain, grouped = energy_shares(v, order).tolist()
    assert plain == pytest.approx(energy_removed(v), rel=1e-4)
    assert grouped == pytest.approx(energy_removed(v, order), rel=1e-4)
    assert grouped > plain


def test_energy_is_sampled_from_many_heads_and_tiles():
    v = torch.ones(2, 40, 100 * 128 + 5, 8)
    order = torch.arange(v.shape[2], dtype=torch.int32).expand(2, 40, -1)
    assert energy_shares(v, order).tolist() == pytest.approx([1.0, 1.0])


def test_no_energy_below_one_tile():
    v = torch.ones(1, 1, 100, 8)
    assert energy_shares(v, torch.zeros(1, 1, 100, dtype=torch.int32)) is None


def test_times_and_cells_add_up():
    record = RunRecord()
    for step in (0, 0, 1):
        with record.timed("kernel", torch.device("cpu")):
            record.add(step, 3, "kernel")
    record.close(torch.device("cpu"))
    assert record.timed_calls["kernel"] == 3 and record.milliseconds["kernel"] > 0
    assert record.cells[0, 3]["kernel"] == 2 and record.cells[1, 3]["kernel"] == 1


def test_a_call_that_raises_is_not_timed():
    record = RunRecord()
    with pytest.raises(RuntimeError), record.timed("kernel", torch.device("cpu")):
        raise RuntimeError
    assert not record.timed_calls


def test_energy_is_read_when_closed_and_dropped_otherwise():
    v = torch.randn(1, 1, 256, 8)
    order = torch.arange(256, dtype=torch.int32).expand(1, 1, -1)
    record, dropped = RunRecord(), RunRecord()
    for each in (record, dropped):
        each.add_energy(0, 1, v, order)
    record.close()
    dropped.drop()
    dropped.close()
    assert record.mean_energy() == pytest.approx(energy_shares(v, order).tolist())
    assert dropped.mean_energy() is None


def test_probe_estimates_the_error_of_the_whole_call():
    q, k, v = sample_qkv("clustered", (2, 3, 700, 64))
    exact = exact_attention(q, k, v)[0].float()
    out = exact + 0.05 * exact.std() * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    estimate = float(ErrorProbe(q, k, v, None).relative_l2(out))
    assert estimate == pytest.approx(relative_l2(out, exact), rel=0.1)


def test_one_error_per_block_kernel_and_grouping_worst_first():
    record = RunRecord()
    assert record.wants_error(0, "k", True) and not record.wants_error(0, "k", True)
    for block, grouped, error in ((0, True, 0.01), (0, False, 0.02), (1, True, 0.03)):
        record.wants_error(block, "k", grouped)
        record.add_error(block, "k", grouped, torch.tensor(error))
    record.wants_error(2, "k", False)  # asked for, but the kernel failed
    record.close()
    assert [block for block, _ in record.block_errors()] == [1, 0]
    assert dict(record.block_errors())[0] == pytest.approx(0.02)


@pytest.mark.gpu
def test_gpu_times_are_the_devices():
    record = RunRecord()
    a = torch.randn(4096, 4096, device="cuda")
    with record.timed("matmul", a.device):
        for _ in range(20):
            a = a @ a.mul(1e-3)
    record.close(a.device)
    assert record.milliseconds["matmul"] > 0.1 and record.peak_bytes > a.numel() * 4
