"""VC-Attention in Hugging Face diffusers' Wan transformers.

    patch = patch_wan(pipeline.transformer, pipeline.scheduler)
    frames = pipeline(prompt=...).frames
    print(patch.taken, patch.declined)
    patch.remove()

A pipeline with two transformers (Wan 2.2) is patched twice, with its one scheduler.
"""

import math
from collections import Counter

from ..config import VCConfig
from ..dispatch import group_tokens, plain, vc_attention
from ..operands import AttentionProblem
from ..registry import choose_kernel


def patch_wan(
    transformer, scheduler, config=None, *, grouping_window=0.25, regroup_every=4, kernel="auto"
) -> "WanPatch":
    """Run the self-attention of a diffusers WanTransformer3DModel on VC-Attention until .remove().

    Values are grouped in the first grouping_window of the scheduler's steps, with a new order every
    regroup_every steps; at 4 bits 1 is nearer to exact (tests/evidence, "Where grouping sits"). Calls that no
    kernel takes go to the processor that was there, counted by reason. Raises ValueError for a model without
    Wan's blocks.
    """
    if not all(hasattr(block, "attn1") for block in getattr(transformer, "blocks", [None])):
        raise ValueError(f"needs a WanTransformer3DModel, got {type(transformer).__name__}")
    return WanPatch(transformer, scheduler, config or VCConfig(), grouping_window, regroup_every, kernel)


class WanPatch:
    """What one patched transformer shares between its blocks: the denoising step, token orders, counts."""

    def __init__(self, transformer, scheduler, config, grouping_window, regroup_every, kernel):
        self.scheduler, self.config, self.kernel = scheduler, config, kernel
        self.grouping_window, self.regroup_every = grouping_window, regroup_every
        self.taken, self.declined = 0, Counter()
        self.groupings = {}  # (forward of this step, block) -> (step it was made in, TokenGrouping)
        self.step, self.forward = -1, 0
        self._hook = transformer.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        self._attentions = [block.attn1 for block in transformer.blocks]
        for i, attention in enumerate(self._attentions):
            attention.set_processor(VCAttnProcessor(self, i, attention.processor))

    def remove(self):
        """Put every processor back that was there before."""
        self._hook.remove()
        for attention in self._attentions:
            attention.set_processor(attention.processor.previous)
        self.groupings.clear()

    @property
    def grouped(self) -> bool:
        """Whether the current step lies in the grouping window."""
        return self.step < math.ceil(self.grouping_window * len(self.scheduler.timesteps))

    def _begin_forward(self, transformer, args, kwargs):
        # once per forward, not per call: finding the step costs a synchronisation
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        schedule = self.scheduler.timesteps.to(timestep.device).float()
        step = int((schedule - timestep.float().max()).abs().argmin())
        # two forwards of one step are the two halves of classifier-free guidance: other values, other orders
        self.forward = self.forward + 1 if step == self.step else 0
        if step < self.step:  # another clip
            self.groupings.clear()
        self.step = step
        if not self.grouped:
            self.groupings.clear()

    def grouping_of(self, block, v):
        """The order for a block's values, made anew when it is too old; None outside the window."""
        if not self.grouped:
            return None
        made_in, grouping = self.groupings.get((self.forward, block), (None, None))
        if grouping is None or grouping.order.shape != v.shape[:3]:
            made_in, grouping = self.step, group_tokens(v, self.config.clusters_for(v.shape[2]))
        elif self.step - made_in >= self.regroup_every:
            made_in, grouping = self.step, group_tokens(v, self.config.clusters_for(v.shape[2]), grouping)
        self.groupings[self.forward, block] = made_in, grouping
        return grouping


class VCAttnProcessor:
    """diffusers' attention processor of one block's self-attention."""

    # diffusers sets these on every processor that has them
    _attention_backend = None
    _parallel_config = None

    def __init__(self, patch, block, previous):
        self.patch, self.block, self.previous = patch, block, previous

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        heads = hidden_states.unflatten(2, (attn.heads, -1)).transpose(1, 2)  # of q's shape, not its values
        patch, rope = self.patch, rotary_emb and wan_rope(*rotary_emb)
        choice = choose_kernel(AttentionProblem.of(heads, heads, heads, patch.config, rope), patch.kernel)
        reason = None if choice.kernel else choice.reason
        if self._parallel_config is not None:
            self.previous._parallel_config, reason = self._parallel_config, "context parallelism"
        if encoder_hidden_states is not None or attention_mask is not None:
            reason = "has a mask or foreign keys"
        if reason:
            patch.declined[reason] += 1
            return self.previous(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        patch.taken += 1
        if getattr(attn, "fused_projections", False):
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        grouping = patch.grouping_of(self.block, v)
        config = patch.config if patch.grouped else plain(patch.config)
        out = vc_attention(q, k, v, config, grouping=grouping, rope=rope, kernel=choice.kernel.name)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))


def wan_rope(cos, sin):
    """diffusers' rotary tables [1, L, 1, D], each angle twice, as kernels take them: [L, D/2]."""
    return cos[0, :, 0, 0::2].contiguous(), sin[0, :, 0, 1::2].contiguous(), "interleaved"
