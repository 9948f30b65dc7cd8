"""The vLLM-Omni plugin: against stand-ins everywhere, against the wheel's own files where it is installed.

vLLM-Omni needs a GPU build of vLLM, so the wheel's attention files run here with stand-ins for vLLM itself.
"""

import enum
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.parallel import vllm_omni
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import bound

ATTENTION = "vllm_omni.diffusion.attention.backends"
HAS_WHEEL = importlib.util.find_spec("vllm_omni") is not None
CONTEXT = types.SimpleNamespace(denoise_step_idx=None, total_denoise_steps=None)
LIMIT = bound("int8_int8, means, sequence")


class PlainImpl:
    """SDPA as vLLM-Omni's own backend calls it; [B, L, H, D]."""

    def __init__(self, num_heads, head_size, softmax_scale, causal=False, **rest):
        self.softmax_scale, self.causal = softmax_scale, causal

    def forward_cuda(self, query, key, value, attn_metadata=None):
        mask = None if attn_metadata is None else attn_metadata.attn_mask
        mask = None if mask is None else mask[:, None, None]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal, scale=self.softmax_scale
        )
        return out.transpose(1, 2)


def stand_ins(add):
    """The names that the plugin imports, as the wheel's sources define them."""
    overrides = {}
    backends = enum.Enum("DiffusionAttentionBackendEnum", ["CUDNN_ATTN", "TORCH_SDPA"])
    add(f"{ATTENTION}.abstract", AttentionBackend=object, AttentionImpl=object)
    add(
        f"{ATTENTION}.registry",
        DiffusionAttentionBackendEnum=backends,
        register_diffusion_backend=overrides.__setitem__,
        _DIFFUSION_ATTN_OVERRIDES=overrides,
    )
    sdpa = type("SDPABackend", (), {"get_impl_cls": staticmethod(lambda: PlainImpl)})
    add(f"{ATTENTION}.sdpa", SDPABackend=sdpa)


def wheel(add):
    """The wheel's own attention files; only vLLM and the platform are stood in for."""
    root = Path(importlib.util.find_spec("vllm_omni").submodule_search_locations[0])
    for name in ("", ".diffusion", ".diffusion.attention", f"{ATTENTION[len('vllm_omni') :]}"):
        add("vllm_omni" + name, __path__=[str(root.joinpath(*name.split(".")[1:]))])

    def resolve(path):
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    log = types.SimpleNamespace(warning=print, info=print, debug=print)
    add("vllm.logger", init_logger=lambda name: log)
    add("vllm.utils.import_utils", resolve_obj_by_qualname=resolve)
    add("vllm_omni.platforms", current_omni_platform=types.SimpleNamespace())
    add(f"{ATTENTION}.utils.attn_runtime_selector", can_sdpa_use_fused_gqa=lambda *args: True)
    for name in ("abstract", "registry", "sdpa"):
        importlib.import_module(f"{ATTENTION}.{name}")


def forget_classes():
    vllm_omni._impl_class.cache_clear()
    vllm_omni._backend_class.cache_clear()


@pytest.fixture(params=[stand_ins, wheel][: 1 + HAS_WHEEL])
def backend(request):
    """Our backend class, as vLLM-Omni finds it after it ran the plugin."""

    def add(name, **content):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            sys.modules.setdefault(module, types.ModuleType(module)).__dict__.setdefault("__path__", [])
        sys.modules[name].__dict__.update(content)

    request.param(add)
    add(
        "vllm_omni.diffusion.forward_context",
        get_forward_context=lambda: CONTEXT,
        is_forward_context_available=lambda: CONTEXT.denoise_step_idx is not None,
    )
    forget_classes()
    vllm_omni.register()
    vllm_omni.register()  # a process may load its plugins again
    overrides = sys.modules[f"{ATTENTION}.registry"]._DIFFUSION_ATTN_OVERRIDES
    ((member, path),) = overrides.items()
    assert member.name == "CUDNN_ATTN"
    module, _, name = path.rpartition(".")
    yield getattr(importlib.import_module(module), name)
    forget_classes()
    vars(CONTEXT).update(denoise_step_idx=None, total_denoise_steps=None)
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_omni")]:
        del sys.modules[name]


@pytest.fixture
def make(backend):
    """make(role): the attention of one layer, as vLLM-Omni's Attention makes it, on the reference kernel."""

    def make(role="self", causal=False):
        impl = backend.get_impl_cls()(
            num_heads=2,
            head_size=64,
            softmax_scale=0.1,
            causal=causal,
            num_kv_heads=2,
            qkv_layout=None,
            prefix="blocks.0.attn",
            backend_kwargs=None,
            role=role,
            backend_explicit=True,
        )
        impl.sharded.kernel, impl.sharded.config = "reference", VCConfig(clusters=4)
        return impl

    return make


@pytest.fixture
def qkv():
    return [x.transpose(1, 2) for x in sample_qkv("clustered", (1, 2, 160, 64))]


def metadata(**given):
    return types.SimpleNamespace(**{"attn_mask": None, "full_attn_spans": None, **given})


def at_step(step, steps):
    CONTEXT.denoise_step_idx, CONTEXT.total_denoise_steps = step, steps


def exact(q, k, v, mask=None):
    return exact_attention(*(x.transpose(1, 2) for x in (q, k, v)), 0.1, mask)[0].transpose(1, 2)


def test_runs_self_attention(make, qkv):
    impl = make()
    out = impl.forward_cuda(*qkv)
    assert out.shape == qkv[0].shape
    assert 0 < relative_l2(out, exact(*qkv)) < LIMIT
    assert (impl.sharded.calls, dict(impl.declined)) == (1, {})


def test_groups_in_the_first_quarter_of_the_steps(make, qkv):
    impl, made_in = make(), []
    for step in range(8):
        at_step(step, 8)
        impl.forward_cuda(*qkv)
        made_in.append([made for made, _ in impl.sharded.groupings.values()])
    assert made_in == [[0], [0]] + [[]] * 6


def test_grouped_output_is_that_of_one_card(make):
    at_step(0, 8)
    q, k, v = sample_qkv("clustered", (1, 2, 700, 64))  # six tiles, enough for four clusters
    out = make().forward_cuda(*(x.transpose(1, 2) for x in (q, k, v)))
    grouping = group_tokens(v, 4)
    one = vc_attention(q, k, v, VCConfig(clusters=4), grouping=grouping, scale=0.1, kernel="reference")
    assert out.equal(one.transpose(1, 2))


def test_both_halves_of_guidance_have_their_own_orders(make, qkv):
    impl = make()
    for step in (0, 1):
        for _ in range(2):
            at_step(step, 8)
            impl.forward_cuda(*qkv)
    assert sorted(impl.sharded.groupings) == [(0, 0), (1, 0)]


def test_key_mask_is_applied(make, qkv):
    mask = torch.arange(160)[None] < 130
    impl = make()
    out = impl.forward_cuda(*qkv, metadata(attn_mask=mask))
    assert 0 < relative_l2(out, exact(*qkv, mask)) < LIMIT
    assert impl.sharded.calls == 1


@pytest.mark.parametrize(
    ("role", "causal", "keys", "reason"),
    [
        ("cross", False, 160, "role 'cross'"),
        ("minimax_h3.token_refiner", False, 160, "role 'minimax_h3.token_refiner'"),
        ("self", True, 160, "causal"),
        ("self", False, 12, "cross-attention"),
    ],
)
def test_other_calls_go_to_sdpa(make, qkv, role, causal, keys, reason):
    q, k, v = qkv[0], qkv[1][:, :keys], qkv[2][:, :keys]
    impl = make(role, causal)
    assert impl.forward_cuda(q, k, v).equal(impl.exact.forward_cuda(q, k, v, None))
    assert impl.sharded.calls == 0
    ((why, count),) = impl.declined.items()
    assert reason in why
    assert count == 1


def test_what_no_kernel_takes_goes_to_sdpa(make, qkv):
    impl = make()
    impl.sharded.kernel = "auto"  # no kernel runs on a CPU by itself
    assert impl.forward_cuda(*qkv).equal(impl.exact.forward_cuda(*qkv, None))
    assert "got a CPU" in next(iter(impl.declined))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which no kernel runs by itself")
def test_says_before_the_model_is_built_that_nothing_runs(backend):
    with pytest.raises(ValueError, match=r"VC-Attention cannot run here: .*got a CPU"):
        backend.validate_available()


def test_answers_what_vllm_omni_asks_of_a_backend(backend):
    assert backend.get_name() == "CUDNN_ATTN"
    assert backend.supports_attention_mask()
    assert backend.get_supported_head_sizes() == []
    if hasattr(backend, "supports_head_size"):  # the wheel's base class
        assert backend.supports_head_size(128)
        assert not backend.supports_paged_kv


@pytest.mark.skipif(not HAS_WHEEL, reason="needs the package vllm-omni (pip install --no-deps vllm-omni)")
def test_reads_what_the_wheel_publishes():
    root = Path(importlib.util.find_spec("vllm_omni").submodule_search_locations[0])
    context = (root / "diffusion" / "forward_context.py").read_text()
    for name in (
        "denoise_step_idx",
        "total_denoise_steps",
        "get_forward_context",
        "is_forward_context_available",
    ):
        assert name in context
    assert (
        'OMNI_DEFAULT_PLUGINS_GROUP = "vllm_omni.general_plugins"'
        in (root / "plugins/__init__.py").read_text()
    )


def test_importing_needs_no_vllm_omni():
    assert "vllm_omni" not in sys.modules
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        vllm_omni.anything  # noqa: B018
