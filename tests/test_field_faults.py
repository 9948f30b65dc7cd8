"""Faults of installers and registry archives that users of other packs reported; FAULTS.md lists them all."""

import builtins
import threading
import time
from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels import KERNELS, AttentionProblem, choose_kernel, registry
from comfyui_vc_attention.kernels.attend import cuda_build

ROW = AttentionProblem.self_attention(8192, device_type="cuda", capability=(9, 0))


def import_that_fails(monkeypatch, module, error):
    real = builtins.__import__

    def fails(name, *args, **kwargs):
        if name.partition(".")[0] == module:
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fails)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'triton'"),
        ImportError("DLL load failed"),
        OSError("libcuda.so: cannot open"),
    ],
    ids=["absent", "dll", "library"],
)
def test_i03_the_true_import_error_is_the_reason(monkeypatch, error):
    import_that_fails(monkeypatch, "triton", error)
    row = replace(ROW, capability=(8, 9))
    choice = choose_kernel(row, "triton_int8_int8")
    assert choice.kernel is None and f"needs Triton ({error})" in choice.reason
    if cuda_build.why_no_build() is None:
        assert choose_kernel(row).kernel.name == "cuda_int8_int8"


def test_i04_a_kernel_for_another_architecture_is_refused_before_any_launch():
    choice = choose_kernel(replace(ROW, capability=(12, 0)), "cuda_int8_fp8_sm90")
    assert choice.kernel is None and "needs sm_90 (H100, H200), got sm_120" in choice.reason


@pytest.mark.parametrize("capability", [(5, 0), (6, 1), (7, 0), (7, 5), (8, 7), (11, 0), (12, 1), (13, 0)])
def test_i05_every_capability_gets_a_kernel_or_a_reason(monkeypatch, capability):
    monkeypatch.setattr(registry, "_triton_missing", lambda: None)
    choice = choose_kernel(replace(ROW, capability=capability))
    if capability < (8, 0):
        assert choice.kernel is None and f"got sm_{capability[0]}{capability[1]}" in choice.reason
    else:
        # and the node tests it there before it uses it
        assert choice.kernel.name.startswith(("cuda_int8_int8", "triton"))


def test_i09_kernels_are_built_one_at_a_time(monkeypatch, tmp_path):
    building, most = [], []

    def build(source, arch, defines):
        building.append(source)
        most.append(len(building))
        time.sleep(0.02)
        building.pop()
        return b""

    monkeypatch.setattr(cuda_build, "cached_cubin", build)
    monkeypatch.setattr(cuda_build, "CudaModule", lambda *args: args)
    monkeypatch.setattr(cuda_build, "_modules", {})
    device = torch.device("cuda", 0)
    threads = [
        threading.Thread(target=cuda_build.load_module, args=(tmp_path / f"{i}.cu", "sm_80", device))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_a_row_of_the_registry_never_raises_for_a_device(monkeypatch):
    devices = [{"device_type": name, "capability": None} for name in ("cpu", "rocm", "mps", "xpu", "meta")]
    devices += [{"device_type": "cuda", "capability": c} for c in ((3, 5), (9, 0), (99, 9))]
    for spec in KERNELS:
        for device in devices:
            choice = choose_kernel(replace(ROW, **device), spec.name)
            assert choice.kernel or choice.reason.startswith(spec.name)
