"""Columns: tensors with an entry per slot.

A column is a tensor `[rows, sets, slots, ...]`, such as keys, codes or statistics. `sets` is the number of KV heads, or
1 if all heads share the entries. Indices of slots are `[rows, 1 or sets, n]` int64; if they have more sets than the
column, the first ones are used.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..saved import SavedState, StateDict
from .room import Room
from .tensors import byte_count

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


def padded_shape(columns: States) -> tuple[int, int, int]:
    """Number of rows, sets and slots of columns `[B, S, slots, ...]`."""
    rows, sets, slots = next(iter(columns.values())).shape[:3]
    return rows, sets, slots


def no_mask() -> None:
    """None, for a layer that needs no mask of its own."""


class Columns:
    """Columns by name, with the same slots. They are written in place.

    A column is replaced only when the number of rows or slots changes, so it keeps its address for compiled code.

    Attributes:
        pads: whether all sets have the same number of slots, even if some may use fewer.
        tensors: the columns by name; none before the first tokens.
        layout: an object that changes whenever `tensors` are replaced.
        room: makes the tensors.

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
        """Number of rows, sets and slots of the first column."""
        return padded_shape(self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of all slots, used or not."""
        return byte_count(*self.tensors.values())

    @property
    def lengths(self) -> list[int] | None:
        """Number of slots of each set of each row, if the columns are `[total, ...]`, one set after the other; `first`
        then returns a padded copy. None = all sets have the same number."""
        return None

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """First slot and number of slots of each set of each row, `[rows, sets]` each, on the device."""
        return None

    def padded(self, name: str) -> Tensor:
        """One column of `first`."""
        return self.tensors[name]

    def first(self, held: int | None = None) -> States:
        """The first `held` slots, or all; views if possible."""
        if held is None:
            return self.tensors
        return {name: column[:, :, :held] for name, column in self.tensors.items()}

    def at(self, slots: Tensor) -> States:
        """Read these slots, `[rows, sets, n, ...]` of each column."""
        return {name: self.tensors[name].gather(2, index) for name, index in self.index(slots, self.tensors).items()}

    def carrier(
        self, keys: Tensor, held: int | None = None, visible: Callable[[], Tensor | None] = no_mask
    ) -> Tensor | None:
        """See `Store.carrier`; for columns that are keys and values."""
        return None

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def append(self, start: int, new: States) -> None:
        """Write new tokens, `[rows, sets, n, ...]` for each column, to the slots from `start` on."""
        for name, states in new.items():
            self.tensors[name].narrow(2, start, states.shape[2]).copy_(states)

    def overwrite(self, slots: Tensor, new: States, where: Tensor | None = None) -> None:
        """Write one token to each of the slots `[rows, 1 or sets, n]`; `where` `[rows, 1 or sets, n]` bool, False = do
        not write; None = write all."""
        for name, places in self.index(slots, new).items():
            self.put(name, places, new[name], where)

    def index(self, slots: Tensor, names: Iterable[str]) -> States:
        """The index of the slots `[rows, 1 or sets, n]` of these columns, for `put`; `n` is dimension 2."""
        index: dict[str, Tensor] = {}  # compiled code may run this
        shape, places = None, slots
        for name in names:
            column = self.tensors[name]
            if column.shape != shape:
                shape, places = column.shape, slot_index(slots, column)
            index[name] = places
        return index

    def put(self, name: str, places: Tensor, states: Tensor, where: Tensor | None = None) -> None:
        """Like `overwrite`, for one column, of which `index` returned the places."""
        column = self.tensors[name]
        if where is not None:
            comes = where[:, : column.shape[1]]
            states = torch.where(comes if column.ndim == 3 else comes[..., None], states, column.gather(2, places))
        column.scatter_(2, places, states)

    def write(self, slot: Tensor, new: States) -> None:
        """Like `overwrite`, for one slot `[rows, 1 or sets]` and states of any dtype, perhaps in compiled code."""
        new = {name: states.detach().to(self.tensors[name].dtype) for name, states in new.items()}
        if torch.compiler.is_compiling():
            self._write_compiled(slot, new)
        else:
            self.overwrite(slot[..., None], new)

    def _write_compiled(self, slot: Tensor, new: States) -> None:
        for name, states in new.items():
            column = self.tensors[name]
            rows, sets = column.shape[:2]
            row, one = torch.arange(rows, device=column.device)[:, None], torch.arange(sets, device=column.device)
            # Not scatter_, for which inductor copies the whole column.
            column.index_put_((row, one, slot), states[:, :, 0])

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
        """Reorder the first slots by `order` `[rows, 1 or sets, held]`."""
        for column in self.tensors.values():
            column[:, :, : order.shape[-1]] = gather_slots(column, order)

    # ---- rows and room --------------------------------------------------------------------------------------------

    def use(self, new: States) -> None:
        """Replace the columns."""
        self._lay(new)

    def _lay(self, new: States) -> None:
        self.tensors, self.layout = dict(new), object()

    def resize(self, slots: int, held: int) -> None:
        """Change the number of slots. Tokens in the first `held` slots keep their slots."""
        old, new = self.first(held), self.room.like(self.tensors, slots)
        for name, states in old.items():
            new[name][:, :, :held] = states
        self.use(new)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0. If the number of rows does not change (beams), the tensors keep their
        addresses."""
        new = {name: change(column) for name, column in self.tensors.items()}
        if self.room.fixed and all(column.shape == self.tensors[name].shape for name, column in new.items()):
            for name, column in new.items():
                self.tensors[name].copy_(column)
        else:
            self.use({name: self.room.own(column) for name, column in new.items()})

    def widen(self, names: Iterable[str], dtype: torch.dtype) -> None:
        """Convert these columns to a wider dtype."""
        old = {name: self.tensors[name] for name in names}
        wider = {name: self.room.make(states.shape, dtype, states.device).copy_(states) for name, states in old.items()}
        self._lay({**self.tensors, **wider})

    def zero(self) -> None:
        """Fill all slots with zeros."""
        for column in self.tensors.values():
            column.zero_()

    def move_to(self, device: torch.device | str) -> None:
        """Move to another device."""
        self._lay({name: column.to(device, non_blocking=True) for name, column in self.tensors.items()})

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """The first `held` slots; or, with lengths, all slots and the `lengths` `[rows, sets]` int64."""
        return dict(self.first(held))

    def load_state(self, saved: SavedState, held: int) -> None:
        """Restore what `state_dict` of columns of this shape returned.

        Raises:
            ValueError: the state does not fit.
        """
        for name, column in self.tensors.items():
            shape = (*column.shape[:2], held, *column.shape[3:])
            column[:, :, :held] = saved.checked(name, shape, column.dtype)
