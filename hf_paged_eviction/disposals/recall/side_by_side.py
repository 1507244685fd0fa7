"""Several tensors of the same tokens as one, so that they travel together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


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
