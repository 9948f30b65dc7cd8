"""The diffusers adapter on a tiny Wan transformer of random weights."""

import pytest
import torch
from comfyui_vc_attention.kernels.adapters.diffusers_wan import patch_wan
from comfyui_vc_attention.kernels.testing import relative_l2

diffusers = pytest.importorskip("diffusers")
BLOCKS = 2


@pytest.fixture
def transformer():
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=1,
        attention_head_dim=128,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=64,
        num_layers=BLOCKS,
        rope_max_seq_len=32,
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.isnan().any():  # what a module allocates and never fills
                weight.fill_(0.0)
    return model.eval()


@pytest.fixture
def scheduler():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=8.0)
    scheduler.set_timesteps(16)
    return scheduler


@torch.inference_mode()
def forward(model, scheduler, step=0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, 3, 20, 20, generator=generator)  # 300 tokens: two tiles and a part
    text = torch.randn(1, 5, 16, generator=generator)
    return model(x, scheduler.timesteps[step][None], text, return_dict=False)[0]


def test_output_stays_close_to_exact_attention(transformer, scheduler):
    exact = forward(transformer, scheduler)
    patch = patch_wan(transformer, scheduler, kernel="reference")
    error = relative_l2(forward(transformer, scheduler), exact)
    assert 0 < error < 1e-3  # of the model's output, little of which is attention: 1.4e-4 was seen
    assert (patch.taken, dict(patch.declined)) == (BLOCKS, {})


def test_fused_projections_give_the_same(transformer, scheduler):
    patch_wan(transformer, scheduler, kernel="reference")
    separate = forward(transformer, scheduler)
    for block in transformer.blocks:
        block.attn1.fuse_projections()
    assert relative_l2(forward(transformer, scheduler), separate) < 1e-3


def test_remove_restores_what_was_there(transformer, scheduler):
    before = [block.attn1.processor for block in transformer.blocks]
    exact = forward(transformer, scheduler)
    patch = patch_wan(transformer, scheduler, kernel="reference")
    patch.remove()
    assert [block.attn1.processor for block in transformer.blocks] == before
    assert forward(transformer, scheduler).equal(exact)
    assert patch.taken == 0


def test_orders_are_kept_four_steps_and_freed_after_the_window(transformer, scheduler):
    patch = patch_wan(transformer, scheduler, kernel="reference", grouping_window=0.5, regroup_every=4)
    made_in = []
    for step in range(16):
        forward(transformer, scheduler, step)
        made_in.append({made for made, _ in patch.groupings.values()})
    assert made_in == [{0}] * 4 + [{4}] * 4 + [set()] * 8


def test_both_halves_of_guidance_have_their_own_orders(transformer, scheduler):
    patch = patch_wan(transformer, scheduler, kernel="reference")
    for _ in range(2):
        forward(transformer, scheduler)
    assert set(patch.groupings) == {(half, block) for half in (0, 1) for block in range(BLOCKS)}


def test_next_clip_starts_with_fresh_orders(transformer, scheduler):
    patch = patch_wan(transformer, scheduler, kernel="reference")
    forward(transformer, scheduler, step=2)
    forward(transformer, scheduler, step=0)
    assert {made for made, _ in patch.groupings.values()} == {0}


def test_a_call_no_kernel_takes_is_left_alone_and_counted(transformer, scheduler):
    exact = forward(transformer, scheduler)
    patch = patch_wan(transformer, scheduler, kernel="triton_int8_fp8")  # needs a GPU
    assert forward(transformer, scheduler).equal(exact)
    assert patch.taken == 0
    ((reason, count),) = patch.declined.items()
    assert "a CPU" in reason
    assert count == BLOCKS


def test_masked_call_is_declined(transformer, scheduler):
    attention = transformer.blocks[0].attn1
    exact = attention(x := torch.randn(1, 9, 128), attention_mask=(mask := torch.zeros(1, 1, 9, 9)))
    patch = patch_wan(transformer, scheduler, kernel="reference")
    assert attention(x, attention_mask=mask).equal(exact)
    assert list(patch.declined) == ["has a mask or foreign keys"]


def test_context_parallelism_goes_to_the_processor_that_knows_it(transformer, scheduler):
    patch = patch_wan(transformer, scheduler, kernel="reference")
    seen = []
    for block in transformer.blocks:
        processor = block.attn1.processor
        processor._parallel_config = "two cards"
        processor.previous = lambda attn, x, *rest: seen.append(attn) or x
        processor.previous.__dict__["_parallel_config"] = None
    forward(transformer, scheduler)
    assert len(seen) == BLOCKS
    assert patch.declined == {"context parallelism": BLOCKS}


def test_refuses_other_models(scheduler):
    with pytest.raises(ValueError, match="needs a WanTransformer3DModel, got Linear"):
        patch_wan(torch.nn.Linear(2, 2), scheduler)
