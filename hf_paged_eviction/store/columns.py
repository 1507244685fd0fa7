"""What lies per slot, column by column.

A column is a tensor `[rows, sets, slots, ...]`: of keys, of codes, of statistics. `sets` is the number of KV heads, or
1 where all of a layer have the same in a slot. Slots are named by `[rows, 1 or sets, n]` int64; of more sets than a
column has, the first ones count.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..saved import SavedState, StateDict
from .room import Room
from .tensors import byte_count

#: Tokens, column by column.
States = Mapping[str, Tensor]


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
    """Columns by name, with the same slots, written to in place.

    A column is made anew only for another number of rows or slots, so that compiled code finds it where it was.

    Attributes:
        pads: whether sets that may use fewer slots than others have as many all the same.
        tensors: the columns by name; none before the first tokens.
        layout: another object whenever `tensors` are others.
        room: where they come from.

    Args:
        room: see above.
    """

    pads = True

    def __init__(self, room: Room) -> None:
        self.room = room
        self._lay({})

    # ---- what there is --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, sets and slots of the first column."""
        rows, sets, slots = next(iter(self.tensors.values())).shape[:3]
        return rows, sets, slots

    @property
    def bytes(self) -> int:
        """Of all slots, used or not."""
        return byte_count(*self.tensors.values())

    @property
    def lengths(self) -> list[int] | None:
        """How many slots each set of each row has, where these lie one after the other, `[total, ...]`: `first` gives a
        padded copy then. None = all have equally many, side by side."""
        return None

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """The same on the device: where each set of each row begins, and how many slots it has, `[rows, sets]`."""
        return None

    def padded(self, name: str) -> Tensor:
        """One of `first`."""
        return self.tensors[name]

    def first(self, held: int | None = None) -> States:
        """The first `held` slots, or all: views, where there may be any."""
        if held is None:
            return self.tensors
        return {name: column[:, :, :held] for name, column in self.tensors.items()}

    def at(self, slots: Tensor) -> States:
        """What lies in these slots, `[rows, sets, n, ...]` each."""
        return {name: self.tensors[name].gather(2, index) for name, index in self.index(slots, self.tensors).items()}

    def noted(self, keys: Tensor, empty: int = 0, visible: Tensor | None = None) -> Tensor | None:
        """See `Store.noted`; where the columns are keys and values."""
        return None

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def append(self, start: int, new: States) -> None:
        """Write new tokens, `[rows, sets, n, ...]` of each of these columns, to the slots from `start` on."""
        for name, states in new.items():
            self.tensors[name].narrow(2, start, states.shape[2]).copy_(states)

    def overwrite(self, slots: Tensor, new: States, where: Tensor | None = None) -> None:
        """Write tokens to the slots `[rows, 1 or sets, n]`, one each; `where` `[rows, 1 or sets, n]` bool, False for
        those that stay away, None = all come."""
        self.put(self.index(slots, new).items(), new, where)

    def index(self, slots: Tensor, names: Iterable[str]) -> States:
        """Where the slots `[rows, 1 or sets, n]` of these columns lie, for `put`; `n` in dimension 2."""
        index: dict[str, Tensor] = {}  # compiled code may come here
        shape, places = None, slots
        for name in names:
            column = self.tensors[name]
            if column.shape != shape:
                shape, places = column.shape, slot_index(slots, column)
            index[name] = places
        return index

    def put(self, index: Iterable[tuple[str, Tensor]], new: States, where: Tensor | None = None) -> None:
        """As `overwrite`, to slots whose `index` is known, of the columns that it has."""
        for name, places in index:
            column, states = self.tensors[name], new[name]
            if where is not None:
                comes = where[:, : column.shape[1]]
                states = torch.where(comes if column.ndim == 3 else comes[..., None], states, column.gather(2, places))
            column.scatter_(2, places, states)

    def write(self, slot: Tensor, new: States) -> None:
        """As `overwrite`, to the slot `[rows, 1 or sets]`, for compiled code."""
        for name, states in new.items():
            column = self.tensors[name]
            rows, sets = column.shape[:2]
            row, one = torch.arange(rows, device=column.device)[:, None], torch.arange(sets, device=column.device)
            # Not scatter_, for which inductor copies the whole column.
            column.index_put_((row, one, slot), states.detach().to(column.dtype)[:, :, 0])

    def take(self, sources: States, kept_indices: Tensor, views: bool, limits: Tensor | None = None) -> None:
        """Take over the chosen tokens of these sources, and drop all others.

        Args:
            sources: `[rows, sets, n, ...]` for each column, by name.
            kept_indices: `[rows, 1 or sets, slots]` int64 along `n`, the tokens that stay.
            views: whether sources are views of these columns, so that other tensors are needed.
            limits: `[rows, 1 or sets]`, how many slots each set may use; None = all.
        """
        anew = views or kept_indices.shape[-1] != self.shape[2]
        new = self.room.like(self.tensors, kept_indices.shape[-1]) if anew else self.tensors
        index = None
        for name, source in sources.items():
            if index is None or index.shape != new[name].shape:
                index = slot_index(kept_indices, source)
            torch.gather(source, 2, index, out=new[name])
        self.use(new)

    def reorder(self, order: Tensor) -> None:
        """Bring the first slots into another order, `[rows, 1 or sets, held]`."""
        for column in self.tensors.values():
            column[:, :, : order.shape[-1]] = gather_slots(column, order)

    # ---- rows and room --------------------------------------------------------------------------------------------

    def use(self, new: States) -> None:
        """Let these be the columns; those that were and are no more go back to where they came from."""
        if self.room.pool is not None:
            self.room.give([old for old in self.tensors.values() if all(old is not column for column in new.values())])
        self._lay(new)

    def _lay(self, new: States) -> None:
        self.tensors, self.layout = dict(new), object()

    def resize(self, slots: int, held: int) -> None:
        """Have another number of slots; the tokens in the first `held` ones stay in theirs."""
        old, new = self.first(held), self.room.like(self.tensors, slots)
        for name, states in old.items():
            new[name][:, :, :held] = states
        self.use(new)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0. As many rows as before (beams) stay where compiled code finds them."""
        new = {name: change(column) for name, column in self.tensors.items()}
        if self.room.fixed and all(column.shape == self.tensors[name].shape for name, column in new.items()):
            for name, column in new.items():
                self.tensors[name].copy_(column)
        else:
            self.use({name: self.room.own(column) for name, column in new.items()})

    def widen(self, names: Iterable[str], dtype: torch.dtype) -> None:
        """Hold these columns in another type, which holds each of their numbers as it is."""
        old = {name: self.tensors[name] for name in names}
        wider = {name: self.room.make(states.shape, dtype, states.device).copy_(states) for name, states in old.items()}
        self._lay({**self.tensors, **wider})
        self.room.give([*old.values()])

    def zero(self) -> None:
        """Let all slots hold zeros."""
        for column in self.tensors.values():
            column.zero_()

    def move_to(self, device: torch.device | str) -> None:
        """To another device; those of a pool are not given back."""
        self._lay({name: column.to(device, non_blocking=True) for name, column in self.tensors.items()})

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """The first `held` slots, or all as they lie and the `lengths` `[rows, sets]` int64."""
        return dict(self.first(held))

    def load_state(self, saved: SavedState, held: int) -> None:
        """Hold what `state_dict` gave of columns of this shape.

        Raises:
            ValueError: it does not fit.
        """
        for name, column in self.tensors.items():
            shape = (*column.shape[:2], held, *column.shape[3:])
            column[:, :, :held] = saved.checked(name, shape, column.dtype)
