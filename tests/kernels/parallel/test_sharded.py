"""Every engine with two processes on a CPU, and the state that its calls share."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.dispatch import plain
from comfyui_vc_attention.kernels.parallel.sharded import ShardedAttention, refuse
from comfyui_vc_attention.kernels.testing import energy_removed, exact_attention, relative_l2, sample_qkv

MERGE_BOUND = 1.1  # of the error of one process: a shard's scales fit its own keys
needs_diffusers = pytest.mark.skipif(
    importlib.util.find_spec("diffusers") is None, reason="needs diffusers (pip install --no-deps)"
)


def test_ulysses_finds_the_order_of_one_process(outcome):
    order = torch.cat([result["order"] for result in outcome.by_rank], 1)
    assert order.equal(outcome.grouping.order)


def test_ulysses_equals_one_process(outcome):
    grouped = outcome.one_process(grouping=outcome.grouping)
    assert relative_l2(outcome.output("ulysses"), grouped) < 1e-6
    later = outcome.one_process(config=plain(outcome.config))
    assert relative_l2(outcome.output("ulysses after the window"), later) < 1e-6


def test_ring_stays_within_the_merge_bound(outcome):
    alone = relative_l2(outcome.one_process(), outcome.exact)
    assert outcome.error("ring") < MERGE_BOUND * alone


def test_ring_groups_nothing(outcome):
    assert outcome.output("ring in the window").equal(outcome.output("ring"))


@pytest.mark.parametrize("fault", ["base 2", "missing mean"])
def test_wrong_log_sum_exp_is_caught(outcome, fault):
    alone = relative_l2(outcome.one_process(), outcome.exact)
    assert outcome.error(f"ring, {fault}") > 5 * alone


@needs_diffusers
def test_a_whole_model_under_diffusers_own_context_parallelism(folder):
    """WanTransformer3DModel.enable_parallelism with two processes; text attention stays where it was."""
    for rank in range(2):
        made = torch.load(folder / f"diffusers{rank}.pt")
        alone = made["model, alone"]
        assert relative_l2(made["model, ulysses"], alone) < 1e-6
        assert relative_l2(made["model, ring"], alone) < 1e-3
        assert all(made[f"model, {way}, declined"] == {"cross-attention": 2} for way in ("ulysses", "ring"))


@needs_diffusers
def test_heads_and_tokens_that_two_ranks_do_not_divide(folder, ranks):
    """diffusers' ulysses_anything and ring_anything: three heads, 719 tokens."""
    by_rank = [torch.load(folder / f"diffusers{rank}.pt") for rank in range(2)]
    q, k, v = (x[:, :3, :-1] for x in ranks.inputs())
    config = VCConfig(clusters=ranks.CLUSTERS)
    grouping = group_tokens(v, config.clusters_for(v.shape[2]))
    one = vc_attention(q, k, v, config, grouping=grouping, kernel="reference")
    ulysses, ring = (
        torch.cat([made[f"uneven, {way}"] for made in by_rank], 2) for way in ("ulysses", "ring")
    )
    assert relative_l2(ulysses, one) < 1e-6
    exact = exact_attention(q, k, v)[0]
    alone = relative_l2(vc_attention(q, k, v, config, kernel="reference"), exact)
    assert relative_l2(ring, exact) < MERGE_BOUND * alone


def test_shards_have_less_in_common_than_the_whole():
    """Why a ring keeps token order; the README has the numbers for 16,384 tokens."""
    generator = torch.Generator().manual_seed(0)
    centres = 0.75 * torch.randn(1, 1, 64, 64, generator=generator)
    labels = torch.randint(0, 64, (1, 1, 4096), generator=generator)
    v = torch.randn(1, 1, 4096, 64, generator=generator)
    v += centres.gather(2, labels[..., None].expand(-1, -1, -1, 64))
    removed = [energy_removed(v)]
    for shards in (4, 2, 1):
        parts = [part.contiguous() for part in v.chunk(shards, 2)]
        shares = [energy_removed(part, group_tokens(part, 64).order) for part in parts]
        removed.append(sum(shares) / shards)
    assert removed == sorted(removed)
    assert removed[-1] > 2 * removed[1]


@pytest.fixture
def qkv():
    return sample_qkv("clustered", (1, 2, 160, 64))


@pytest.fixture
def sharded():
    return ShardedAttention(VCConfig(clusters=4), kernel="reference")


def test_without_a_step_values_keep_token_order(sharded, qkv):
    assert sharded.attend(*qkv).equal(vc_attention(*qkv, sharded.config, kernel="reference"))
    assert not sharded.groupings


def test_orders_last_four_steps_and_go_after_the_window(sharded, qkv):
    made_in = []
    for step in range(10):
        sharded.begin_forward(step, grouped=step < 6)
        sharded.attend(*qkv)
        made_in.append({made for made, _ in sharded.groupings.values()})
    assert made_in == [{0}] * 4 + [{4}] * 2 + [set()] * 4


@pytest.mark.parametrize(("value_format", "means"), [("int8", True), ("fp8", False)])
@pytest.mark.parametrize("keys_split", [False, True])
def test_after_the_window_int8_values_keep_their_means(qkv, value_format, means, keys_split):
    config = VCConfig(value_format=value_format, clusters=4)
    sharded = ShardedAttention(config, kernel="reference")
    sharded.begin_forward(5, grouped=False)
    made = sharded.attend(*qkv, keys_split=keys_split, return_lse=True)
    alone = vc_attention(*qkv, replace(config, demean=means), kernel="reference", return_lse=True)
    assert all(one.equal(other) for one, other in zip(made, alone, strict=True))


def test_layers_and_halves_of_guidance_have_their_own_orders(sharded, qkv):
    for branch in (0, 1):
        sharded.begin_forward(0, grouped=True, branch=branch)
        sharded.attend(*qkv)
        sharded.attend(*qkv)
    assert set(sharded.groupings) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_next_clip_starts_with_fresh_orders(sharded, qkv):
    for step in (2, 0):
        sharded.begin_forward(step, grouped=True)
        sharded.attend(*qkv)
    assert [made for made, _ in sharded.groupings.values()] == [0]


def test_cross_attention_is_not_grouped_and_not_counted_as_a_layer(sharded, qkv):
    q, k, v = qkv
    sharded.begin_forward(0, grouped=True)
    sharded.attend(q, k[:, :, :20], v[:, :, :20])
    sharded.attend(q, k[:, :, :150], v[:, :, :150])  # padding cut off the keys
    assert list(sharded.groupings) == [(0, 0)]


def test_masked_keys_do_not_exist(sharded, qkv):
    q, k, v = qkv
    mask = torch.arange(160)[None] < 150
    sharded.begin_forward(0, grouped=True)
    masked = sharded.attend(q, k, v.masked_fill(~mask[0, :, None], torch.nan), key_mask=mask)
    assert masked.isfinite().all()


def test_refusals_name_the_engine_and_what_it_asked():
    refuse("an engine", dropout=0.0, causal_mask=False)
    with pytest.raises(ValueError, match="VC-Attention in an engine has no causal mask, softcap"):
        refuse("an engine", causal_mask=True, softcap=1.0)
