"""Keys and values by slot. All states are `[batch, kv_heads, slots, dim]`."""

import torch
from torch import Tensor


def slot_index(slots: Tensor, states: Tensor) -> Tensor:
    """Slots `[batch, 1 or kv_heads, n]` as an index into `states`, `[batch, kv_heads, n, dim]`, without a copy."""
    batch, heads, _, width = states.shape
    return slots[..., None].expand(batch, heads, -1, width)


def gather_slots(states: Tensor, slots: Tensor) -> Tensor:
    """`states` at `slots` `[batch, 1 or kv_heads, n]` -> `[batch, kv_heads, n, dim]`."""
    return states.gather(2, slot_index(slots, states))


def empty_storage(like: Tensor, capacity: int) -> Tensor:
    """Room for `capacity` slots of states like these.

    An ordinary tensor even under `torch.inference_mode`, so that later forwards outside of it may write to it.
    """
    batch, heads, _, width = like.shape
    with torch.inference_mode(False):
        return torch.empty(batch, heads, capacity, width, dtype=like.dtype, device=like.device)


def serves(storage: Tensor | None, states: Tensor, capacity: int) -> bool:
    """Whether a storage left by another prompt has the shape, dtype and device that these states need."""
    if storage is None:
        return False
    batch, heads, _, width = states.shape
    return (storage.shape, storage.dtype, storage.device) == (
        (batch, heads, capacity, width),
        states.dtype,
        states.device,
    )


def byte_count(*storages: Tensor | None) -> int:
    """Bytes of the storages that exist."""
    return sum(states.numel() * states.element_size() for states in storages if states is not None)
