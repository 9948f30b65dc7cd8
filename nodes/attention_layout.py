"""ComfyUI's attention tensors <-> ours, [B, H, L, D]. Views only: no arithmetic, no copies of q, k or v."""

import torch


def heads_first(tensor: torch.Tensor, heads: int, skip_reshape: bool) -> torch.Tensor:
    """[B, L, H*D] (or [B, H, L, D] if skip_reshape) as a [B, H, L, D] view.

    Raises ValueError if the tensor has another rank or its width is no multiple of heads.
    """
    if skip_reshape:
        if tensor.ndim != 4:
            raise ValueError(f"with skip_reshape q, k, v must be [B, H, L, D], got {tuple(tensor.shape)}")
        return tensor
    if tensor.ndim != 3 or tensor.shape[-1] % heads:
        raise ValueError(f"q, k, v must be [B, L, H*D] with {heads} heads, got {tuple(tensor.shape)}")
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


class HeadsBox:
    """The host's single-owner box of such a tensor, which gives it as [B, H, L, D]."""

    def __init__(self, box, heads: int, skip_reshape: bool):
        self._box, self._layout = box, (heads, skip_reshape)
        self.taken = False

    def peek(self) -> torch.Tensor:
        return heads_first(self._box.peek(), *self._layout)

    def take(self) -> torch.Tensor:
        self.taken = True
        return heads_first(self._box.take(), *self._layout)


def one_storage(tensors) -> bool:
    """Whether the tensors are views of one: then giving one of them up frees nothing."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def split_heads(q, k, v, heads: int, skip_reshape: bool):
    """q, k, v as [B, H, L, D] views. Keys and values may have fewer heads (grouped-query attention)."""
    q4 = heads_first(q, heads, skip_reshape)
    if skip_reshape:
        return q4, heads_first(k, heads, True), heads_first(v, heads, True)
    kv_heads = heads if k.shape[-1] == q.shape[-1] else max(1, k.shape[-1] // q4.shape[-1])
    return q4, heads_first(k, kv_heads, False), heads_first(v, kv_heads, False)


def like_caller(out: torch.Tensor, skip_output_reshape: bool) -> torch.Tensor:
    """[B, H, Lq, D] as ComfyUI wants it back: [B, Lq, H*D], or unchanged if skip_output_reshape.

    Kernels lay their output out as [B, Lq, H, D] in memory, so this is a view of it.
    """
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def key_mask_of(mask: torch.Tensor | None, batch: int, keys: int) -> torch.Tensor | str | None:
    """A mask over keys alone as bool [B, Lk] (True = attend); None without a mask; else why it is not one.

    A boolean mask counts as it is. An additive one counts if every value is 0 or at most -1e30 (in fp16 the
    lowest value, -65504): then adding it and removing those keys are the same, because the exponential of
    either is 0 in float32. Reads one number to the host.
    """
    if mask is None:
        return None
    full = mask.reshape((1,) * (2 - mask.ndim) + tuple(mask.shape)) if mask.ndim < 2 else mask
    full = full.unsqueeze(0) if full.ndim == 2 else full
    full = full.unsqueeze(1) if full.ndim == 3 else full
    if full.ndim != 4 or full.shape[1] != 1 or full.shape[2] != 1 or full.shape[3] != keys:
        return "a mask that differs by query or head"
    rows = full[:, 0, 0, :]
    if rows.shape[0] not in (1, batch):
        return "a mask for another batch size"
    if rows.dtype == torch.bool:
        attend = rows
    else:
        attend = rows == 0
        if not bool((attend | (rows <= max(-1e30, torch.finfo(rows.dtype).min))).all()):
            return "a mask that weighs keys instead of dropping them"
    return attend.expand(batch, keys)
