"""The layout of slots in a flat tensor, for rows and KV heads with different numbers of tokens."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor


class Segments:
    """One segment of slots for each row and KV head, one after the other, without gaps.

    A column is a flat tensor `[total, ...]`. The host decides the layout, so nothing has to be read from the device
    while tokens come.

    Attributes:
        lengths: number of slots of each KV head, by row.
        flat_lengths: the same in one list.
        total: number of all slots.
        width: number of slots of a padded copy, at least that of the longest segment.
        device: device of the columns.

    Args:
        lengths: see above.
        device: see above.
        width: see above.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], device: torch.device, width: int) -> None:
        self.width, self.device = width, device
        self.lengths = tuple(map(tuple, lengths))
        self.flat_lengths = list(chain.from_iterable(lengths))
        self.total = sum(self.flat_lengths)
        with torch.inference_mode(False):
            self._lengths = torch.tensor(self.lengths, device=device)  # [B, H]
            ends = self._lengths.flatten().cumsum(0).view_as(self._lengths)
            self._starts = ends - self._lengths

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return len(self.lengths[0])

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """First slots and lengths of the segments, `[B, H]` each, on the device."""
        return self._starts, self._lengths

    def places(self, slots: Tensor) -> Tensor:
        """The places of the slots `[B, 1 or H, n]` in the flat tensor: `[B, H, n]`. Beyond the end of a segment it is
        the last slot."""
        return self._starts[..., None] + slots.minimum(self._lengths[..., None] - 1)

    def first_places(self, width: int) -> Tensor:
        """The places of the first `width` slots of all segments, `[B, H, width]`; what stands there means nothing
        beyond the end of a segment."""
        return self.places(torch.arange(width, device=self.device))

    def taken_from(self, kept_indices: Tensor, width: int) -> Tensor:
        """`[total]` indices into a flattened `[B, H, width, ...]`.

        Each segment takes the first of its `kept_indices` `[B, 1 or H, n]`, as many as it is long.
        """
        rows, heads = self._lengths.shape
        first = torch.arange(rows * heads, device=self.device).view(rows, heads, 1) * width
        inside = torch.arange(kept_indices.shape[-1], device=self.device) < self._lengths[..., None]
        return (first + kept_indices)[inside]

    def in_order(self, order: Tensor) -> Tensor:
        """`[total]` places of the slots of each segment in the order `[B, 1 or H, width]`."""
        inside = torch.arange(order.shape[-1], device=self.device) < self._lengths[..., None]
        return self.places(order)[inside]

    def rows_of(self, change: Callable[[Tensor], Tensor]) -> "tuple[Segments, Tensor]":
        """The segments of the indexed rows, and the former places `[total]` of their slots."""
        rows = change(torch.arange(self.rows, device=self.device))
        after = Segments([self.lengths[row] for row in rows.tolist()], self.device, self.width)
        moved = (self._starts[rows] - after._starts).flatten().repeat_interleave(after._lengths.flatten())
        return after, moved + torch.arange(after.total, device=self.device)


def read_at(column: Tensor, places: Tensor) -> Tensor:
    """What stands at `places` of a column `[total, ...]`: their shape, followed by that of an entry."""
    return column.index_select(0, places.flatten()).view(*places.shape, *column.shape[1:])
