"""Operands of triton_fp8_fp8: E4M3 Q, K and value residuals, by triton_int8_fp8's steps."""

from .triton_int8_fp8 import prepare

__all__ = ["prepare"]
