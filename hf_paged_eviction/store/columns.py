"""Columns: tensors by name, with an entry per slot.

A column is a tensor `[rows, sets, slots, ...]`, such as keys, codes or statistics. `sets` is the number of KV heads, or
1 if all heads share the entries. Indices of slots are `[rows, 1 or sets, n]` int64; if they have more sets than the
column, the first ones are used.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..parts import map_tensors, tensors_of
from ..saved import SavedState, StateDict
from .layouts import Dense, Layout, Segments, States, gather_slots, slot_index
from .room import Room
from .tensors import byte_count

__all__ = ["Columns", "States", "gather_slots", "slot_index"]


class Columns:
    """Columns by name, with the same slots. They are written in place.

    A column is replaced only when the number of rows or slots changes, so it keeps its address for compiled code.

    Attributes:
        tensors: the columns by name; none before the first tokens.
        layout: where slots lie; another object whenever `tensors` are replaced.
        beside: a dataclass of further tensors, with rows in dimension 0, and `load_state`; None = there is none.
        room: makes the tensors.
        ragged: whether sets may have different numbers of slots, see `take`.

    Args:
        room, ragged: see above.
    """

    def __init__(self, room: Room, ragged: bool = False) -> None:
        self.room, self.ragged = room, ragged
        self.use({})

    # ---- what there is --------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of rows, sets and slots of the first column; of segments, the slots of a padded copy."""
        return self.layout.shape(self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of all slots, used or not, and of what is beside."""
        return byte_count(*self.tensors.values(), *tensors_of(self.beside))

    def first(self, held: int | None = None) -> States:
        """The first `held` slots, or all, `[rows, sets, held, ...]`; views, but a padded copy of segments."""
        return self.layout.first(self.tensors, held)

    def at(self, slots: Tensor) -> States:
        """Read these slots, `[rows, sets, n, ...]` of each column."""
        return self.layout.at(self.tensors, slots)

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def append(self, start: int, new: States) -> None:
        """Write new tokens, `[rows, sets, n, ...]` for each column, to the slots from `start` on."""
        for name, states in new.items():
            self.tensors[name].narrow(2, start, states.shape[2]).copy_(states)

    def overwrite(self, slots: Tensor, new: States, where: Tensor | None = None) -> None:
        """Write one token to each of the slots `[rows, 1 or sets, n]`; `where` `[rows, 1 or sets, n]` bool, False = do
        not write; None = write all."""
        layout = self.layout
        if where is not None:
            held = layout.at(self.tensors, slots)
            new = {name: torch.where(_beside(where, states), states, held[name]) for name, states in new.items()}
        for name, index in layout.index(slots, self.tensors).items():
            layout.write(self.tensors[name], index, new[name])

    def write(self, slot: Tensor, new: States) -> None:
        """Like `overwrite`, for one slot `[rows, 1 or sets]` and states of any dtype, perhaps in compiled code."""
        new = {name: states.detach().to(self.tensors[name].dtype) for name, states in new.items()}
        if not torch.compiler.is_compiling():
            self.overwrite(slot[..., None], new)
            return
        for name, states in new.items():
            self.layout.write_compiled(self.tensors[name], slot, states)

    def take(self, sources: States, kept_indices: Tensor, views: bool, limits: Tensor | None = None) -> None:
        """Take over the chosen tokens of these sources, and drop all others.

        Args:
            sources: `[rows, sets, n, ...]` for each column, by name.
            kept_indices: `[rows, 1 or sets, slots]` int64 along `n`, the tokens that stay.
            views: whether sources are views of these columns, so that other tensors are needed.
            limits: `[rows, 1 or sets]`, how many slots each set may use; ragged columns then have just these. None =
                all.
        """
        count, new = kept_indices.shape[-1], self.tensors
        layout: Layout = Dense()
        if self.ragged:
            if limits is None:
                raise ValueError("Ragged columns are for layers whose rows or heads have limits of their own.")
            rows, sets = next(iter(sources.values())).shape[:2]
            layout = segments = Segments(limits.expand(rows, sets), kept_indices.device, count)
            new = self.room.like(sources, count, segments.total)
        elif views or count != self.layout.shape(new)[2]:
            new = self.room.like(sources, count)
        layout.take(sources, kept_indices, new)
        self.use(new, layout, self.beside)

    def reorder(self, order: Tensor) -> None:
        """Reorder the first slots by `order` `[rows, 1 or sets, held]`."""
        self.layout.reorder(self.tensors, order)

    # ---- rows and room --------------------------------------------------------------------------------------------

    def use(self, new: States, layout: Layout | None = None, beside: Any = None) -> None:
        """Replace the columns; None = they are dense, and nothing is beside."""
        self.tensors, self.layout, self.beside = dict(new), layout or Dense(), beside

    def resize(self, slots: int, held: int) -> None:
        """Change the number of slots. Tokens in the first `held` slots keep their slots."""
        old, new = self.first(held), self.room.like(self.tensors, slots)
        for name, states in old.items():
            new[name][:, :, :held] = states
        self.use(new, None, self.beside)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0. If the number of rows does not change (beams), fixed tensors keep their
        addresses."""
        layout, moved = self.layout.rows_of(change)
        columns = {name: moved(column) for name, column in self.tensors.items()}
        beside = map_tensors(change, self.beside)
        if self.room.fixed:
            old, new = tensors_of((self.tensors, self.beside)), tensors_of((columns, beside))
            if layout.lengths is None and [part.shape for part in old] == [part.shape for part in new]:
                for part, moved_part in zip(old, new, strict=True):
                    part.copy_(moved_part)
                return
            columns, beside = map_tensors(self.room.own, (columns, beside))
        self.use(columns, layout, beside)

    def convert(self, kinds: States, beside: Any) -> None:
        """Convert to the dtypes of tensors like these, which are wider."""
        columns, beside = map_tensors(self._converted, (self.tensors, self.beside), (kinds, beside))
        self.use(columns, copy(self.layout), beside)

    def _converted(self, states: Tensor, kind: Tensor) -> Tensor:
        if states.dtype == kind.dtype:
            return states
        return self.room.make(states.shape, kind.dtype, states.device).copy_(states)

    def zero(self) -> None:
        """Fill everything with zeros."""
        for part in tensors_of((self.tensors, self.beside)):
            part.zero_()

    def move_to(self, device: torch.device | str) -> None:
        """Move to another device."""
        columns, beside = map_tensors(lambda part: part.to(device, non_blocking=True), (self.tensors, self.beside))
        self.use(columns, copy(self.layout), beside)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self, held: int) -> StateDict:
        """The first `held` slots, or all of segments and their `lengths` `[rows, sets]` int64; and what is beside."""
        bounds = self.layout.bounds
        lengths = None if bounds is None else bounds[1].cpu()
        return {**self.layout.stored(self.tensors, held), "lengths": lengths, "beside": self.beside}

    def load_state(self, saved: SavedState, held: int, beside: SavedState | None = None) -> None:
        """Restore what `state_dict` of columns with these names, rows and sets returned; `beside`: its part "beside".

        Raises:
            ValueError: the state does not fit.
        """
        if saved.has("lengths"):
            lengths = saved.checked("lengths", self.shape[:2], torch.int64, 1, held)
            layout = Segments(lengths, saved.device, held)
            self.use(self.room.like(self.tensors, 0, layout.total), layout, self.beside)
        for name, part in self.layout.stored(self.tensors, held).items():
            part.copy_(saved.checked(name, part.shape, part.dtype))
        if beside is not None:
            self.beside.load_state(beside, held)


def _beside(where: Tensor, states: Tensor) -> Tensor:
    """`where` `[rows, 1 or sets, n]`, for states `[rows, sets, n, ...]`."""
    where = where[:, : states.shape[1]]
    return where if states.ndim == 3 else where[..., None]
