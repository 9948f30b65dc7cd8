"""Operands of triton_fp8_fp8: E4M3 Q, K and value residuals. The recipe decides; the steps are triton_int8_fp8's."""

from .triton_int8_fp8 import prepare

__all__ = ["prepare"]
