"""What test_sampling_in_comfyui.py and test_composition.py ask of Wan t2v, asked of the other families."""

import math

import pytest
import torch

pytestmark = pytest.mark.comfyui

# kind -> video self-attention per forward, forwards per evaluation with two conditions
TAKEN = {"i2v": (3, 1), "vace": (6, 1), "hunyuan": (4, 1), "hunyuan15": (3, 1), "h3": (3, 2)}
ONE_EVALUATION, TWO_EVALUATIONS = ("res_multistep", "uni_pc"), ("heun", "dpm_2")


@pytest.fixture(params=TAKEN)
def kind(request):
    """Each family but Wan t2v."""
    return request.param


def calls(kind, evaluations):
    per_forward, forwards = TAKEN[kind]
    return per_forward * forwards * evaluations


@pytest.mark.parametrize("sampler", [*ONE_EVALUATION, *TWO_EVALUATIONS])
def test_samplers_group_in_the_first_quarter(load_tiny, patch, watch, sampling, kind, sampler):
    watched = watch(patch(load_tiny(kind)))
    sampling.sample(watched.model, steps=4, sampler=sampler, kind=kind)
    taken, end = watched.taken, watched.taken[0].schedule[1]
    assert all(call.grouping == (call.step_sigma > end * 1.0001) for call in taken)
    assert any(call.grouping for call in taken) and not all(call.grouping for call in taken)
    assert len(taken) == calls(kind, 4 if sampler in ONE_EVALUATION else 7)


@pytest.mark.parametrize(("start", "end"), [(0, 4), (1, 8), (2, 8)])
def test_ranges_of_steps_measure_the_window_on_the_whole(load_tiny, patch, watch, sampling, kind, start, end):
    """KSamplerAdvanced, and with it the second expert: steps 0 and 1 of 8 group, whoever runs them."""
    watched = watch(patch(load_tiny(kind)))
    sampling.sample(
        watched.model, steps=8, kind=kind, start_step=start, last_step=end,
        disable_noise=start > 0, force_full_denoise=end == 8,
    )  # fmt: skip
    limit = float(watched.model.get_model_object("model_sampling").percent_to_sigma(0.25))
    grouped = {call.step_sigma for call in watched.taken if call.grouping}
    assert grouped == {call.step_sigma for call in watched.taken if call.step_sigma > limit * 1.0001}
    assert len(grouped) <= max(0, 2 - start) + (kind == "h3")  # its schedule is not uniform in percent
    assert len(watched.taken) == calls(kind, end - start)


def test_a_late_start_by_denoise(load_tiny, patch, watch, sampling, kind, call_limit):
    watched = watch(patch(load_tiny(kind)))
    sampling.sample(watched.model, steps=3, kind=kind, denoise=0.5)
    assert not any(call.grouping for call in watched.taken)
    assert len(watched.taken) == calls(kind, 3)
    assert all(0 < call.error < call_limit for call in watched.taken)


@pytest.mark.parametrize("cfg", [1.0, 5.0])
def test_a_batch_of_latents(load_tiny, patch, watch, sampling, kind, cfg, call_limit):
    if kind == "h3":
        pytest.skip("MiniMax-H3 takes one clip at a time")
    watched = watch(patch(load_tiny(kind)))
    sampling.sample(watched.model, steps=2, kind=kind, cfg=cfg, batch=2)
    assert len(watched.taken) == calls(kind, 2) and any(call.grouping for call in watched.taken)
    assert all(0 < call.error < call_limit for call in watched.taken)


def with_lora(model):
    """A LoRA on the first self-attention weight, made to be seen."""
    import comfy.sd

    weights = model.model.diffusion_model.state_dict()
    endings = ("attn.qkv.weight", "self_attn.q.weight", "attn.qkv_proj.weight")
    name = next(name for name in weights if name.endswith(endings))
    rows, columns = weights[name].shape
    generator = torch.Generator().manual_seed(9)
    key = f"diffusion_model.{name.removesuffix('.weight')}"
    lora = {
        f"{key}.lora_A.weight": torch.randn(4, columns, generator=generator) / math.sqrt(columns),
        f"{key}.lora_B.weight": torch.randn(rows, 4, generator=generator) / 2,
    }
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]


def test_a_lora_works_before_and_after_us(load_tiny, patch, sampling, kind, psnr_limit):
    def run(model):
        return sampling.sample(model, steps=2, kind=kind)

    plain, exact = run(load_tiny(kind)), run(with_lora(load_tiny(kind)))
    assert not sampling.equal(plain, exact)
    before, after = run(patch(with_lora(load_tiny(kind)))), run(with_lora(patch(load_tiny(kind))))
    assert sampling.equal(before, after) and sampling.psnr(before, exact) > psnr_limit


def test_gguf_like_weights(load_tiny, patch, watch, sampling, kind, call_limit):
    """Operations that make their weight when they are called, as GGUF loaders have them."""
    import comfy.ops

    class Operations(comfy.ops.manual_cast):
        class Linear(comfy.ops.manual_cast.Linear):
            def forward_comfy_cast_weights(self, x, *args, **kwargs):
                weight = (self.weight.to(torch.float16) * 1.0).to(x.dtype)
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return torch.nn.functional.linear(x, weight, bias)

    watched = watch(patch(load_tiny(kind, model_options={"custom_operations": Operations})))
    sampling.sample(watched.model, steps=2, kind=kind)
    assert len(watched.taken) == calls(kind, 2)
    assert all(0 < call.error < call_limit for call in watched.taken)


def test_an_interrupt_goes_through_and_frees_everything(load_tiny, patch, sampling, kind):
    import comfy.model_management

    model = patch(load_tiny(kind), grouping_window=1.0)
    runs = []

    def stop(step, *rest):
        options = model.model_options["transformer_options"]
        runs.append(options["optimized_attention_override"])
        raise comfy.model_management.InterruptProcessingException()

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sampling.sample(model, steps=4, kind=kind, callback=stop)
    (override,) = runs
    assert override.finished[-1].state_bytes > 0  # it held something
    ours = sampling.sample(model, steps=2, kind=kind)
    assert sampling.equal(
        ours, sampling.sample(patch(load_tiny(kind), grouping_window=1.0), steps=2, kind=kind)
    )


@pytest.mark.parametrize("kind", ["t2v", *TAKEN])
def test_short_memory_changes_no_bit_of_a_clip(load_tiny, patch, sampling, kind, monkeypatch, psnr_limit):
    """Head groups and orders kept as labels, as a full GPU would have them."""
    from comfyui_vc_attention.nodes import model_patch, run_state

    whole = sampling.sample(patch(load_tiny(kind)), steps=4, kind=kind)
    monkeypatch.setattr(run_state, "free_memory", lambda device: 0)
    labels = sampling.sample(patch(load_tiny(kind)), steps=4, kind=kind)
    assert sampling.equal(whole, labels)
    monkeypatch.setattr(model_patch, "free_memory", lambda device: 0)
    monkeypatch.setattr(model_patch, "_proven", set())  # or boxes would be given up one by one instead
    model = patch(load_tiny(kind))
    split = sampling.sample(model, steps=4, kind=kind)
    assert last_report(model).head_groups == 2
    assert sampling.psnr(split, whole) > psnr_limit  # a CPU's BLAS may round a last bit otherwise


def last_report(model):
    return model.model_options["transformer_options"]["optimized_attention_override"].finished[-1]


def test_a_kernel_error_leaves_the_hosts_picture(load_tiny, patch, sampling, kind, monkeypatch):
    """Boxes and tensors reach ComfyUI's attention whole; the report names the kernel that would have run."""
    from comfyui_vc_attention.nodes import head_groups, model_patch

    exact, whole = sampling.sample(load_tiny(kind), steps=2, kind=kind), patch(load_tiny(kind))
    assert not sampling.equal(sampling.sample(whole, steps=2, kind=kind), exact)
    ran = {name.split()[0] for name in last_report(whole).kernels}
    for module in (model_patch, head_groups):
        monkeypatch.setattr(module, "attend_call", lambda *args: 1 / 0)
    monkeypatch.setattr(model_patch, "_proven", set())
    model = patch(load_tiny(kind))
    assert sampling.equal(sampling.sample(model, steps=2, kind=kind), exact)
    report = last_report(model)
    assert report.taken == 0 and set(report.failures) == ran and len(ran) == 1


def test_context_windows_keep_an_order_each(load_tiny, patch, watch, sampling, kind, call_limit):
    if kind == "h3":
        pytest.skip("its clip and its sound would have to be cut together")
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode

    watched = watch(patch(load_tiny(kind), grouping_window=1.0))
    model = ContextWindowsManualNode.execute(
        watched.model, 4, 1, "standard_static", 1, False, "pyramid", 2, False
    ).args[0]
    sampling.sample(model, steps=2, kind=kind, size=(8, *sampling.SIZES.get(kind, sampling.SIZE)[1:]))
    assert len(watched.taken) > calls(kind, 2)
    assert all(0 < call.error < call_limit for call in watched.taken)
