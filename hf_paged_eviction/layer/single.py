"""Where single tokens are written: until a block is full, nothing has to be decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..masks.padding import Padding
from ..store.columns import Columns, Dense
from ..store.exact import Exact
from ..store.segments import Segments
from ..store.store import Store, no_mask
from ..table.table import BlockTable
from .exposed import ExposedStates


class BlockFill:
    """Writes single tokens of a layer to slots that are computed when the first token of their block comes: those of a
    victim, or the next free ones.

    It is valid until victims are due again, or the last free slot is next, as long as rows, slots and storage do not
    change.

    Attributes:
        as_it_lies: whether attention may read what `write` returns, if it left the tokens of the last forward
            unchanged; else it reads what `Store.shown` returns.

    Args:
        table, store: of the layer.
        padding: the pads of the batch.
        exposed: tensors of the store that the user has, which have to be checked.
        own_mask: whether the model's mask does not fit the layer.
    """

    def __init__(
        self, table: BlockTable, store: Store, padding: Padding, exposed: ExposedStates, own_mask: bool
    ) -> None:
        self._table, self._columns, self._padding, self._exposed = table, store.columns, padding, exposed
        columns, lengths = store.columns, store.columns.layout.lengths
        self._phase, self._layout = table.phase, columns.layout
        self._store, self._rounds, self._own_mask = store, store.rounds, own_mask
        states = vars(columns.beside) if store.rounds else columns.tensors
        keys, values = states["keys"], states["values"]
        rows, heads, _ = columns.layout.shape(columns.tensors)
        shapes = torch.Size((rows, heads, 1, keys.shape[-1])), torch.Size((rows, heads, 1, values.shape[-1]))
        self._kind = *shapes, keys.dtype, keys.dtype, keys.device, keys.device
        self._read = "rerotated" if store.turns else "keys"
        self._alias = own_mask and lengths is None  # attention attaches a mask to keys, which must not stay there
        self._coder, self._carries, self._grows = store.coder, False, not table.full
        self._shown: Tensor | None = None
        self.as_it_lies = lengths is None and not store.rounds
        # What an earlier reader shows is not known.
        self._visible: Sequence[Tensor] | None = None if self.as_it_lies else ()

    def begin(self, slots: "SlotsOfTokens | PlacesOfTokens", place: int) -> None:
        """Tokens go to these slots from now on; `place`: the layer among those of `slots`."""
        self._slots, self._place, self._put, self._dim = slots.by_token, place, slots.put, slots.dim
        self._places = slots.places
        table, columns = self._table, self._columns
        self._first, self._choice = table.counters.seen, table.choice
        if self.as_it_lies and self._visible is None:
            return
        hides, like = self._own_mask and not table.all_used, next(iter(columns.tensors.values()))
        if self._grows:
            # Where some slots hold pads, every token has a mask of its own.
            may = not self._own_mask or table.all_real
            columns.reader = self._coder.reader(columns, like, table.held + 1, no_mask) if may else None
            self.as_it_lies = self._carries = hasattr(columns.reader, "hold")
            return
        if columns.reader is None or hides or self._visible is not None:
            # After each token one slot more holds a token, in heads that have room left.
            self._visible = table.used_after(len(self._slots)).unbind() if hides else None
            self._shown = None if self._visible is None else self._visible[0].clone()
            columns.reader = self._coder.reader(columns, like, None, lambda: self._shown)
        self.as_it_lies = self._carries = columns.reader is not None

    def write(self, table: BlockTable | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write a token, `[B, H, 1, dim]`, and count it in the table, the present one of the layer.

        Returns:
            What attention reads if `as_it_lies`, else anything; None if the token differs in kind from those held, or
            if something has to be decided.
        """
        columns, counters = self._columns, self._table.counters
        seen = counters.seen
        at = seen - self._first
        if (
            table is not self._table
            or not 0 <= at < len(self._slots)
            or table.choice is not self._choice
            or table.phase is not self._phase
            or columns.layout is not self._layout
            or (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device) != self._kind
            or keys.requires_grad
            or values.requires_grad
            or seen < self._padding.all_real_from
            or self._exposed.states
            or (self._rounds and self._store.uncoded >= self._store.due)
        ):
            return None
        tensors, place, put, dim = columns.tensors, self._place, self._put, self._dim
        if self._rounds:  # the next `encode` makes codes of it
            tensors, exact = vars(columns.beside), columns.beside
            exact.slots.copy_(self._places[at][place])
            exact.count.add_(1)
            self._store.uncoded += 1
        new = (keys, values) if dim else (keys.flatten(0, 2), values.flatten(0, 2))
        for name, by_layer in self._slots[at]:
            put(tensors[name], dim, by_layer[place], new[name == "values"])
        counters.seen = seen + 1
        if self._grows:
            counters.held += 1
        else:
            counters.in_arrival_order = False
        if self._carries:
            if self._grows:
                columns.reader.hold(counters.held)  # type: ignore[union-attr]
            elif self._shown is not None and self._visible is not None:
                self._shown.copy_(self._visible[at])
            carrier = keys[:, :, :0]
            carrier.reader = columns.reader  # type: ignore[attr-defined]
            return carrier, values
        read, held = tensors[self._read], tensors["values"]
        if self._grows or self._alias:
            return read[:, :, : counters.held], held[:, :, : counters.held]
        return read, held


class SlotsOfTokens:
    """Where the next tokens of layers go that fill their blocks together.

    Attributes:
        by_token: for each token, by column, the index of the token's slot in each layer.
        put, dim: the method of a column that writes there, and its dimension; 0 = columns are segments.
        places: empty, see `PlacesOfTokens`.

    Args:
        columns: keys and values of the first of the layers.
        layout: where the slots of all of them lie.
        rows: number of rows of each.
        slots: `[layers * B, S, n]`, for `n` tokens, with the rows of all layers, layer by layer.
        layers: number of layers, if all of them, and their rows, have the same `slots` `[1, 1, n]`.
    """

    places: Sequence[tuple[Tensor, ...]] = ()

    def __init__(
        self, columns: Columns, layout: Dense | Segments, rows: int, slots: Tensor, layers: int | None = None
    ) -> None:
        self.by_token: list[list[tuple[str, tuple[Tensor, ...]]]] = []
        self.put: Callable[..., Tensor] = Tensor.index_copy_
        self.dim = 2 if layout.lengths is None else 0
        if layers is not None or (rows == slots.shape[1] == 1 and layout.lengths is None):
            for of_layers in slots[:, 0].unbind(-1):
                views = of_layers.split(1) * (layers or 1)
                self.by_token.append([*dict.fromkeys(columns.tensors, views).items()])
            return
        index = layout.index(slots, columns.tensors)
        if layout.lengths is not None:  # one index of all heads
            places = next(iter(index.values())).movedim(-1, 0).flatten(1)
            for of_layers in places.unbind(0):
                views = of_layers.split(places.shape[1] * rows // len(slots))
                self.by_token.append([*dict.fromkeys(columns.tensors, views).items()])
            return
        self.put = Tensor.scatter_
        for token in range(slots.shape[-1]):
            of_token, before, views = [], None, ()
            for name, places in index.items():
                if places is not before:  # columns of one shape share their index
                    before, views = places, places.narrow(2, token, 1).split(rows)
                of_token.append((name, views))
            self.by_token.append(of_token)


class PlacesOfTokens:
    """As `SlotsOfTokens`, of tokens that wait for their codes: their places among the tokens that are not rounded.

    Attributes:
        by_token, put, dim: see `SlotsOfTokens`.
        places: for each token, what `Exact.slots` of each layer is when it has come.

    Args:
        of_layers: those of each layer.
        rows, slots: see `SlotsOfTokens`.
    """

    def __init__(self, of_layers: Sequence[Exact], rows: int, slots: Tensor) -> None:
        exact = of_layers[0]
        count, held = torch.cat([one.count for one in of_layers]), torch.cat([one.slots for one in of_layers])
        places, after = replace(exact, count=count, slots=held).upcoming(slots)
        self.places = [of_token.split(rows) for of_token in after.movedim(2, 0).contiguous().unbind(0)]
        self.by_token: list[list[tuple[str, tuple[Tensor, ...]]]] = []
        self.put, self.dim = Tensor.index_copy_ if rows == 1 else Tensor.scatter_, 2
        for of_token in places.mT.contiguous().unbind(0):
            if rows == 1:
                views = of_token.split(1)
                self.by_token.append([("keys", views), ("values", views)])
                continue
            index = [
                (name, of_token[:, None, None, None].expand(-1, states.shape[1], 1, states.shape[3]).split(rows))
                for name, states in (("keys", exact.keys), ("values", exact.values))
            ]
            self.by_token.append(index)


@dataclass(eq=False)
class NextSlots:
    """The slots of the next token in compiled steps, for the layers of a group; tensors at fixed addresses.

    Attributes:
        slots: `[layers * B, S, 1]` int64, with the rows of all layers, layer by layer.
        visible: `[layers * B, S, C]` bool, slots with real tokens; None if the model's mask is used, or if all slots
            hold real tokens.
        all_real: whether all usable slots hold real tokens, so that a step needs no mask. It is decided after a forward
            of several tokens and valid until the next one, because a graph has either a mask or none. Compiled code
            does not read it: that would add a guard.
        filling: `visible`; None also if all usable slots hold real tokens.
    """

    slots: Tensor
    visible: Tensor | None
    all_real: bool
    filling: Tensor | None
