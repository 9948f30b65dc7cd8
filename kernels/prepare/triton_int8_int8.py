"""Operands of triton_int8_int8: INT8 Q, K and value residuals. The recipe decides; the steps are triton_int8_fp8's."""

from .triton_int8_fp8 import prepare

__all__ = ["prepare"]
