from types import SimpleNamespace

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, attend_call, group_tokens, prepare_call, vc_attention
from comfyui_vc_attention.kernels.dispatch import plain
from comfyui_vc_attention.nodes import head_groups
from comfyui_vc_attention.nodes.head_groups import FEWEST, attend_by_heads, free_memory, groups_needed

CONFIGS = [
    VCConfig("8-bit", "off", "int8", clusters=4),
    VCConfig("8-bit", "on", "fp8", clusters=4),
    VCConfig("4-bit", clusters=4),
]


def tensors(batch=2, heads=6, queries=70, keys=200, width=64):
    torch.manual_seed(0)
    # as a model lays them out: [B, L, H, D] in memory
    make = lambda length: torch.randn(batch, length, heads, width).transpose(1, 2)  # noqa: E731
    return make(queries), make(keys), make(keys)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.precision} {config.value_format}")
@pytest.mark.parametrize("groups", [2, 3, 4, 6])
def test_the_same_as_all_heads_at_once(config, groups, monkeypatch):
    """Operands to the bit; of the output, a CPU's BLAS may round the last bit of a sum otherwise."""
    q, k, v = tensors()
    grouping = group_tokens(v, 4)
    for settings, order in ((config, grouping), (plain(config), None)):
        call = {"grouping": order, "kernel": "reference"}
        whole, attend = prepare_call(q, k, v, settings, **call), Attend()
        monkeypatch.setattr(head_groups, "attend_call", attend)
        split = attend_by_heads(q, k, v, settings, groups, **call)
        for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "v_mean"):
            made = [getattr(part, name) for part in attend.operands]
            if made[0] is not None:
                joined = torch.cat([as_bytes(tensor) for tensor in made], 1)
                assert torch.equal(joined, as_bytes(getattr(whole.operands, name))), name
        out, _ = attend_call(whole)
        assert split.stride() == out.stride()
        torch.testing.assert_close(split, out, rtol=0, atol=1e-6)


class Attend:
    """attend_call that keeps what it was given."""

    def __init__(self):
        self.operands = []

    def __call__(self, prepared, out):
        self.operands.append(prepared.operands)
        return attend_call(prepared, out)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_masks_and_scales_go_to_every_group():
    q, k, v = tensors()
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[1, 50:120] = False
    call = {"key_mask": mask, "scale": 0.2, "kernel": "reference", "grouping": group_tokens(v, 4, None, mask)}
    whole, split = (
        vc_attention(q, k, v, CONFIGS[0], **call),
        attend_by_heads(q, k, v, CONFIGS[0], 3, **call),
    )
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6)


def test_as_many_groups_as_memory_asks_for():
    shape = SimpleNamespace(numel=lambda: 40 * 1000, element_size=lambda: 2, shape=(1, 40, 10, 100))
    out, beside = 80_000, 1.1 * 120_000
    assert groups_needed(shape, shape, None) == 1
    assert groups_needed(shape, shape, int(out + beside) + 1) == 1
    assert groups_needed(shape, shape, int(out + beside) - 1) == FEWEST
    assert groups_needed(shape, shape, out + int((out + beside) / 20)) in (20, 21)
    assert groups_needed(shape, shape, out + 1) == 40
    assert groups_needed(shape, shape, 0) == FEWEST


def test_nobody_knows_what_is_free_on_a_cpu():
    assert free_memory(torch.device("cpu")) is None


def test_free_memory_is_what_comfyui_says(monkeypatch):
    management = SimpleNamespace(get_free_memory=lambda device: 7)
    monkeypatch.setattr(head_groups, "sys", SimpleNamespace(modules={"comfy.model_management": management}))
    assert free_memory(torch.device("cuda", 0)) == 7
