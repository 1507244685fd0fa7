"""Columns: tensors by name, with an entry per slot.

A column is a tensor `[rows, sets, slots, ...]`, such as keys, codes or statistics. `sets` is the number of KV heads, or
1 if all heads share the entries. Indices of slots are `[rows, 1 or sets, n]` int64; if they have more sets than the
column, the first ones are used.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention.in_place import Reader
from ..tensors.graphs import static
from ..tensors.parts import map_tensors, tensors_of
from ..tensors.saved import StateDict, in_range, restored
from .segments import Segments, States
from .tensors import byte_count

__all__ = ["Columns", "Dense", "States", "cat_rows", "gather_slots", "slot_index"]


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


def cat_rows(columns: Sequence[Tensor], slots: int, empty: int = 0) -> Tensor:
    """Columns `[rows, sets, n, ...]`, the rows of each behind those of the one before, filled up to so many slots."""
    if len(columns) == 1 and columns[0].shape[2] == slots:
        return columns[0]
    behind = [0, 0] * (columns[0].ndim - 3)
    missing = [slots - column.shape[2] for column in columns]
    parts = zip(columns, missing, strict=True)
    return torch.cat([pad(column, (*behind, 0, count), value=empty) if count else column for column, count in parts])


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
        return {
            name: columns[name].index_select(2, index) if index.ndim == 1 else columns[name].gather(2, index)
            for name, index in self.index(slots, columns).items()
        }

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

    def of_rows(self, rows: Tensor, columns: States) -> "tuple[Dense, States]":
        """Rows `[n]` int64 alone, for reading: their layout and their columns."""
        return self, {name: column[rows] for name, column in columns.items()}


class Columns:
    """Columns by name, with the same slots. They are written in place.

    A column is replaced only when the number of rows or slots changes, so it keeps its address for compiled code.

    Attributes:
        tensors: the columns by name; none before the first tokens.
        layout: where slots lie; another object whenever `tensors` are replaced.
        beside: a dataclass of further tensors, with rows in dimension 0; None = there is none.
        decoders: what decodes these tensors, by a number of the coder's; it may hold them, and not these columns.
        reader: attention to all slots of these tensors as they lie, see `in_place.Reader`; None = it was not made yet.
        fixed: tensors keep their addresses, for compiled steps.
        zeroed: tensors start with zeros, as fixed ones do. This is necessary if hidden slots are read, because
            attention computes 0 x value for them, which must not be nan.
        ragged: whether sets may have different numbers of slots, see `take`.

    Args:
        fixed, zeroed, ragged: see above.
    """

    def __init__(self, fixed: bool = False, zeroed: bool = False, ragged: bool = False) -> None:
        self.fixed, self.zeroed, self.ragged = fixed, zeroed or fixed, ragged
        self.reader: Reader | None
        self.decoders: dict[int, Any]
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

    def of_rows(self, rows: Tensor) -> "Columns":
        """Rows `[n]` int64 alone, for reading."""
        part, (layout, tensors) = copy(self), self.layout.of_rows(rows, self.tensors)
        part.use(tensors, layout, map_tensors(lambda part: part[rows], self.beside))
        return part

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
        layout: Dense | Segments = Dense()
        if self.ragged:
            if limits is None:
                raise ValueError("Ragged columns are for layers whose rows or heads have limits of their own.")
            rows, sets = next(iter(sources.values())).shape[:2]
            layout = segments = Segments(limits.expand(rows, sets), kept_indices.device, count)
            new = self.like(sources, count, segments.total)
        elif views or count != self.layout.shape(new)[2]:
            new = self.like(sources, count)
        layout.take(sources, kept_indices, new)
        self.use(new, layout, self.beside)

    def reorder(self, order: Tensor) -> None:
        """Reorder the first slots by `order` `[rows, 1 or sets, held]`."""
        self.layout.reorder(self.tensors, order)

    # ---- new tensors ----------------------------------------------------------------------------------------------

    def make(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a tensor that may be written to inside and outside of `torch.inference_mode`."""
        with torch.inference_mode(False):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
            tensor = tensor.zero_() if self.zeroed else tensor
        return static(tensor) if self.fixed else tensor

    def like(self, states: States, slots: int, total: int | None = None) -> dict[str, Tensor]:
        """Make a tensor for each of these `[rows, sets, n, ...]`, with another number of slots; `total`: `[total,
        ...]`."""
        tensors = {}
        for name, state in states.items():
            shape = (*state.shape[:2], slots) if total is None else (total,)
            tensors[name] = self.make((*shape, *state.shape[3:]), state.dtype, state.device)
        return tensors

    # ---- rows and sizes --------------------------------------------------------------------------------------------

    def use(self, new: States, layout: Dense | Segments | None = None, beside: Any = None) -> None:
        """Replace the columns; None = they are dense, and nothing is beside."""
        self.tensors, self.layout, self.beside = dict(new), layout or Dense(), beside
        self.reader, self.decoders = None, _Decoders()

    def resize(self, slots: int, held: int) -> None:
        """Change the number of slots. Tokens in the first `held` slots keep their slots."""
        old, new = self.first(held), self.like(self.tensors, slots)
        for name, states in old.items():
            new[name][:, :, :held] = states
        self.use(new, None, self.beside)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0. If the number of rows does not change (beams), fixed tensors keep their
        addresses."""
        layout, moved = self.layout.rows_of(change)
        columns = {name: moved(column) for name, column in self.tensors.items()}
        beside = map_tensors(change, self.beside)
        if self.fixed:
            old, new = tensors_of((self.tensors, self.beside)), tensors_of((columns, beside))
            if layout.lengths is None and [part.shape for part in old] == [part.shape for part in new]:
                for part, moved_part in zip(old, new, strict=True):
                    part.copy_(moved_part)
                return
            columns, beside = map_tensors(static, (columns, beside))
        self.use(columns, layout, beside)

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

    def load_state(self, saved: StateDict, held: int) -> None:
        """Restore what `state_dict` of columns with these names, rows and sets returned.

        Raises:
            ValueError: the state does not fit.
        """
        if (lengths := saved["lengths"]) is not None:
            layout = Segments(in_range("lengths", lengths, 1, held), lengths.device, held)
            self.use(self.like(self.tensors, 0, layout.total), layout, self.beside)
        for part, there in (dict(self.layout.stored(self.tensors, held)), saved), (self.beside, saved["beside"]):
            map_tensors(Tensor.copy_, part, restored(part, there))


class _Decoders(dict[int, Any]):
    """What decodes the tensors of some columns, see `Columns.decoders`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A deep copy has tensors of its own, and these hold addresses: it has none until it makes its own."""
        return _Decoders, ()


def _beside(where: Tensor, states: Tensor) -> Tensor:
    """`where` `[rows, 1 or sets, n]`, for states `[rows, sets, n, ...]`."""
    where = where[:, : states.shape[1]]
    return where if states.ndim == 3 else where[..., None]
