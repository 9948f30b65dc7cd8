"""Which attention calls of a model are video self-attention. One small adapter per family, nothing patched.

A family looks at a call's shapes and at what the model writes into transformer_options, and either names the
layer (so that its token order can be kept) or says in a few words why the call is left alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class AttentionCall:
    """What a family may look at; no tensors."""

    q_shape: tuple[int, ...]  # B, H, Lq, D
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    options: Mapping[str, Any]  # the call's transformer_options

    @property
    def square(self) -> bool:
        return self.q_shape == self.k_shape == self.v_shape

    @property
    def tokens(self) -> int:
        return self.q_shape[2]


class Layer(NamedTuple):
    """One attention layer of a model."""

    kind: str  # block list that it belongs to: "double", "single"
    index: int  # place in that list
    position: int  # place among all blocks of the model, which exact_blocks counts


@dataclass
class ForwardNotes:
    """What a family remembers within one forward of the model."""

    text_tokens: int | None = None  # length of the text conditioning, if the model was given one
    counts: dict[Any, int] = field(default_factory=dict)

    def count(self, key) -> int:
        """How often key was counted before, in this forward."""
        seen = self.counts.get(key, 0)
        self.counts[key] = seen + 1
        return seen


class Family:
    """A kind of model, recognised by the name of its class or of a base class."""

    name: str
    classes: tuple[tuple[str, str], ...]  # (module, class name)

    def owns(self, diffusion_model) -> bool:
        """Whether the model is of this family; by name, so that nothing has to be imported."""
        return any(
            (base.__module__, base.__qualname__) in self.classes for base in type(diffusion_model).__mro__
        )

    def layer(self, call: AttentionCall, notes: ForwardNotes) -> Layer | str:
        """The layer whose video self-attention this call is, or why it is none."""
        raise NotImplementedError


class Wan(Family):
    """Wan 2.1 and 2.2 and what derives from them (5B, VACE, Animate, S2V, ...): blocks are numbered, and in
    a block self-attention comes before the text's cross-attention."""

    name = "Wan"
    classes = (("comfy.ldm.wan.model", "WanModel"),)

    def layer(self, call, notes):
        index = call.options.get("block_index")
        if index is None:
            return "outside the blocks"
        if not call.square:
            return "cross-attention"
        # With as many text as video tokens, cross-attention has the same shapes: then the calls of a block
        # alternate. VACE runs a second block under the same number, so more than one pair may come.
        if call.tokens == notes.text_tokens and notes.count(("square", index)) % 2:
            return "cross-attention"
        return Layer(str(call.options.get("block_type", "double")), index, index)


class HunyuanVideo(Family):
    """HunyuanVideo and HunyuanVideo-1.5: text and video in one sequence. Blocks are numbered in their list
    (first "double", then "single"), the text refiner's calls carry no number."""

    name = "HunyuanVideo"
    classes = (("comfy.ldm.hunyuan_video.model", "HunyuanVideo"),)

    def owns(self, diffusion_model):
        # HunyuanImage is the same class with flat patches
        return super().owns(diffusion_model) and len(getattr(diffusion_model, "patch_size", (1, 1, 1))) == 3

    def layer(self, call, notes):
        index = call.options.get("block_index")
        if index is None:
            return "text refiner"
        if not call.square:
            return "cross-attention"
        kind = str(call.options.get("block_type", "double"))
        if kind == "double":
            notes.counts["double blocks"] = call.options.get("total_blocks", index + 1)
            return Layer(kind, index, index)
        return Layer(kind, index, index + notes.counts.get("double blocks", 0))


class MiniMaxH3(Family):
    """MiniMax-H3: text, references, audio and video in one sequence, one batch row. ComfyUI 0.38 numbers its
    blocks; before that, the place in the forward is the number."""

    name = "MiniMax-H3"
    classes = (("comfy.ldm.minimax.model", "MiniMaxH3Model"),)

    def layer(self, call, notes):
        if not call.square:
            return "cross-attention"
        index = call.options.get("block_index")
        if index is None:
            if "minimax_h3_layout" in call.options:
                return "text refiner"
            # a low-memory node asks for the heads of a block in several calls
            chunks = max(1, int(call.options.get("minimax_head_chunks") or 1))
            index = notes.count("blocks") // chunks
        return Layer("double", index, index)


FAMILIES: tuple[Family, ...] = (Wan(), HunyuanVideo(), MiniMaxH3())


def family_of(diffusion_model) -> Family | None:
    """The family of a diffusion model, or None for a model that this pack leaves alone."""
    return next((family for family in FAMILIES if family.owns(diffusion_model)), None)
