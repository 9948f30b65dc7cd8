"""Timing on a GPU, shared by the benchmarks."""

import itertools
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch


def alone_ms(call, calls=8, warmup_s=0.25):
    """Median milliseconds of a call by itself: warmed up, then back to back, without waiting for the GPU."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < warmup_s:
        call()
        torch.cuda.synchronize()
    events = [torch.cuda.Event(True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def interleaved_ms(calls, rounds=10, warmup=2):
    """Median milliseconds of each call, {name: ms}; they take turns, so that they meet the same clocks."""
    times = {name: [] for name in calls}
    for turn in range(warmup + rounds):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            result = call()
            end.record()
            torch.cuda.synchronize()
            del result
            if turn >= warmup:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def kernels_ms(call, rounds=5):
    """Milliseconds of each GPU kernel in a call, {name: ms}, longest first."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    kernels = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] = kernels.get(event.name, 0.0) + event.device_time / 1e3 / rounds
    return dict(sorted(kernels.items(), key=lambda item: -item[1]))


def peak_extra_bytes(call):
    """Memory that a call needs at its peak beyond what was allocated before, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def environment():
    """Card, driver, versions and commit, as a flat dict of strings."""
    import triton

    def said(*command):
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else "unknown"

    return {
        "card": torch.cuda.get_device_name(),
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": said("git", "rev-parse", "--short", "HEAD"),
    }
