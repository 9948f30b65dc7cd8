"""Operands of triton_int8_int8: INT8 Q, K and value residuals, by triton_int8_fp8's steps."""

from .triton_int8_fp8 import prepare

__all__ = ["prepare"]
