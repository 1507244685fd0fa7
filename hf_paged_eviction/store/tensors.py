"""Keys and values by slot. All states are `[batch, kv_heads, slots, dim]`."""

import torch
from torch import Tensor


def with_new(held: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that are held, with new ones behind them."""
    return torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)


def make_storage(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor with any content: an ordinary one even under `torch.inference_mode`, so that later forwards outside of
    it may write to it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def storage_shape(like: Tensor, slots: int) -> tuple[int, ...]:
    """`[batch, kv_heads, slots, dim]` for states like these."""
    batch, heads, _, width = like.shape
    return batch, heads, slots, width


def serves(storage: Tensor | None, states: Tensor, slots: int, most: int) -> bool:
    """Whether a storage left by another prompt fits these states and has at least `slots` and at most `most` slots."""
    if storage is None or not slots <= storage.shape[2] <= most:
        return False
    fitting = storage_shape(states, storage.shape[2])
    return (storage.shape, storage.dtype, storage.device) == (fitting, states.dtype, states.device)


def byte_count(*storages: Tensor | None) -> int:
    """Bytes of the storages that exist."""
    return sum(states.numel() * states.element_size() for states in storages if states is not None)
