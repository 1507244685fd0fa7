"""Where the slots of columns lie: side by side, or in segments of different length."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: Tensors by column.
States = Mapping[str, Tensor]


def slot_index(slots: Tensor, column: Tensor) -> Tensor:
    """Expand slots `[batch, 1 or sets, n]` to an index into a column `[batch, sets, slots, ...]`, without a copy. If
    there are more sets than in the column, the first ones are used."""
    sets = column.shape[1]
    if slots.shape[1] > sets:
        slots = slots[:, :sets]
    if column.ndim == 3:
        return slots.expand(-1, sets, -1)
    return slots.unsqueeze(-1).expand(-1, sets, -1, column.shape[3])


def gather_slots(column: Tensor, slots: Tensor) -> Tensor:
    """Read a column at `slots` `[batch, 1 or sets, n]`: `[batch, sets, n, ...]`."""
    return column.gather(2, slot_index(slots, column))


class Dense:
    """All sets have the same number of slots: a column is `[rows, sets, slots, ...]`.

    Attributes:
        lengths, bounds: None, see `Segments`.
    """

    lengths: list[int] | None = None
    bounds: tuple[Tensor, Tensor] | None = None

    def shape(self, columns: States) -> tuple[int, int, int]:
        """Number of rows, sets and slots of the first column."""
        rows, sets, slots = next(iter(columns.values())).shape[:3]
        return rows, sets, slots

    def index(self, slots: Tensor, columns: States) -> States:
        """The index of the slots `[rows, 1 or sets, n]` in each column, for `write`: as `slot_index` makes it, or `[n]`
        for one row whose heads share their slots, which takes half the time."""
        if slots.shape[:2] == (1, 1):
            return dict.fromkeys(columns, slots[0, 0])
        index: dict[str, Tensor] = {}  # compiled code may run this
        shape, places = None, slots
        for name, column in columns.items():
            if column.shape != shape:
                shape, places = column.shape, slot_index(slots, column)
            index[name] = places
        return index

    def at(self, columns: States, slots: Tensor) -> States:
        """What stands in the slots `[rows, 1 or sets, n]`: `[rows, sets, n, ...]`."""
        index = self.index(slots, columns)
        if slots.shape[:2] == (1, 1):
            return {name: column.index_select(2, index[name]) for name, column in columns.items()}
        return {name: column.gather(2, index[name]) for name, column in columns.items()}

    def write(self, column: Tensor, index: Tensor, states: Tensor) -> None:
        """Write states `[rows, sets, n, ...]` there."""
        if index.ndim == 1:
            column.index_copy_(2, index, states)
        else:
            column.scatter_(2, index, states)

    def write_compiled(self, column: Tensor, slot: Tensor, states: Tensor) -> None:
        """Write states `[rows, sets, 1, ...]` to one slot `[rows, 1 or sets]`, in compiled code."""
        rows, sets = column.shape[:2]
        row, one = torch.arange(rows, device=column.device)[:, None], torch.arange(sets, device=column.device)
        # Not scatter_, for which inductor copies the whole column.
        column.index_put_((row, one, slot), states[:, :, 0])

    def first(self, columns: States, held: int | None = None) -> States:
        """The first `held` slots of each set, or all, `[rows, sets, held, ...]`; views."""
        return columns if held is None else {name: column[:, :, :held] for name, column in columns.items()}

    def stored(self, columns: States, held: int) -> States:
        """Views of what a file holds of a layer with so many tokens."""
        return self.first(columns, held)

    def take(self, sources: States, kept_indices: Tensor, new: States) -> None:
        """Fill new columns with the tokens `[rows, 1 or sets, slots]` of sources `[rows, sets, n, ...]`."""
        index = None
        for name, source in sources.items():
            if index is None or index.shape != new[name].shape:
                index = slot_index(kept_indices, source)
            torch.gather(source, 2, index, out=new[name])

    def reorder(self, columns: States, order: Tensor) -> None:
        """Reorder the first slots by `order` `[rows, 1 or sets, held]`."""
        for column in columns.values():
            column[:, :, : order.shape[-1]] = gather_slots(column, order)

    def rows_of(self, change: Callable[[Tensor], Tensor]) -> "tuple[Dense, Callable[[Tensor], Tensor]]":
        """The layout of the indexed rows, and what makes a column of the former one."""
        return Dense(), change


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


Layout = Dense | Segments
