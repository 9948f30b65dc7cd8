"""vc_attention, group_tokens and merge_attention: masks, refusals, custom ops, merging."""

import contextlib
import dataclasses

import pytest
import torch
from comfyui_vc_attention.kernels import (
    TokenGrouping,
    VCConfig,
    attend_call,
    dispatch,
    group_tokens,
    merge_attention,
    prepare_call,
    vc_attention,
)
from comfyui_vc_attention.kernels.dispatch import key_list, plain
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

CONFIGS = {
    "int8": VCConfig(),
    "fp8": VCConfig(value_format="fp8"),
    "expcast": VCConfig(expcast="on"),
    "4-bit": VCConfig("4-bit"),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def small(lq=60, lk=300, batch=2):
    return sample_qkv("clustered", (batch, 2, lq, 64), keys=lk, dtype=torch.bfloat16)


def mask_of(lk, batch=2):
    return torch.rand(batch, lk, generator=torch.Generator().manual_seed(4)) < 0.6


@every_config
@pytest.mark.parametrize("grouped", [False, True])
def test_a_masked_call_equals_the_call_with_those_keys_removed(config, grouped):
    q, k, v = small()
    mask = mask_of(300)
    grouping = group_tokens(v, 8, key_mask=mask) if grouped else None
    dead = ~mask[:, None, :, None]
    out, lse = vc_attention(
        q,
        k.masked_fill(dead, torch.nan),
        v.masked_fill(dead, torch.inf),
        config,
        grouping=grouping,
        key_mask=mask,
        kernel="reference",
        return_lse=True,
    )
    for b in range(2):
        kept = mask[b]
        alone_v = v[b : b + 1, :, kept]
        alone, alone_lse = vc_attention(
            q[b : b + 1],
            k[b : b + 1, :, kept],
            alone_v,
            config,
            grouping=group_tokens(alone_v, 8) if grouped else None,
            kernel="reference",
            return_lse=True,
        )
        assert torch.equal(out[b : b + 1], alone) and torch.equal(lse[b : b + 1], alone_lse)


def test_mask_wins_over_an_order_made_without_it():
    _, _, v = small()
    mask = mask_of(300)
    order, count = key_list(group_tokens(v, 8).order, mask, 2)
    assert torch.equal(count, mask.sum(1).int())
    for b in range(2):
        assert mask[b][order[b, :, : count[b]].long()].all()
        assert torch.equal(order[b].sort(-1).values, torch.arange(300).int().expand(2, -1))


@every_config
def test_merging_two_key_shards_equals_the_whole(config):
    q, k, v = small(lk=512)
    whole, whole_lse = vc_attention(q, k, v, config, kernel="reference", return_lse=True)
    halves = [
        vc_attention(q, k[:, :, part], v[:, :, part], config, kernel="reference", return_lse=True)
        for part in (slice(0, 200), slice(200, 512))
    ]
    merged, merged_lse = merge_attention(*halves[0], *halves[1])
    exact, exact_lse = exact_attention(q, k, v)
    own = relative_l2(whole, exact)
    assert relative_l2(merged, exact) < 1.3 * own
    assert (merged_lse - exact_lse).abs().mean() < 2 * (whole_lse - exact_lse).abs().mean() + 0.01


@pytest.mark.parametrize("fault", ["log2", "missing key mean"])
def test_a_wrong_log_sum_exp_would_be_caught(fault):
    q, k, v = sample_qkv("clustered", (1, 2, 60, 64), keys=512)
    q = 2 * q
    halves = []
    for part in (slice(0, 200), slice(200, 512)):
        out, lse = vc_attention(q, k[:, :, part], v[:, :, part], kernel="reference", return_lse=True)
        if fault == "log2":
            lse = lse * 1.4427
        else:
            lse = lse - (q @ k[:, :, part].mean(2, keepdim=True).transpose(-1, -2))[..., 0] / 8
        halves.append((out, lse))
    merged, _ = merge_attention(*halves[0], *halves[1])
    assert relative_l2(merged, exact_attention(q, k, v)[0]) > 0.03


def test_merging_with_an_empty_shard():
    out, lse = torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2)
    nothing, never = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    merged, merged_lse = merge_attention(out, lse, nothing, never)
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = merge_attention(nothing, never, nothing, never)
    assert not merged.any() and (merged_lse == -torch.inf).all()


def test_prepare_and_attend_are_the_two_halves():
    q, k, v = small()
    grouping = group_tokens(v, 8)
    prepared = prepare_call(q, k, v, grouping=grouping, kernel="reference")
    assert torch.equal(attend_call(prepared)[0], vc_attention(q, k, v, grouping=grouping, kernel="reference"))


def test_strided_views_equal_contiguous_tensors():
    fused = torch.randn(1, 200, 3, 2, 64, generator=torch.Generator().manual_seed(8))
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    expected = vc_attention(q.contiguous(), k.contiguous(), v.contiguous(), kernel="reference")
    assert torch.equal(vc_attention(q, k, v, kernel="reference"), expected)


def test_softmax_scale_and_rope():
    q, k, v = sample_qkv(shape=(1, 2, 100, 64))
    angle = torch.rand(100, 32, generator=torch.Generator().manual_seed(9))
    rope = (angle.cos(), angle.sin(), "half")
    from comfyui_vc_attention.kernels.prepare.reference import apply_rope

    out = vc_attention(q, k, v, scale=0.3, rope=rope, kernel="reference")
    exact, _ = exact_attention(apply_rope(q, *rope), apply_rope(k, *rope), v, scale=0.3)
    assert relative_l2(out, exact) < 0.05


def test_plain_leaves_the_means_to_the_values_format():
    assert plain(VCConfig(clusters=9)) == VCConfig(clusters=9, demean=None)
    without = VCConfig(demean=False)
    assert plain(without) == without  # who asked for none gets none


@pytest.mark.parametrize(
    ("config", "means"),
    [(VCConfig(value_format="int8"), True), (VCConfig("4-bit"), True), (VCConfig(value_format="fp8"), False)],
)
def test_plain_steps_through_the_operator(config, means):
    """All but FP8 values keep their tile means in token order, also behind a mask."""
    q, k, v = sample_qkv("clustered", (1, 2, 70, 64), keys=300)
    mask = torch.arange(300)[None] != 7
    for key_mask in (None, mask):
        call = {"key_mask": key_mask, "kernel": "reference"}
        outs = {
            demean: vc_attention(q, k, v, dataclasses.replace(config, demean=demean), **call)
            for demean in (True, False)
        }
        out = vc_attention(q, k, v, plain(config), **call)
        assert torch.equal(out, outs[means]) and not torch.equal(out, outs[not means])


@pytest.mark.parametrize("return_lse", [False, True])
def test_custom_op_contract(return_lse):
    """The fake kernel gives the real one's shapes, dtypes and strides (field fault N16)."""
    q, k, v = small()
    order = group_tokens(v, 8).order
    codes = [0, 0, 0, 8, 1, -1, 1]
    torch.library.opcheck(
        torch.ops.comfyui_vc_attention.attention,
        (q, k, v, order, None, None, None, "", codes, 0.125, "reference", return_lse),
    )
    torch.library.opcheck(torch.ops.comfyui_vc_attention.group_tokens, (v, 8, None, None))


def test_compiles_without_a_graph_break():
    def block(q, k, v):
        return vc_attention(q * 1.0, k, v, kernel="reference") + 1

    q, k, v = small()
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), block(q, k, v))


def changed(index, change):
    tensors = list(small())
    tensors[index] = change(tensors[index])
    return tensors


BAD = {
    "k and v differ": (changed(2, lambda v: v[:, :, :-1]), {}, "k and v must have one shape, got"),
    "rank": (changed(0, lambda q: q[0]), {}, r"q and k must be \[B, H, L, D\], got"),
    "heads": (changed(0, lambda q: q[:, :1]), {}, "q and k must agree in B, H and D, got"),
    "empty": (changed(0, lambda q: q[:, :, :0]), {}, "must not be empty, got"),
    "last stride": (
        changed(0, lambda q: q.transpose(2, 3).contiguous().transpose(2, 3)),
        {},
        "the last dimension must be contiguous, got strides",
    ),
    "mask dtype": (small(), {"key_mask": torch.ones(2, 300)}, "key_mask must be bool"),
    "mask shape": (small(), {"key_mask": torch.ones(2, 299, dtype=torch.bool)}, "key_mask must be bool"),
    "rope layout": (
        small(),
        {"rope": (torch.ones(300, 32), torch.ones(300, 32), "pairs")},
        "rope layout must be",
    ),
    "rope length": (
        small(),
        {"rope": (torch.ones(60, 32), torch.ones(60, 32), "half")},
        "rope tables must be",
    ),
    "rope tables of two shapes": (
        small(),
        {"rope": (torch.ones(300, 32), torch.ones(400, 32), "half")},
        "rope tables must be floats of one shape, got",
    ),
    "rope of integers": (
        small(),
        {"rope": (torch.ones(300, 32).int(), torch.ones(300, 32).int(), "half")},
        "rope tables must be floats of one shape, got torch.int32",
    ),
    "rope without tables": (small(), {"rope": (None, None, "half")}, r"rope must be \(cos, sin, layout\)"),
    "rope without a layout": (
        small(),
        {"rope": (torch.ones(300, 32), torch.ones(300, 32))},
        r"rope must be \(cos, sin, layout\) .*, got \(Tensor, Tensor\)",
    ),
    "rope elsewhere": (
        small(),
        {"rope": (torch.ones(300, 32, device="meta"),) * 2 + ("half",)},
        "on one device, got cpu, cpu, cpu, meta, meta",
    ),
    "k elsewhere": (changed(1, lambda k: k.to("meta")), {}, "on one device, got cpu, meta, cpu"),
    "scalar": (changed(0, lambda q: q[0, 0, 0, 0]), {}, r"q and k must be \[B, H, L, D\], got \(\)"),
    "no channels": ([t[..., :0] for t in small()], {}, "must not be empty, got"),
    "scale": (small(), {"scale": float("nan")}, "scale must be finite and not negative, got nan"),
    "negative scale": (small(), {"scale": -0.125}, r"scale must be finite and not negative, got -0\.125"),
    "config": (small(), {"config": "8-bit"}, "config must be a VCConfig, got '8-bit'"),
    "dtype": ([t.double() for t in small()], {}, "takes bf16, fp16 and fp32, got float64"),
    "auto on a CPU": (small(), {"kernel": "auto"}, "kernel reference runs anywhere"),
    "unknown kernel": (small(), {"kernel": "sage"}, "unknown kernel 'sage'"),
    "no such GPU": (
        small(),
        {"kernel": "triton_int8_fp8"},
        "triton_int8_fp8: needs an NVIDIA GPU, got a CPU",
    ),
}


@pytest.mark.parametrize(("tensors", "options", "message"), BAD.values(), ids=BAD)
def test_bad_input_states_the_rule_and_the_value(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        vc_attention(*tensors, **{"kernel": "reference"} | options)


def test_launches_are_made_on_the_tensors_own_gpu(monkeypatch):
    """The host's threads and engines may have another GPU as the current one."""
    entered = []

    @contextlib.contextmanager
    def on_device(device):
        entered.append(device)
        yield
        entered.append("left")

    monkeypatch.setattr(dispatch, "on_device", on_device)
    q, k, v = small()
    vc_attention(q, k, v, grouping=group_tokens(v, 8), kernel="reference")
    assert entered == [q.device, "left"] * 3  # group, prepare, attend


def test_a_grouping_of_another_length_is_refused():
    q, k, v = small()
    with pytest.raises(ValueError, match=r"order must be int32 \(2, 2, 300\), got"):
        vc_attention(q, k, v, grouping=group_tokens(v[:, :, :100], 8), kernel="reference")


@pytest.mark.parametrize("change", [torch.zeros_like, lambda order: order + 1, lambda order: order - 1])
def test_an_order_that_is_no_permutation_is_refused(change):
    q, k, v = small()
    order = change(group_tokens(v, 8).order)
    with pytest.raises(ValueError, match="must list every key 0 to 299 once"):
        vc_attention(q, k, v, grouping=TokenGrouping(order, None), kernel="reference")


@every_config
def test_autocast_of_a_caller_changes_nothing(config):
    q, k, v = small()

    def call():
        grouping = group_tokens(v, 8)
        return grouping.order, *vc_attention(
            q, k, v, config, grouping=grouping, kernel="reference", return_lse=True
        )

    expected = call()
    with torch.autocast("cpu", torch.bfloat16):
        got = call()
    assert all(map(torch.equal, got, expected))


def test_a_wanted_gradient_is_refused():
    q, k, v = (x.float().requires_grad_() for x in small())
    with pytest.raises(ValueError, match=r"no gradient: call it under torch.no_grad\(\)"):
        prepare_call(q, k, v, kernel="reference")
    with torch.no_grad():
        attend_call(prepare_call(q, k, v, kernel="reference"))
    with pytest.raises(NotImplementedError, match="no gradient"):
        vc_attention(q, k, v, kernel="reference").sum().backward()


def test_merging_refuses_what_would_be_broadcast():
    out, lse = torch.zeros(2, 3, 5, 16), torch.zeros(2, 3, 5)
    for part in ((out[:1], lse[:1]), (out[:, :, :1], lse[:, :, :1]), (out, lse[:, :1])):
        with pytest.raises(ValueError, match=r"out and lse of both sets must be \[B, H, Lq, D\]"):
            merge_attention(out, lse, *part)
    with pytest.raises(ValueError, match=r"lse must be float32, got torch\.float32 and torch\.bfloat16"):
        merge_attention(out, lse, out, lse.bfloat16())


def test_group_tokens_refuses():
    _, _, v = small()
    with pytest.raises(ValueError, match=r"v must be a float \[B, H, Lk, D\]"):
        group_tokens(v[0], 8)
    with pytest.raises(ValueError, match="clusters must be 1 to 256, got 300"):
        group_tokens(v, 300)
    with pytest.raises(ValueError, match="previous centroids must be"):
        group_tokens(v, 16, group_tokens(v, 8))
    half = TokenGrouping(None, group_tokens(v, 8).centroids.half())
    with pytest.raises(ValueError, match=r"previous centroids must be float32 .*, got torch.float16"):
        group_tokens(v, 8, half)
    with pytest.raises(ValueError, match="v must not be empty, got"):
        group_tokens(v[:, :, :0], 8)
    with pytest.raises(ValueError, match=r"v must be a float .*, got torch.float64"):
        group_tokens(v.double(), 8)
    with pytest.raises(ValueError, match="the last dimension must be contiguous, got strides"):
        group_tokens(v.transpose(2, 3), 8)
    with pytest.raises(ValueError, match=r"key_mask must be bool \(2, 300\), got torch.bool \(1, 300\)"):
        group_tokens(v, 8, key_mask=mask_of(300, 1))
    with pytest.raises(ValueError, match="on one device, got cpu, meta"):
        group_tokens(v, 8, key_mask=mask_of(300).to("meta"))


def test_an_output_to_write_into_must_fit():
    q, k, v = small()
    prepared = prepare_call(q, k, v, kernel="reference")
    whole = torch.zeros(2, 60, 5, 64, dtype=torch.bfloat16).transpose(1, 2)
    attend_call(prepared, whole[:, 1:3])
    assert torch.equal(whole[:, 1:3], attend_call(prepared)[0]) and not whole[:, [0, 3, 4]].any()
    for wrong in (whole, whole[:, :2].float(), whole[:, :2, 1:]):
        with pytest.raises(ValueError, match="out must be"):
            attend_call(prepared, wrong)
    with pytest.raises(ValueError, match="some heads of memory"):
        attend_call(prepared, whole[:, ::2][:, :2])
