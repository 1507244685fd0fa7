"""Columns in segments of different length."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

#: Tensors by column.
States = Mapping[str, Tensor]


class Segments:
    """One segment of slots for each row and KV head, one after the other, without gaps: a column is `[total, ...]`.

    So the memory of a layer depends on the total number of its tokens, not on its longest head. The host decides the
    lengths, so nothing has to be read from the device while tokens come. Methods are those of `Dense`.

    Attributes:
        lengths: number of slots of each KV head, row by row.
        bounds: first slots and lengths of the segments, `[rows, heads]` each, on the device.
        total: number of all slots.
        width: number of slots of a padded copy, at least that of the longest segment.
        device: device of the columns.

    Args:
        lengths: `[rows, heads]` int64.
        device, width: see above.
    """

    def __init__(self, lengths: Tensor, device: torch.device, width: int) -> None:
        self.width, self.device = width, device
        self.lengths: list[int] = lengths.flatten().tolist()
        self.total = sum(self.lengths)
        with torch.inference_mode(False):
            lengths = lengths.to(device, copy=True)
            self.bounds = lengths.flatten().cumsum(0).view_as(lengths) - lengths, lengths

    @classmethod
    def joined(cls, layouts: "Sequence[Segments]") -> "Segments":
        """The rows of all of these, one behind the other, each in columns of its own."""
        joined, (starts, lengths) = copy(layouts[0]), zip(*[layout.bounds for layout in layouts], strict=True)
        joined.bounds = torch.cat(starts), torch.cat(lengths)
        return joined

    def of_rows(self, rows: Tensor, columns: States) -> "tuple[Segments, States]":
        """See `Dense.of_rows`; in the columns of all."""
        part, (starts, lengths) = copy(self), self.bounds
        part.bounds = starts[rows], lengths[rows]
        return part, columns

    def shape(self, columns: States) -> tuple[int, int, int]:
        """Number of rows, of KV heads, and of the slots of a padded copy."""
        rows, heads = self.bounds[1].shape
        return rows, heads, self.width

    def places(self, slots: Tensor) -> Tensor:
        """The places of the slots `[rows, 1 or heads, n]` in a column: `[rows, heads, n]`. Beyond the end of a segment
        it is the last slot."""
        starts, lengths = self.bounds
        return starts[..., None] + slots.minimum(lengths[..., None] - 1)

    def index(self, slots: Tensor, columns: States) -> States:
        """See `Dense.index`."""
        return dict.fromkeys(columns, self.places(slots))

    def at(self, columns: States, slots: Tensor) -> States:
        """See `Dense.at`."""
        places = self.places(slots)
        return {
            name: column.index_select(0, places.flatten()).view(*places.shape, *column.shape[1:])
            for name, column in columns.items()
        }

    def write(self, column: Tensor, index: Tensor, states: Tensor) -> None:
        """See `Dense.write`."""
        column.index_copy_(0, index.flatten(), states.flatten(0, 2))

    def write_compiled(self, column: Tensor, slot: Tensor, states: Tensor) -> None:
        """See `Dense.write_compiled`."""
        column.index_put_((self.places(slot[..., None]).flatten(),), states.flatten(0, 2))

    def first(self, columns: States, held: int | None = None) -> States:
        """See `Dense.first`; a padded copy, in which nothing beyond the end of a segment means anything."""
        return self.at(columns, torch.arange(self.width if held is None else held, device=self.device))

    def stored(self, columns: States, held: int) -> States:
        """See `Dense.stored`: all slots."""
        return columns

    def inside(self, slots: Tensor) -> Tensor:
        """Of slots `[rows, heads, n]`, those that a segment has: `[total]`, in the order of the columns."""
        return slots[torch.arange(slots.shape[-1], device=self.device) < self.bounds[1][..., None]]

    def take(self, sources: States, kept_indices: Tensor, new: States) -> None:
        """See `Dense.take`: each segment takes as many of the tokens as it is long."""
        rows, heads, width = next(iter(sources.values())).shape[:3]
        first = torch.arange(rows * heads, device=self.device).view(rows, heads, 1) * width
        places = self.inside(first + kept_indices)
        for name, source in sources.items():
            torch.index_select(source.flatten(0, 2), 0, places, out=new[name])

    def reorder(self, columns: States, order: Tensor) -> None:
        """See `Dense.reorder`."""
        places = self.inside(self.places(order))
        for column in columns.values():
            column.copy_(column.index_select(0, places))

    def rows_of(self, change: Callable[[Tensor], Tensor]) -> "tuple[Segments, Callable[[Tensor], Tensor]]":
        """See `Dense.rows_of`."""
        starts, lengths = map(change, self.bounds)
        after = Segments(lengths, self.device, self.width)
        moved = (starts - after.bounds[0]).flatten().repeat_interleave(lengths.flatten())
        places = moved + torch.arange(after.total, device=self.device)
        return after, lambda column: column.index_select(0, places)
