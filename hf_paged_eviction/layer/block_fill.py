"""The fast path for single tokens: until a block is full, nothing has to be decided."""

import torch
from torch import Tensor

from ..masks.padding import Padding
from ..store.columns import Columns
from ..store.store import Store
from ..table.table import BlockTable
from .exposed import ExposedStates


class BlockFill:
    """Writes single tokens to slots that are computed when the first token of their block comes.

    It is valid until victims are due again, as long as rows, slots and storage do not change.

    Args:
        table, store: of the layer, whose next token overwrites another.
        padding: the pads of the batch.
        exposed: tensors of the store that the user has, which have to be checked.
        slots: slots of the next tokens, of all layers that fill their blocks together.
        place: the layer among them.
    """

    def __init__(
        self,
        table: BlockTable,
        store: Store,
        padding: Padding,
        exposed: ExposedStates,
        slots: "SlotsOfTokens",
        place: int,
    ) -> None:
        self._table, self._columns, self._padding, self._exposed = table, store.columns, padding, exposed
        columns = store.columns
        self._slots, self._place, self._first = slots.by_token, place, table.counters.seen
        self._phase, self._choice, self._layout = table.phase, table.choice, columns.layout
        keys, values = columns.tensors["keys"], columns.tensors["values"]
        rows, heads, _ = columns.layout.shape(columns.tensors)
        self._shapes = torch.Size((rows, heads, 1, keys.shape[-1])), torch.Size((rows, heads, 1, values.shape[-1]))
        self._kind = keys.dtype, keys.device
        self._put = columns.layout.write
        self._read = "rerotated" if store.turns else "keys"

    def write(self, table: BlockTable | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write a token, `[B, H, 1, dim]`, and count it in the table, the present one of the layer.

        Returns:
            The columns that attention reads; None if the token differs in kind from those held, or if something has
            to be decided.
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
            or (keys.shape, values.shape) != self._shapes
            or (keys.dtype, keys.device) != self._kind
            or (values.dtype, values.device) != self._kind
            or keys.requires_grad
            or values.requires_grad
            or seen < self._padding.all_real_from
            or self._exposed.states
        ):
            return None
        tensors, place = columns.tensors, self._place
        for name, by_layer in self._slots[at]:
            self._put(tensors[name], by_layer[place], values if name == "values" else keys)
        counters.seen, counters.in_arrival_order = seen + 1, False
        return tensors[self._read], tensors["values"]


class SlotsOfTokens:
    """Where the next tokens of alike layers go.

    Attributes:
        by_token: for each token, by column, the index of the token's slot in each layer.

    Args:
        columns: keys and values of the first of the layers.
        rows: number of rows of each.
        slots: `[layers * B, S, n]`, for `n` tokens, with the rows of all layers, layer by layer.
    """

    def __init__(self, columns: Columns, rows: int, slots: Tensor) -> None:
        self.by_token: list[list[tuple[str, tuple[Tensor, ...]]]] = []
        if rows == slots.shape[1] == 1 and columns.layout.lengths is None:
            for of_layers in slots[:, 0].unbind(-1):
                self.by_token.append([*dict.fromkeys(columns.tensors, of_layers.split(1)).items()])
            return
        index = columns.layout.index(slots, columns.tensors)
        for token in range(slots.shape[-1]):
            of_token, before, views = [], None, ()
            for name, places in index.items():
                if places is not before:  # columns of one shape share their index
                    before, views = places, places.narrow(2, token, 1).split(rows)
                of_token.append((name, views))
            self.by_token.append(of_token)
