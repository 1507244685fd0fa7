"""What lies per slot, column by column.

A column is a tensor `[rows, sets, slots, ...]`: of keys, of codes, of statistics. `sets` is the number of KV heads, or
1 where all of a layer have the same in a slot. Slots are named by `[rows, 1 or sets, n]` int64; of more sets than a
column has, the first ones count.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .room import Room
from .tensors import byte_count


def slot_index(slots: Tensor, column: Tensor) -> Tensor:
    """Slots `[batch, 1 or sets, n]` as an index into a column `[batch, sets, slots, ...]`, without a copy: of more sets
    than the column has, the first ones."""
    batch, sets = column.shape[:2]
    if slots.shape[1] > sets:
        slots = slots[:, :sets]
    if column.ndim == 3:
        return slots.expand(batch, sets, -1)
    return slots.unsqueeze(-1).expand(batch, sets, -1, column.shape[3])


def gather_slots(column: Tensor, slots: Tensor) -> Tensor:
    """A column at `slots` `[batch, 1 or sets, n]` -> `[batch, sets, n, ...]`."""
    return column.gather(2, slot_index(slots, column))


class Columns:
    """Columns with the same slots, written to in place.

    A column is made anew only for another number of rows or slots, so that compiled code finds it where it was.

    Attributes:
        pads: whether sets that may use fewer slots than others have as many all the same.
        tensors: the columns, in the order that their owner knows; none before the first tokens.
        room: where they come from.

    Args:
        room: see above.
    """

    pads = True

    def __init__(self, room: Room) -> None:
        self.room = room
        self.tensors: tuple[Tensor, ...] = ()

    # ---- what there is --------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, sets and slots of the first column."""
        rows, sets, slots = self.tensors[0].shape[:3]
        return rows, sets, slots

    @property
    def bytes(self) -> int:
        """Of all slots, used or not."""
        return byte_count(*self.tensors)

    @property
    def lengths(self) -> list[int] | None:
        """How many slots each set of each row has, where these lie one after the other, `[total, ...]`: `first` gives a
        padded copy then. None = all have equally many, side by side."""
        return None

    def padded(self, column: int) -> Tensor:
        """One of `first`."""
        return self.tensors[column]

    def first(self, held: int | None = None) -> Sequence[Tensor]:
        """The first `held` slots, or all: views, where there may be any."""
        return self.tensors if held is None else [column[:, :, :held] for column in self.tensors]

    def at(self, slots: Tensor) -> list[Tensor]:
        """What lies in these slots, `[rows, sets, n, ...]` each."""
        return [gather_slots(column, slots) for column in self.tensors]

    def as_kept(self, held: int) -> tuple[Sequence[Tensor], Tensor | None]:
        """What a file holds: the first `held` slots; or all as they lie, and lengths `[rows, sets]` int64."""
        return self.first(held), None

    def noted(self, keys: Tensor, empty: int = 0) -> Tensor | None:
        """See `Store.noted`; where the columns are keys and values."""
        return None

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def append(self, start: int, new: Sequence[Tensor]) -> None:
        """Write new tokens, `[rows, sets, n, ...]` for each column, to the slots from `start` on."""
        for column, states in zip(self.tensors, new, strict=True):
            column.narrow(2, start, states.shape[2]).copy_(states)

    def overwrite(self, slots: Tensor, new: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Write tokens to the slots `[rows, 1 or sets, n]`, one each; `where` `[rows, 1 or sets, n]` bool, False for
        those that stay away, None = all come."""
        index = None
        for column, states in zip(self.tensors, new, strict=True):
            if index is None or index.shape != states.shape:  # `slot_index`, at half its price
                own = slots if slots.shape[1] <= states.shape[1] else slots[:, : states.shape[1]]
                index = (own if states.ndim == 3 else own.unsqueeze(-1)).expand_as(states)
            if where is not None:
                comes = where[:, : column.shape[1]]
                states = torch.where(comes if column.ndim == 3 else comes[..., None], states, column.gather(2, index))
            column.scatter_(2, index, states)

    def write(self, slot: Tensor, new: Sequence[Tensor]) -> None:
        """As `overwrite`, to the slot `[rows, 1 or sets]`, for compiled code."""
        for column, states in zip(self.tensors, new, strict=True):
            rows, sets = column.shape[:2]
            row, one = torch.arange(rows, device=column.device)[:, None], torch.arange(sets, device=column.device)
            # Not scatter_, for which inductor copies the whole column.
            column.index_put_((row, one, slot), states.detach().to(column.dtype)[:, :, 0])

    def take(self, sources: Sequence[Tensor], kept: Tensor, views: bool, limits: Tensor | None = None) -> None:
        """Hold what stands at `kept` `[rows, 1 or sets, slots]` in these, `[rows, sets, n, ...]`, and nothing else.

        Args:
            views: whether sources are views of these columns, so that other tensors are needed.
            limits: `[rows, 1 or sets]`, how many slots each set may use; None = all.
        """
        anew = views or kept.shape[-1] != self.tensors[0].shape[2]
        new = self.room.like(self.tensors, kept.shape[-1]) if anew else self.tensors
        index = None
        for column, source in zip(new, sources, strict=True):
            if index is None or index.shape != column.shape:
                index = slot_index(kept, source)
            torch.gather(source, 2, index, out=column)
        self.use(*new)

    def hold(self, saved: Sequence[Tensor], lengths: Tensor | None, slots: int) -> None:
        """What `as_kept` gave, of columns of so many slots."""
        self.append(0, saved)

    def reorder(self, order: Tensor) -> None:
        """Bring the first slots into another order, `[rows, 1 or sets, held]`."""
        for column in self.tensors:
            column[:, :, : order.shape[-1]] = gather_slots(column, order)

    # ---- rows and room --------------------------------------------------------------------------------------------

    def use(self, *new: Tensor) -> None:
        """Let these be the columns; those that were and are no more go back to where they came from."""
        if self.room.pool is not None:
            self.room.give([old for old in self.tensors if all(old is not column for column in new)])
        self.tensors = new

    def resize(self, slots: int, held: int) -> None:
        """Have another number of slots; the tokens in the first `held` ones stay in theirs."""
        old, new = self.first(held), self.room.like(self.tensors, slots)
        for column, states in zip(new, old, strict=True):
            column[:, :, :held] = states
        self.use(*new)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0. As many rows as before (beams) stay where compiled code finds them."""
        new = [change(column) for column in self.tensors]
        if self.room.fixed and all(column.shape == old.shape for column, old in zip(new, self.tensors, strict=True)):
            for old, column in zip(self.tensors, new, strict=True):
                old.copy_(column)
        else:
            self.use(*map(self.room.own, new))

    def zero(self) -> None:
        """Let all slots hold zeros."""
        for column in self.tensors:
            column.zero_()

    def move_to(self, device: torch.device | str) -> None:
        """To another device; those of a pool are not given back."""
        self.tensors = tuple([column.to(device, non_blocking=True) for column in self.tensors])
