"""The self-test passes sound kernels and rejects broken ones; every break here once reached users."""

import math
import threading
from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels import selftest
from comfyui_vc_attention.kernels.registry import KernelSpec, Stages, kernel_named
from comfyui_vc_attention.kernels.selftest import CASES, Case, Check, refusal, run_wide, self_test
from comfyui_vc_attention.kernels.testing import ERROR_LIMITS

REFERENCE = kernel_named("reference").load()
CPU = torch.device("cpu")
# the same cases, smaller where the reference on a CPU is slow
SMALL = tuple(replace(case, keys=min(case.keys, 3000)) for case in CASES)
MEANS = tuple(case for case in CASES if case.name == "means")
MASKED = tuple(case for case in CASES if case.masked)


def kernel(numerics, prepare=REFERENCE.prepare, attend=REFERENCE.attend):
    return KernelSpec("broken", (numerics,), lambda: Stages(prepare, attend), lambda problem: None)


@pytest.mark.parametrize("numerics", sorted(ERROR_LIMITS))
def test_a_sound_kernel_passes_every_case(numerics):
    checks = self_test(kernel(numerics), CPU, SMALL)
    assert refusal(checks) == ""
    names = [check.name for check in checks]
    assert ("expcast on" in names) == numerics.endswith("fp8")
    assert {"plain", "means", "masked keys", "long sums", "head dim 64"} <= set(names)
    assert str(checks[-1]).startswith("rows past 2^31: not tested")


@pytest.mark.parametrize("numerics", sorted(ERROR_LIMITS))
def test_n15_noise_is_rejected(numerics):
    def noise(operands):
        out, lse = REFERENCE.attend(operands)
        return torch.randn_like(out), lse

    assert "means" in refusal(self_test(kernel(numerics, attend=noise), CPU, MEANS))


@pytest.mark.parametrize("numerics", sorted(ERROR_LIMITS))
def test_a_dropped_tile_mean_is_rejected(numerics):
    def drops_one(*args, **options):
        operands = REFERENCE.prepare(*args, **options)
        operands.v_mean[:, 1, 3] = 0
        return operands

    assert "means" in refusal(self_test(kernel(numerics, prepare=drops_one), CPU, MEANS))


def test_one_wrong_block_of_rows_is_rejected():
    def one_block(operands):
        out, lse = REFERENCE.attend(operands)
        out[:, 1, 128:256] *= 1.05
        return out, lse

    assert "means" in refusal(self_test(kernel("int8_int8", attend=one_block), CPU, MEANS))


def test_one_nan_is_rejected():
    def one_nan(operands):
        out, lse = REFERENCE.attend(operands)
        out[0, 0, 0, 0] = math.nan
        return out, lse

    checks = self_test(kernel("int8_int8", attend=one_nan), CPU, MEANS)
    assert checks[0].error == math.inf and not checks[0].passed


def test_a_key_that_does_not_exist_must_not_be_read():
    def reads_all(q, k, v, recipe, *, key_count=None, **options):
        return REFERENCE.prepare(q, k, v, recipe, key_count=None, **options)

    assert "masked keys: error inf" in refusal(self_test(kernel("int8_int8", prepare=reads_all), CPU, MASKED))


def test_a_wrong_log_sum_exp_is_rejected():
    def shifted(operands):
        out, lse = REFERENCE.attend(operands)
        return out, None if lse is None else lse + 0.1

    wrong = refusal(self_test(kernel("int8_int8", attend=shifted), CPU, MASKED))
    assert wrong.startswith("masked keys, log-sum-exp")


def test_an_order_that_is_no_permutation_stops_it(monkeypatch):
    def repeats(v, clusters, previous, key_mask):
        grouping = selftest_grouping(v, clusters, previous, key_mask)
        grouping.order[..., 0] = grouping.order[..., 1]
        return grouping

    selftest_grouping = selftest.load_grouping(torch.empty(1, 1, 2, 128), 8)
    monkeypatch.setattr(selftest, "load_grouping", lambda v, clusters: repeats)
    with pytest.raises(ArithmeticError, match="no permutation"):
        self_test(kernel("int8_int8"), CPU, MEANS)


def test_wide_views_are_compared_row_by_row():
    assert run_wide(kernel("int8_int8"), CPU, step=2**9).passed

    def wraps(q, k, v, *args, **options):
        for x in (q, k, v):  # what 32-bit offsets do to the rows behind 2^31
            x[:, :, 256:] = x[:, :, :14]
        return REFERENCE.prepare(q, k, v, *args, **options)

    assert not run_wide(kernel("int8_int8", prepare=wraps), CPU, step=2**9).passed


def test_wide_views_are_left_out_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 8 * 10**9))
    check = run_wide(kernel("int8_int8"), torch.device("cuda", 0))
    assert check.passed and "not tested, it needs 5 GB of free GPU memory, 3.0 GB are free" in str(check)


def test_progress_comes_after_every_case():
    seen = []
    self_test(kernel("int8_int8"), CPU, MEANS, lambda: seen.append(1))
    assert len(seen) == selftest.steps_of(MEANS)


def test_cases_at_once_give_the_same_checks():
    seen = []
    spec = kernel("int8_fp8")
    assert self_test(spec, CPU, SMALL, lambda: seen.append(1), threads=3) == self_test(spec, CPU, SMALL)
    assert len(seen) == selftest.steps_of(SMALL)


def test_of_cases_at_once_only_the_first_of_every_build():
    lock, running, most = threading.Lock(), [], []

    def attend(operands):
        with lock:
            running.append(operands)
            most.append(len(running))
        out = REFERENCE.attend(operands)
        with lock:
            running.pop()
        return out

    cases = [replace(MEANS[0], name=str(i)) for i in range(6)]
    self_test(kernel("int8_int8", attend=attend), CPU, tuple(cases), threads=6)
    assert set(most) == {1}


def test_an_error_in_a_thread_reaches_the_caller():
    def fails(operands):
        raise KeyError("in a thread")

    with pytest.raises(KeyError, match="in a thread"):
        self_test(kernel("int8_int8", attend=fails), CPU, SMALL, threads=4)


def test_a_kernel_that_takes_no_such_calls_is_not_asked():
    spec = replace(kernel("int8_int8"), why_not=lambda problem: "never")
    assert self_test(spec, CPU, (Case("x", (1, 1, 4, 128), 4),))[0].note


def test_checks_read_as_sentences():
    assert str(Check("tails", 0.5, 0.03)) == "tails: error 0.5000, limit 0.03"
    assert refusal([Check("a", 0.5, 0.1), Check("b", 0.0, 0.1)]) == "a: error 0.5000, limit 0.1"
