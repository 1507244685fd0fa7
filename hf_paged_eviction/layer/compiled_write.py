"""The part of a static layer in a compiled step."""

from torch import Tensor

from ..static.next_slots import NextSlots
from ..static.ring import QueryRing
from .layer_state import LayerState


class CompiledWrite:
    """Takes a single token of one layer in a compiled step. `write` is part of the graph and only writes; `written`
    does the host's work between the steps, see `static_steps`.

    The steps hold this object. It knows nothing of them except the slots of the next token.

    Attributes:
        own_mask: see below.
        next_slots: slots of the next token, for all layers of its run; None before the first step.
        ring: stores the queries of compiled steps; None if the policy needs no queries.

    Args:
        state: state of the layer.
        queries: whether the policy needs queries.
        own_mask: whether the model's mask does not fit the layer.
    """

    def __init__(self, state: LayerState, queries: bool, own_mask: bool) -> None:
        self.own_mask = own_mask
        self.next_slots: NextSlots | None = None
        self._first_row = self._end_row = 0  # of this layer among those of the run
        self.ring = QueryRing() if queries else None
        self._state = state

    def join(self, next_slots: NextSlots, index: int) -> None:
        """Take single tokens as layer `index` of a run."""
        rows = self._state.rows
        self.next_slots, self._first_row, self._end_row = next_slots, index * rows, (index + 1) * rows
        if self.ring is not None:
            self.ring.make(rows, self._state.budget.now.block_size)

    # ---- within a step --------------------------------------------------------------------------------------------

    def write(self, layer_idx: int, keys: Tensor, values: Tensor, kv_unchanged: bool) -> tuple[Tensor, Tensor]:
        """Take in a single token, `[B, H, 1, dim]`; returns keys and values for attention.

        Args:
            layer_idx: index of the layer, for messages.
            kv_unchanged: see `KeyOwner`.

        Raises:
            RuntimeError: the step was not prepared. ValueError: the number of rows has changed.
        """
        state, next_slots, first, end = self._state, self.next_slots, self._first_row, self._end_row
        if state.recorder is not None:
            if state.recorder.expects:
                raise state.recorder.untold(layer_idx)
            state.recorder.expects = True
        if next_slots is None or keys.shape[0] != end - first:
            state.known.check_rows(keys.shape[0])
            raise RuntimeError(f"Layer {layer_idx} was left out of the forward before this one.")
        slots = next_slots.slots[first:end]
        state.store.write(slots[:, :, 0], keys, values)
        filling = None if next_slots.filling is None else next_slots.filling[first:end]
        carrier = state.store.carrier(keys, None, lambda: filling) if kv_unchanged and not keys.requires_grad else None
        return state.store.shown() if carrier is None else (carrier, values)

    def mask(self) -> Tensor | None:
        """The slots that the token of this step sees, `[B, 1 or kv_heads, 1, slots]` bool; None = all."""
        visible = None if self.next_slots is None else self.next_slots.visible
        return None if visible is None else visible[self._first_row : self._end_row, :, None]

    # ---- between the steps ----------------------------------------------------------------------------------------

    def written(self) -> None:
        """Called after the host has counted a token that a graph has written."""
        state, store, recorder = self._state, self._state.store, self._state.recorder
        state.seen += 1
        if recorder is not None and self.ring is not None:
            table = state.known
            recorder.prepare(table, 1, None)
            held = table.held if table.may_fill_block or not store.rounds else 0  # reading would decode all tokens
            recorder.observe_step(table, self.ring.take(table.seen, store.shown(held)[0]))
        if store.rounds:
            store.wrote()
