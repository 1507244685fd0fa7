"""Keys and values by slot. All states are `[batch, kv_heads, slots, dim]`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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


@dataclass(frozen=True)
class SideBySide:
    """Several tensors `[..., width]` of the same tokens in one, so that they travel together: in their type, or as
    bytes where their types differ.

    Attributes:
        widths, dtypes: of each.
    """

    widths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, like: Sequence[Tensor]) -> "SideBySide":
        """For tensors like these."""
        return cls(tuple(part.shape[-1] for part in like), tuple(part.dtype for part in like))

    @property
    def dtype(self) -> torch.dtype:
        """Of the one tensor."""
        return self.dtypes[0] if len(set(self.dtypes)) == 1 else torch.uint8

    @property
    def width(self) -> int:
        """Of the one tensor."""
        return sum(self._columns)

    @property
    def _columns(self) -> list[int]:
        sizes = [1] * len(self.widths) if len(set(self.dtypes)) == 1 else [dtype.itemsize for dtype in self.dtypes]
        return [width * size for width, size in zip(self.widths, sizes, strict=True)]

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """`[..., width]`."""
        return torch.cat(
            [part if part.dtype == self.dtype else part.contiguous().view(self.dtype) for part in parts], -1
        )

    def apart(self, states: Tensor) -> tuple[Tensor, ...]:
        """What `together` was given, views where the type is theirs."""
        ends = accumulate(self._columns)
        parts = [states[..., end - column : end] for end, column in zip(ends, self._columns, strict=True)]
        return tuple(self._typed(part, dtype) for part, dtype in zip(parts, self.dtypes, strict=True))

    def _typed(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == self.dtype:
            return part
        if not part.shape[-1]:
            return part.to(dtype)
        # Bytes that begin anywhere are no numbers: they need a place of their own.
        return part.clone(memory_format=torch.contiguous_format).view(dtype)
