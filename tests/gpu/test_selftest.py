"""On a card: every kernel that it can run passes its self-test, and a broken one does not."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from comfyui_vc_attention.kernels import KERNELS, AttentionProblem, device_record, validation
from comfyui_vc_attention.kernels.attend import cuda_build
from comfyui_vc_attention.kernels.benchmark import config_for
from comfyui_vc_attention.kernels.cuda_builds import builds
from comfyui_vc_attention.kernels.device_record import PASSED
from comfyui_vc_attention.kernels.registry import Stages, match
from comfyui_vc_attention.kernels.selftest import CASES, WIDE_BYTES, refusal, self_test

pytestmark = pytest.mark.gpu
MEANS = tuple(case for case in CASES if case.name == "means")


def runnable():
    """The rows that can run on this card."""
    if not torch.cuda.is_available():
        return []
    q = torch.empty(1, 1, 128, 128, dtype=torch.bfloat16, device="cuda")
    return [
        spec for spec in KERNELS[:-1] if match(spec, AttentionProblem.of(q, q, q, config_for(spec))).kernel
    ]


each_kernel = pytest.mark.parametrize("spec", runnable(), ids=lambda spec: spec.name)


@pytest.fixture
def empty_record(tmp_path, monkeypatch):
    """No kernel was tried yet; builds stay in the usual cache."""
    monkeypatch.setattr(device_record, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(device_record, "_memory", {})
    return tmp_path


@each_kernel
def test_passes_every_case(spec):
    free, _ = torch.cuda.mem_get_info()
    checks = self_test(spec, "cuda")
    for check in checks:
        print(f"{spec.name}: {check}")
    assert refusal(checks) == ""
    assert {"plain", "means", "masked keys", "long sums"} <= {check.name for check in checks}
    assert free < WIDE_BYTES or not checks[-1].note


@each_kernel
def test_noise_is_rejected(spec):
    def noise(operands):
        out, lse = spec.load().attend(operands)
        return torch.randn_like(out), lse

    broken = dataclasses.replace(spec, load=lambda: Stages(spec.load().prepare, noise))
    assert "means" in refusal(self_test(broken, "cuda", MEANS))


@each_kernel
def test_dropped_means_of_one_head_are_rejected(spec):
    def drops(*args, **options):
        operands = spec.load().prepare(*args, **options)
        means = operands.means if hasattr(operands, "means") else operands.v_mean
        means[:, -1] = 0
        return operands

    broken = dataclasses.replace(spec, load=lambda: Stages(drops, spec.load().attend))
    assert "means" in refusal(self_test(broken, "cuda", MEANS))


def test_all_that_was_loaded_is_in_the_compile_matrix(monkeypatch):
    monkeypatch.setattr(cuda_build, "_modules", {})
    for spec in runnable():
        self_test(spec, "cuda")
    listed = {
        (b.source, b.arch, b.defines) for b in builds(torch.cuda.get_device_capability(), everything=True)
    }
    assert {key[:3] for key in cuda_build._modules} <= listed


@each_kernel
def test_is_tried_timed_and_kept(spec, empty_record):
    entry = validation.validate(spec, "cuda")
    print(f"{spec.name}: {entry.seconds} s, from {entry.min_tokens}, {entry.speeds}")
    assert entry.state == PASSED, entry.reason
    assert entry.speeds[-1].tokens == validation.TIMED_TOKENS[-1]
    q = torch.empty(1, 1, 128, 128, dtype=torch.bfloat16, device="cuda")
    assert device_record.known(AttentionProblem.of(q, q, q), spec.name) == entry
    assert not list(empty_record.rglob("*.testing"))


WARM = """
import sys, time
sys.path.insert(0, {tests!r})
import conftest, torch
q = torch.randn(1, 4, 4096, 128, dtype=torch.bfloat16, device="cuda")
torch.cuda.synchronize()
begin, before = time.perf_counter(), set(sys.modules)
from comfyui_vc_attention.kernels import AttentionProblem, choose_kernel, group_tokens, vc_attention
choice = choose_kernel(AttentionProblem.of(q, q, q))
chosen = time.perf_counter()
vc_attention(q, q, q, grouping=group_tokens(q, 128), kernel=choice.kernel.name)
torch.cuda.synchronize()
end = time.perf_counter()
print(f"{{choice.kernel.name}}: chosen after {{chosen - begin:.3f}} s, output after {{end - begin:.3f}} s")
print(sorted((set(sys.modules) - before) & {{"triton", "torch._dynamo"}}))
print(end - begin)
"""


def test_a_warm_start_takes_less_than_300_ms(pack_root):
    """From torch and the card being there to the first output, in a new process; builds are in the cache."""
    program = WARM.format(tests=str(pack_root / "tests"))
    for _ in range(2):  # the first may build
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    print(f"warm start: {done.stdout.strip()}")
    assert float(done.stdout.split()[-1]) < 0.3
