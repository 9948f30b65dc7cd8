"""Which errors of a kernel a run survives."""

import torch

# After these the CUDA context is gone: every later call fails too, whoever makes it.
STICKY = (
    "illegal memory access",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "hardware stack error",
    "ecc error",
)


class CudaContextLost(RuntimeError):
    """The GPU cannot be used again in this process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Out-of-memory belongs to ComfyUI: it frees models and tries again, or tells the user."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


def is_sticky(error: BaseException) -> bool:
    """Whether the CUDA context is lost."""
    text = str(error).lower()
    return any(sign in text for sign in STICKY)


def raise_unless_recoverable(error: Exception, kernel: str) -> None:
    """Raise what must not be hidden: out-of-memory as it is, a lost context with kernel name and advice."""
    if is_out_of_memory(error):
        raise error
    if is_sticky(error):
        raise CudaContextLost(
            f"CUDA context lost, restart ComfyUI (in VC-Attention kernel {kernel}: {error})"
        ) from error
