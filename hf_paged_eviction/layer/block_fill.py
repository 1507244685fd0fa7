"""The fast path for single tokens: until a block is full, nothing has to be decided."""

from torch import Tensor

from ..masks.padding import Padding
from .exposed import ExposedStates
from .layer_state import LayerState


class BlockFill:
    """Writes single tokens to slots that are computed when the first token of their block comes.

    It is valid until victims are due again, as long as rows, slots and storage do not change.

    Attributes:
        table: table of the layer.

    Args:
        state: state of the layer, whose next token overwrites another.
        keys, values: the next single token, `[B, H, 1, dim]`, as the store keeps it; all others are like it.
        padding: the pads of the batch.
        exposed: tensors of the store that the user has, which have to be checked.
    """

    def __init__(
        self, state: LayerState, keys: Tensor, values: Tensor, padding: Padding, exposed: ExposedStates
    ) -> None:
        self.table, columns = state.known, state.store.columns
        self._state, self._padding, self._exposed = state, padding, exposed
        self._phase, self._choice, self._layout = self.table.phase, self.table.choice, columns.layout
        self._like = keys.shape, values.shape, keys.dtype, keys.dtype, keys.device, keys.device
        self._first = self.table.seen
        self._read = "rerotated" if state.store.turns else "keys"
        index = columns.index(self.table.next_slots(self.table.tokens_until_due), columns.tensors)
        split = list[tuple[Tensor, ...]]()
        before = None
        for places in index.values():
            split.append(split[-1] if places is before else places.unsafe_split(1, 2))
            before = places
        self._index = [[*zip(index, places, strict=True)] for places in zip(*split, strict=True)]

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write a token, and count it in the table.

        Returns:
            The columns that attention reads; None if the token differs in kind from the first one, or if something has
            to be decided.
        """
        state, table, columns = self._state, self.table, self._state.store.columns
        seen = table.counters.seen
        at = seen - self._first
        if (
            state.table is not table
            or state.pending is not None
            or not 0 <= at < len(self._index)
            or table.choice is not self._choice
            or table.phase is not self._phase
            or columns.layout is not self._layout
            or (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device) != self._like
            or keys.requires_grad
            or values.requires_grad
            or seen < self._padding.all_real_from
            or self._exposed.states
        ):
            return None
        columns.put(self._index[at], {"keys": keys, "values": values, "rerotated": keys})
        table.counters.seen, table.counters.in_arrival_order = seen + 1, False
        return columns.tensors[self._read], columns.tensors["values"]
