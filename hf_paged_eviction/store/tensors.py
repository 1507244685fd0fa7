"""Functions for keys and values by slot. All states are `[batch, kv_heads, slots, dim]`."""

import torch
from torch import Tensor


def with_new(held: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate held keys and values with new ones."""
    return torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)


def byte_count(*storages: Tensor | None) -> int:
    """Bytes of these storages; None counts as 0."""
    return sum(states.numel() * states.element_size() for states in storages if states is not None)
