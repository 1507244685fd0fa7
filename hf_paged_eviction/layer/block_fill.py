"""The fast path for single tokens: until a block is full, nothing has to be decided."""

from torch import Tensor

from ..masks.padding import Padding
from .layer_state import LayerState


class BlockFill:
    """Writes single tokens to slots that were computed when the first token of their block came.

    It is valid until victims are due again, as long as rows, slots and storage do not change.

    Attributes:
        table: table of the layer.

    Args:
        state: state of the layer, whose next token overwrites another.
        keys, values: the last single token, `[B, H, 1, dim]`, as the store keeps it.
        padding: the pads of the batch.
    """

    def __init__(self, state: LayerState, keys: Tensor, values: Tensor, padding: Padding) -> None:
        self.table, columns = state.known, state.store.columns
        self._state, self._padding = state, padding
        self._phase, self._choice, self._layout = self.table.phase, self.table.choice, columns.layout
        self._shapes, self._dtype = (keys.shape, values.shape), keys.dtype
        self._first = self.table.seen
        index = columns.index(self.table.next_slots(self.table.tokens_until_due), columns.tensors)
        split = list[tuple[Tensor, ...]]()
        before = None
        for places in index.values():
            split.append(split[-1] if places is before else places.unsafe_split(1, 2))
            before = places
        self._names, self._places = tuple(index), [*zip(*split, strict=True)]

    def write(self, keys: Tensor, values: Tensor) -> bool:
        """Write a token. Returns False if the token differs in kind from the last one, or if something has to be
        decided."""
        state, table, columns = self._state, self.table, self._state.store.columns
        seen = table.counters.seen
        at = seen - self._first
        if (
            state.table is not table
            or state.pending is not None
            or not 0 <= at < len(self._places)
            or table.choice is not self._choice
            or table.phase is not self._phase
            or columns.layout is not self._layout
            or (keys.shape, values.shape) != self._shapes
            or keys.dtype != self._dtype
            or values.dtype != self._dtype
            or keys.requires_grad
            or values.requires_grad
            or self._padding.may_be_pads(seen)
        ):
            return False
        index = zip(self._names, self._places[at], strict=True)
        columns.put(index, {"keys": keys, "values": values, "rerotated": keys})
        state.budget.scores = None
        table.overwritten(None)
        return True
