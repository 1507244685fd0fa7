"""Functions for keys and values by slot. All states are `[batch, kv_heads, slots, dim]`."""

import torch
from torch import Tensor


def with_new(held: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate held keys and values with new ones."""
    return torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)


def storage_shape(like: Tensor, slots: int) -> tuple[int, ...]:
    """Shape `[batch, kv_heads, slots, dim]` for states like these."""
    batch, heads, _, width = like.shape
    return batch, heads, slots, width


def serves(storage: Tensor | None, states: Tensor, slots: int, most: int) -> bool:
    """Whether the storage of an earlier prompt fits these states and has at least `slots` and at most `most` slots."""
    if storage is None or not slots <= storage.shape[2] <= most:
        return False
    fitting = storage_shape(states, storage.shape[2])
    return (storage.shape, storage.dtype, storage.device) == (fitting, states.dtype, states.device)


def byte_count(*storages: Tensor | None) -> int:
    """Bytes of these storages; None counts as 0."""
    return sum(states.numel() * states.element_size() for states in storages if states is not None)
