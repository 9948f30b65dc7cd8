"""The patch beside other nodes of a graph, in any order. Real ones where ComfyUI has them.

A test called contract_... uses a stand-in, written from what the other node does to a model, because its pack
or a newer ComfyUI is not at hand.
"""

import logging

import pytest
import torch

pytestmark = pytest.mark.comfyui

# kind -> attention calls per forward that are video self-attention, and that are not
CALLS = {
    **{"t2v": (3, 3), "i2v": (3, 6), "vace": (6, 6)},
    **{"hunyuan": (4, 2), "hunyuan15": (3, 2), "h3": (3, 0)},
}
FORWARDS = {"h3": 2}  # per evaluation: ComfyUI never batches its conditions
BLOCKS = CALLS["t2v"][0]
OVERRIDE = "optimized_attention_override"


@pytest.fixture(autouse=True)
def hear_us(caplog):
    caplog.set_level(logging.INFO, "vc_attention")


@pytest.fixture(params=CALLS)
def kind(request):
    """Each family."""
    return request.param


def per_step(kind):
    """(ours, others): attention calls of one evaluation with two conditions."""
    return tuple(count * FORWARDS.get(kind, 1) for count in CALLS[kind])


def said(caplog):
    return next(message for message in reversed(caplog.messages) if "[VC-Attention]" in message)


def attention_backend(model):
    from comfy_extras.nodes_model_advanced import ModelAttentionBackend

    return ModelAttentionBackend().patch(model, "pytorch attention")[0]


def counting_backend(model, seen):
    """Model Attention Backend with a backend that counts."""
    from comfy.ldm.modules.attention import attention_pytorch

    def backend(*args, **kwargs):
        seen.append(1)
        return attention_pytorch(*args, **kwargs)

    other = model.clone()
    other.set_model_optimized_attention(backend)
    return other


def test_l07_a_backend_node_before_us_takes_what_we_decline(load_tiny, patch, sampling, caplog, kind):
    seen = []
    sampling.sample(patch(counting_backend(load_tiny(kind), seen)), steps=2, kind=kind)
    ours, others = per_step(kind)
    assert len(seen) == others * 2
    assert f"{ours * 2} of {(ours + others) * 2} calls low-bit" in said(caplog)


def test_l07_a_backend_node_after_us_wins_and_we_say_so(load_tiny, patch, sampling, caplog, kind):
    seen = []
    exact = sampling.sample(load_tiny(kind), steps=2, kind=kind)
    latent = sampling.sample(counting_backend(patch(load_tiny(kind)), seen), steps=2, kind=kind)
    assert sampling.equal(latent, exact) and len(seen) == sum(per_step(kind)) * 2
    assert "received 0 calls" in said(caplog) and "optimized_attention_override replaced" in said(caplog)


def test_the_real_backend_node_in_both_places(load_tiny, patch, sampling, kind):
    def run(model):
        return sampling.sample(model, steps=2, kind=kind)

    exact, ours = run(load_tiny(kind)), run(patch(load_tiny(kind)))
    assert sampling.equal(run(patch(attention_backend(load_tiny(kind)))), ours)
    assert sampling.equal(run(attention_backend(patch(load_tiny(kind)))), exact)
    assert sampling.equal(run(patch(attention_backend(patch(load_tiny(kind))))), ours)


def test_off_after_a_backend_node_restores_it(load_tiny, patch, sampling):
    seen = []
    off = patch(patch(counting_backend(load_tiny(), seen)), precision="off")
    sampling.sample(off, steps=1)
    assert len(seen) == BLOCKS * 2


def test_contract_a_sage_like_node_overwrites_us(load_tiny, patch, sampling, caplog):
    """Patch Sage Attention KJ assigns its override, whatever was there, and ignores func."""
    from comfy.ldm.modules.attention import attention_pytorch

    def sage_like(func, *args, **kwargs):
        return attention_pytorch.__wrapped__(*args, **kwargs)

    model = patch(load_tiny()).clone()
    model.model_options["transformer_options"][OVERRIDE] = sage_like
    sampling.sample(model, steps=1)
    assert "sage_like replaced" in said(caplog)
    again = patch(model)
    sampling.sample(again, steps=1)
    assert f"{BLOCKS} of {BLOCKS * 2} calls low-bit" in said(caplog)


def test_contract_a_sparse_node_that_puts_itself_on_top_every_step(load_tiny, patch, sampling, caplog):
    """Model Sparse Attention wraps the override that it finds and comes back from ON_PREPARE_STATE."""
    from comfy.patcher_extension import CallbacksMP

    def sparse_over(previous):
        def sparse(func, *args, **kwargs):
            if kwargs["transformer_options"].get("block_index") == 0:  # its share of the calls
                return func(*args, **kwargs)
            return previous(func, *args, **kwargs)

        sparse._vc_previous = previous
        return sparse

    def on_top(patcher, timestep, model_options):
        options = model_options["transformer_options"]
        if getattr(options[OVERRIDE], "__name__", "") != "sparse":
            options[OVERRIDE] = sparse_over(options[OVERRIDE])
        depths.append(chain_length(options[OVERRIDE]))

    depths = []
    model = patch(load_tiny()).clone()
    model.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "sparse", on_top)
    sampling.sample(model, steps=4)
    assert depths == [2] * 4  # we never climb back on top of it
    assert f"{(BLOCKS - 1) * 4} of {(BLOCKS - 1) * 8} calls low-bit" in said(caplog)


def chain_length(override):
    from comfyui_vc_attention.nodes.sampling_hooks import chain_of

    return len(list(chain_of(override)))


def with_lora(model):
    import comfy.sd

    generator = torch.Generator().manual_seed(9)
    key = "diffusion_model.blocks.0.self_attn.q"
    lora = {
        f"{key}.lora_A.weight": torch.randn(4, 256, generator=generator) / 16,
        f"{key}.lora_B.weight": torch.randn(256, 4, generator=generator) / 2,
    }
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]


def test_a_lora_works_before_and_after_us(load_tiny, patch, sampling, psnr_limit):
    plain = sampling.sample(load_tiny(), steps=2)
    exact = sampling.sample(with_lora(load_tiny()), steps=2)
    assert sampling.part_psnr(exact, plain) < psnr_limit  # it does something
    before = sampling.sample(patch(with_lora(load_tiny())), steps=2)
    after = sampling.sample(with_lora(patch(load_tiny())), steps=2)
    assert torch.equal(before, after) and sampling.psnr(before, exact) > psnr_limit


def easy_cache(model):
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0]


def lazy_cache(model):
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0]


@pytest.mark.parametrize("cache", [easy_cache, lazy_cache])
@pytest.mark.parametrize("ours_first", [True, False])
def test_step_caches_skip_calls_and_the_schedule_goes_on(
    load_tiny, patch, watch, sampling, kind, cache, ours_first, call_limit
):
    watched = watch(patch(load_tiny(kind) if ours_first else cache(load_tiny(kind))))
    model = cache(watched.model) if ours_first else watched.model
    sampling.sample(model, steps=8, kind=kind)
    assert 0 < len(watched.taken) < per_step(kind)[0] * 8  # something was skipped
    assert all(call.grouping == (call.step_sigma > call.schedule[2] * 1.0001) for call in watched.taken)
    assert all(0 < call.error < call_limit for call in watched.taken)


def test_a_model_function_wrapper_as_teacache_has_one(load_tiny, patch, watch, sampling):
    watched = watch(patch(load_tiny()))
    calls = []

    def wrapper(apply_model, arguments):
        calls.append(1)
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    watched.model.set_model_unet_function_wrapper(wrapper)
    sampling.sample(watched.model, steps=2)
    assert len(calls) == 2 and len(watched.taken) == BLOCKS * 2


@pytest.mark.parametrize("ours_first", [True, False])
def test_x05_torch_compile_keeps_the_schedule_moving(
    load_tiny, patch, sampling, caplog, kind, ours_first, psnr_limit
):
    """TorchCompileModel drops every guard on transformer_options: whatever is traced from there is frozen."""
    plain = sampling.sample(patch(load_tiny(kind)), steps=8, kind=kind)
    expected = said(caplog)
    model = compiled(patch(load_tiny(kind))) if ours_first else patch(compiled(load_tiny(kind)))
    latent = sampling.sample(model, steps=8, kind=kind)
    assert said(caplog) == expected and "grouped in 2 of 8 steps" in expected
    assert sampling.psnr(latent, plain) > psnr_limit
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    sampling.sample(model, steps=4, kind=kind)  # X05: other steps and another run compile nothing new
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def compiled(model):
    """TorchCompileModel, with a backend that only traces."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    model = model.clone()
    set_torch_compile_wrapper(model, "eager", options={"guard_filter_fn": skip_torch_compile_dict})
    return model


@pytest.fixture
def fresh_graphs():
    """A graph serves all models of its class: none from before, and none for the tests after this one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_graphs")
def test_a_model_compiled_before_us_keeps_its_graph_and_we_say_so(load_tiny, patch, sampling, caplog):
    """The host drops the guards on transformer_options: one graph serves models with and without override."""
    model = load_tiny()
    exact = sampling.sample(compiled(model), steps=1)
    assert sampling.equal(sampling.sample(compiled(patch(model)), steps=1), exact)
    assert "received 0 calls: a graph that torch.compile made before this node was there" in said(caplog)


@pytest.mark.usefixtures("fresh_graphs")
def test_a_model_compiled_with_us_runs_without_us_afterwards(load_tiny, patch, sampling, caplog):
    model = load_tiny()
    sampling.sample(compiled(patch(model)), steps=1)
    assert f"{BLOCKS} of {BLOCKS * 2} calls low-bit" in said(caplog)
    without = sampling.sample(compiled(model), steps=1)
    torch._dynamo.reset()
    assert sampling.equal(without, sampling.sample(compiled(model), steps=1))


@pytest.mark.parametrize("schedule", ["standard_static", "standard_uniform"])
def test_context_windows_keep_an_order_each(load_tiny, patch, watch, sampling, schedule, call_limit):
    """Several calls per evaluation, all at one sigma; some schedules move their windows from step to step."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    watched = watch(patch(load_tiny(), grouping_window=1.0))
    model = WanContextWindowsManualNode.execute(
        watched.model, 13, 4, schedule, 1, False, "pyramid", False
    ).args[0]
    sampling.sample(model, steps=3, size=(9, 8, 8))
    assert len(watched.taken) > BLOCKS * 3
    assert all(0 < call.error < call_limit for call in watched.taken)


def test_a_shift_node_after_us_moves_the_window(load_tiny, patch, watch, sampling):
    """A part of a schedule takes the window from the model's sampling, as it is when sampling begins."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    watched = watch(patch(load_tiny()))
    shifted = ModelSamplingSD3().patch(watched.model, 1.0)[0]
    sampling.sample(shifted, steps=8, last_step=4, force_full_denoise=False)
    assert watched.grouped_sigmas == [1.0, 0.875]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_compute_dtypes(load_tiny, patch, watch, sampling, kind, dtype, call_limit):
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    watched = watch(patch(ModelComputeDtype().patch(load_tiny(kind), dtype)[0]))
    sampling.sample(watched.model, steps=2, kind=kind)
    assert len(watched.taken) == per_step(kind)[0] * 2
    assert all(0 < call.error < call_limit for call in watched.taken)


def test_fp8_weights(load_tiny, patch, watch, sampling, kind, call_limit):
    if kind == "h3":
        pytest.skip("ComfyUI 0.33 itself cannot run MiniMax-H3 with norms in fp8")
    watched = watch(patch(load_tiny(kind, model_options={"dtype": torch.float8_e4m3fn})))
    sampling.sample(watched.model, steps=2, kind=kind)
    assert len(watched.taken) == per_step(kind)[0] * 2
    assert all(0 < call.error < call_limit for call in watched.taken)


def test_gguf_like_weights(load_tiny, patch, watch, sampling, call_limit):
    """Operations that make their weight when they are called, as GGUF loaders have them."""
    import comfy.ops

    class Operations(comfy.ops.manual_cast):
        class Linear(comfy.ops.manual_cast.Linear):
            def forward_comfy_cast_weights(self, x, *args, **kwargs):
                weight = (self.weight.to(torch.float16) * 1.0).to(x.dtype)
                return torch.nn.functional.linear(
                    x, weight, None if self.bias is None else self.bias.to(x.dtype)
                )

    watched = watch(patch(load_tiny(model_options={"custom_operations": Operations})))
    sampling.sample(watched.model, steps=2)
    assert len(watched.taken) == BLOCKS * 2 and all(0 < call.error < call_limit for call in watched.taken)


def test_p06_the_counts_are_the_calls_of_the_run(load_tiny, patch, watch, sampling, caplog):
    watched = watch(patch(load_tiny("i2v"), exact_blocks="1", start_percent=0.1))
    sampling.sample(watched.model, steps=4, kind="i2v", text_tokens=(40, 24))
    assert f"{len(watched.taken)} of {len(watched.calls)} calls low-bit" in said(caplog)


def test_a_node_added_later_removed_or_between_changes_nothing_else(load_tiny, patch, sampling, kind):
    """Bit-identical to what it should be, in every order of runs."""

    def run(model):
        return sampling.sample(model, steps=2, kind=kind)

    base, other = load_tiny(kind), load_tiny(kind, seed=1)
    exact, exact_other = run(base), run(other)
    patched = patch(base)
    ours = run(patched)
    assert not sampling.equal(ours, exact)
    assert sampling.equal(run(base), exact) and sampling.equal(run(other), exact_other)
    assert sampling.equal(run(patched), ours)
    assert sampling.equal(run(patch(patched, precision="off")), exact)
