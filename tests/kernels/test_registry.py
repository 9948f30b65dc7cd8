"""Choosing a kernel: the table's order, refusals that say why, explicit names."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_vc_attention.kernels import KERNELS, AttentionProblem, VCConfig, choose_kernel
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.group import cuda_kmeans
from comfyui_vc_attention.kernels.registry import joined, kernel_named, load_grouping

NAMES = [spec.name for spec in KERNELS]
H100 = AttentionProblem.self_attention(256, heads=2, device_type="cuda", capability=(9, 0))
CPU = replace(H100, device_type="cpu", capability=None)


def with_triton(monkeypatch):
    monkeypatch.setattr("comfyui_vc_attention.kernels.registry._triton_missing", lambda: None)


def test_names_are_unique_and_end_with_the_reference():
    assert len(set(NAMES)) == len(NAMES) and NAMES[-1] == "reference"
    for spec in KERNELS[:-1]:
        backend, _, rest = spec.name.partition("_")
        assert backend in ("cuda", "triton")
        assert any(rest.startswith(numerics) for numerics in spec.numerics), spec.name


def test_auto_never_picks_the_reference():
    choice = choose_kernel(CPU)
    assert choice.kernel is None
    assert "reference" in choice.reason and "got a CPU" in choice.reason


def test_reference_by_name_runs_anywhere():
    assert choose_kernel(CPU, "reference").kernel.name == "reference"
    assert choose_kernel(CPU, "reference").recipe.numerics == "int8_int8"


@pytest.mark.parametrize(
    ("capability", "numerics", "expcast"),
    [
        ((8, 0), "int8_int8", False),
        ((8, 6), "int8_int8", False),
        ((8, 9), "int8_int8", False),
        ((9, 0), "int8_fp8", True),
        ((10, 0), "fp8_fp8", True),
        ((10, 3), "fp8_fp8", True),
        ((12, 0), "int8_int8", False),
    ],
)
def test_auto_per_card(monkeypatch, capability, numerics, expcast):
    with_triton(monkeypatch)
    choice = choose_kernel(replace(H100, capability=capability))
    assert (choice.recipe.numerics, choice.recipe.expcast) == (numerics, expcast)


def test_only_kernels_that_could_compute_it_say_why_they_do_not():
    ada = replace(H100, capability=(8, 9), config=VCConfig("4-bit"))
    assert choose_kernel(ada).reason.startswith("cuda_nvfp4_sm120: needs 4-bit tensor cores of sm_120")
    turing = replace(H100, capability=(7, 5), config=VCConfig())
    assert "fp8" not in choose_kernel(turing).reason


def test_old_cards_get_a_reason(monkeypatch):
    with_triton(monkeypatch)
    choice = choose_kernel(replace(H100, capability=(7, 5)))
    assert choice.kernel is None and "needs sm_80 or newer, got sm_75" in choice.reason


def test_rocm_is_named():
    assert "got an AMD GPU" in choose_kernel(replace(H100, device_type="rocm", capability=None)).reason


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (10, 3)])
def test_4_bit_runs_only_where_the_card_multiplies_4_bits(monkeypatch, capability):
    with_triton(monkeypatch)
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.why_no_build", lambda: None)
    problem = replace(H100, config=VCConfig("4-bit"), capability=capability)
    assert choose_kernel(problem).kernel is None
    got = f"got sm_{capability[0]}{capability[1]}"
    refused = choose_kernel(problem, "cuda_nvfp4_sm120")
    assert refused.kernel is None and got in refused.reason and "4-bit tensor cores" in refused.reason
    assert choose_kernel(problem, "reference").recipe.numerics == "nvfp4"


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_4_bit_on_consumer_blackwell(monkeypatch, capability):
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.why_no_build", lambda: None)
    problem = replace(H100, config=VCConfig("4-bit"), capability=capability)
    choice = choose_kernel(problem)
    assert choice.kernel.name == "cuda_nvfp4_sm120"
    assert choice.recipe == Recipe("nvfp4", smooth_q=True)
    eight = choose_kernel(replace(problem, config=VCConfig()), "cuda_nvfp4_sm120")
    assert eight.kernel is None and "computes nvfp4, asked for 8-bit" in eight.reason
    small = replace(problem, q_shape=(1, 2, 256, 64), k_shape=(1, 2, 256, 64))
    assert "needs head_dim 128, got 64" in choose_kernel(small, "cuda_nvfp4_sm120").reason


def test_more_heads_than_a_grid_has_go_to_triton(monkeypatch):
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.why_no_build", lambda: None)
    monkeypatch.setattr("comfyui_vc_attention.kernels.registry._triton_missing", lambda: None)
    shape = (2000, 40, 128, 128)
    problem = replace(H100, q_shape=shape, k_shape=shape)
    assert choose_kernel(problem).kernel.name == "triton_int8_fp8"
    reason = choose_kernel(problem, "cuda_int8_fp8_sm90").reason
    assert "takes at most 65,535 heads of all batches, got 80,000" in reason
    v = torch.empty(1, dtype=torch.bfloat16).expand(shape)
    assert "got 80,000" in cuda_kmeans.why_not(v) and cuda_kmeans.why_not(v[:1]) is None


def test_an_explicit_kernel_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr("comfyui_vc_attention.kernels.registry._triton_missing", lambda: "needs Triton (x)")
    choice = choose_kernel(H100, "triton_int8_fp8")
    assert choice.kernel is None and choice.reason == "triton_int8_fp8: needs Triton (x)"


def test_an_explicit_kernel_does_not_bend_the_config(monkeypatch):
    with_triton(monkeypatch)
    choice = choose_kernel(replace(H100, config=VCConfig(expcast="on")), "triton_int8_int8")
    assert choice.kernel is None and "computes int8_int8, asked for 8-bit, expcast on" in choice.reason


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown kernel 'sage'; choose auto, .*reference"):
        choose_kernel(CPU, "sage")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtypes": (torch.float64,) * 3}, "takes bf16, fp16 and fp32, got float64"),
        ({"dtypes": (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16)}, "got bfloat16, float8_e4m3fn"),
        (
            {"q_shape": (1, 2, 256, 96), "k_shape": (1, 2, 256, 96)},
            "needs head_dim 16, 32, 64 or 128, got 96",
        ),
    ],
)
def test_what_no_kernel_takes(change, message):
    assert message in choose_kernel(replace(CPU, **change), "reference").reason


def test_problem_of_tensors():
    q = torch.empty(1, 2, 5, 64, dtype=torch.float16)
    problem = AttentionProblem.of(q, q, q, VCConfig(clusters=3))
    assert problem.q_shape == (1, 2, 5, 64) and problem.device_type == "cpu" and problem.capability is None
    assert problem.dtypes == (torch.float16,) * 3 and problem.config.clusters == 3 and problem.head_dim == 64


def test_kernel_named_and_grouping_for_a_cpu():
    assert kernel_named("reference").load().attend.__module__.endswith("attend.reference")
    assert load_grouping(torch.empty(1, 1, 2, 128), 8).__module__.endswith("group.reference")


@pytest.mark.parametrize(
    ("nvrtc", "triton", "capability", "module"),
    [
        (None, None, (9, 0), "group.cuda_kmeans"),
        ("was not found", None, (9, 0), "group.triton_kmeans"),
        (None, "needs Triton", (8, 6), "group.cuda_kmeans"),
        (None, None, (7, 5), "group.triton_kmeans"),
        ("was not found", "needs Triton", (9, 0), "group.reference"),
    ],
)
def test_grouping_on_a_card_is_what_can_be_built_there(monkeypatch, nvrtc, triton, capability, module):
    pytest.importorskip("triton")
    card = SimpleNamespace(major=capability[0], minor=capability[1], shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr("comfyui_vc_attention.kernels.attend.cuda_build.why_no_build", lambda: nvrtc)
    monkeypatch.setattr("comfyui_vc_attention.kernels.registry._triton_missing", lambda: triton)
    v = SimpleNamespace(device=torch.device("cuda", 0), shape=(1, 1, 256, 128), dtype=torch.bfloat16)
    assert load_grouping(v, 128).__module__.endswith(module)


def test_kernels_that_refuse_alike_are_named_together():
    assert joined(["a: needs x", "b: needs x"]) == "every kernel needs x"
    assert joined(["a: needs x", "b: needs y", "c: needs x"]) == "a, c: needs x; b: needs y"
    assert joined(["a: needs x"]) == "a: needs x"
