"""attend() with E4M3 in both products, for cards without INT8 tensor cores: triton_int8_fp8's kernel."""

from .triton_int8_fp8 import attend

__all__ = ["attend"]
