"""The shipped sample model through the nodes and ComfyUI's sampler: real weights, whole calls, the latent."""

import logging
import math

import pytest
import torch

pytestmark = pytest.mark.comfyui

BLOCKS, STEPS = 6, 2
PSNR_LIMIT = 50.0  # dB of the latent: measured 66 with int8_int8, uniform attention weights give 25


@pytest.fixture(scope="module")
def made():
    """(model, positive, negative, latent) of the node."""
    from comfyui_vc_attention.nodes.sample_nodes import PROMPTS, WEIGHTS, VCAttentionSample

    if not WEIGHTS.exists():
        pytest.skip(f"{WEIGHTS.name} is not in this checkout")
    return VCAttentionSample.execute(PROMPTS[0]).args


def run(model, made, cfg=1.0):
    import comfy.sample

    _, positive, negative, latent = made
    noise = comfy.sample.prepare_noise(latent["samples"], 7)
    with torch.inference_mode():
        return comfy.sample.sample(
            model,
            noise,
            STEPS,
            cfg,
            "euler",
            "simple",
            positive,
            negative,
            latent["samples"],
            seed=7,
            disable_pbar=True,
        )


@pytest.fixture(scope="module")
def exact(made):
    return run(made[0], made)


def test_calls_and_latent_are_close(made, exact, patch, watch, sampling, caplog, call_limit):
    caplog.set_level(logging.INFO, "vc_attention")
    watched = watch(patch(made[0], clusters=16))
    latent = run(watched.model, made)
    assert len(watched.taken) == BLOCKS * STEPS
    assert all(0 < call.error < call_limit for call in watched.taken)
    value = sampling.psnr(latent, exact)
    assert math.isfinite(value) and value > PSNR_LIMIT
    assert f"{BLOCKS * STEPS} of {2 * BLOCKS * STEPS} calls low-bit" in caplog.messages[-1]


def test_a_pass_through_would_be_noticed(made, exact, patch, sampling):
    passing = patch(made[0])
    passing.model_options["transformer_options"]["optimized_attention_override"] = (
        lambda func, *args, **kwargs: func(*args, **kwargs)
    )
    assert sampling.psnr(run(passing, made), exact) == math.inf


def test_with_guidance_each_condition_has_its_orders(made, patch, watch, call_limit):
    watched = watch(patch(made[0], clusters=4))
    run(watched.model, made, cfg=2.0)
    assert sum(call.conditions for call in watched.taken) == BLOCKS * STEPS * 2
    assert all(0 < call.error < call_limit for call in watched.taken)
