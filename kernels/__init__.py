"""VC-Attention on plain tensors. Paper map and numerics: README.md beside this file."""

from .config import VCConfig
from .dispatch import attend_call, group_tokens, merge_attention, prepare_call, vc_attention
from .formats import expcast_codes
from .operands import AttentionProblem, TokenGrouping
from .registry import KERNELS, Choice, choose_kernel

__all__ = [
    "KERNELS",
    "AttentionProblem",
    "Choice",
    "TokenGrouping",
    "VCConfig",
    "attend_call",
    "choose_kernel",
    "expcast_codes",
    "group_tokens",
    "merge_attention",
    "prepare_call",
    "vc_attention",
]
