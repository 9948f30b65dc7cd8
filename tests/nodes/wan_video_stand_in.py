"""As much of WanVideoWrapper as its patch touches, written from its contract; the real files are not needed.

A model whose blocks call self_attn.forward(q, k, v, seq_lens, ...) with [B, L, H, D], and a sampler loop that
copies the options once, says step and condition by keyword, and swaps blocks between devices.
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn

HEADS, HEAD_DIM = 2, 32
WIDTH = HEADS * HEAD_DIM


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.attention_mode, self.ref_adapter = HEADS, "sdpa", None
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.exact_calls = []  # (Lq, Lk) of the calls that this attention answered itself

    def forward(
        self,
        q,
        k,
        v,
        seq_lens,
        transformer_options={},  # noqa: B006, as the wrapper has it
        attention_mode_override=None,
        lynx_ref_feature=None,
        lynx_ref_scale=1.0,
        onetoall_ref=None,
        onetoall_ref_scale=1.0,
        frame_tokens=1536,
    ):
        self.exact_calls.append((q.shape[1], k.shape[1]))
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
        return self.o((out if onetoall_ref is None else out + onetoall_ref).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = SelfAttention()

    def forward(self, x, condition_tokens, seq_lens, last_part=None, **options):
        q, k, v = self.self_attn.qkv(x).unflatten(2, (3, HEADS, HEAD_DIM)).unbind(2)
        attend, c = self.self_attn.forward, condition_tokens
        if c:
            noise = attend(q[:, c:].contiguous(), k, v, seq_lens, **options)
            held = attend(q[:, :c], k[:, :c], v[:, :c], seq_lens, **options)
            return x + torch.cat([held, noise], 1)
        return x + attend(q, k, v, seq_lens, frame_tokens=4, **options)


class WanModel(nn.Module):
    def __init__(self, blocks=2, vace=0):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.vace_blocks = nn.ModuleList(Block() for _ in range(vace))
        self.vace_layers = [1][:vace] or None
        self.main_device, self.is_longcat = torch.device("cpu"), True
        self.raises_at, self.error = None, None

    def forward(
        self,
        x,
        t,
        current_step=0,
        current_step_percentage=0.0,
        last_step=False,
        is_uncond=False,
        longcat_num_cond_latents=0,
        transformer_options={},  # noqa: B006, as the wrapper has it
        mode=None,
        ref=None,
        seq_len=None,
    ):
        lengths = torch.tensor([seq_len or x.shape[1]] * x.shape[0], dtype=torch.int32)
        options = {"transformer_options": transformer_options, "attention_mode_override": mode}
        if ref is not None:
            options["onetoall_ref"] = ref
        condition_tokens = longcat_num_cond_latents * x.shape[1] // 4
        hint = 0
        for block in self.vace_blocks:
            hint = block(x, condition_tokens, lengths, **options)
        for block in self.blocks:
            block.to("cpu")  # the wrapper's block swap
            if self.raises_at == current_step:
                raise self.error
            x = block(x + hint, condition_tokens, lengths, **options)
            block.to("cpu")
        return x


WanModel.__module__ = "/path/custom_nodes/ComfyUI-WanVideoWrapper.wanvideo.modules.model"


class Wrapped(nn.Module):
    """The wrapper's model object: indexed by name, with the network inside."""

    def __init__(self, network):
        super().__init__()
        self.diffusion_model, self.pipeline = network, {"base_dtype": torch.float32}

    def __getitem__(self, name):
        return self.pipeline[name]


class Patcher:
    """As much of a ModelPatcher as a WANVIDEOMODEL needs."""

    def __init__(self, network):
        self.model, self.load_device = Wrapped(network), torch.device("cpu")
        self.model_options = {"transformer_options": {"merge_loras": False}}

    def clone(self):
        other = Patcher.__new__(Patcher)
        other.__dict__.update(self.__dict__)
        other.model_options = {
            k: dict(v) if isinstance(v, dict) else v for k, v in self.model_options.items()
        }
        return other


def make_patcher(blocks=2, vace=0, seed=0):
    torch.manual_seed(seed)
    return Patcher(WanModel(blocks, vace).eval().requires_grad_(False))


def sample(
    patcher, steps=8, tokens=256, cfg=True, copies=True, first_sigma=1.0, windows=1, network=None, **arguments
):
    """The wrapper's loop: every output, in order, and the attention's own (exact) calls."""
    network = patcher.model.diffusion_model if network is None else network
    options = patcher.model_options["transformer_options"]
    options = copy.deepcopy(options) if copies else options
    for block in (*network.blocks, *network.vace_blocks):
        block.self_attn.exact_calls.clear()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, tokens, WIDTH, generator=generator)
    outputs = []
    for step in range(steps):
        sigma = first_sigma * (1 - step / steps)
        for window in range(windows):
            for uncond in (False, True)[: 1 + cfg]:
                outputs.append(
                    network(
                        x + 0.1 * step + 0.3 * uncond + 0.2 * window,
                        t=torch.tensor([[1000 * sigma, 0.0]]),
                        current_step=step,
                        current_step_percentage=step / steps,
                        last_step=step == steps - 1,
                        is_uncond=uncond,
                        transformer_options=options,
                        **arguments,
                    )
                )
    attentions = [block.self_attn for block in (*network.blocks, *network.vace_blocks)]
    return SimpleNamespace(outputs=outputs, exact=[call for a in attentions for call in a.exact_calls])
