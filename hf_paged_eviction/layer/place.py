"""A layer of a static cache among those that take compiled steps together."""

from torch import Tensor

from ..static.ring import QueryRing
from ..static.steps import NextSlots
from .layer_state import LayerState
from .rollback import Rollback
from .scores import Scores


class Place:
    """How one layer takes a single token in a compiled step: `write` is in the graph and only writes, `written` does
    between the steps what the host has to do, see `static.steps`.

    The steps hold the place; it knows nothing of them but where the next token goes.

    Attributes:
        own_mask: see below.
        given: where the layers of its run write the next token; None before the first step.
        ring: where compiled steps leave their queries; None where nobody asks for them.

    Args:
        state, scores, rollback: of the layer.
        queries: whether the policy asks for queries.
        own_mask: whether the model's mask does not fit the layer.
    """

    def __init__(self, state: LayerState, scores: Scores, rollback: Rollback, queries: bool, own_mask: bool) -> None:
        self.own_mask = own_mask
        self.given: NextSlots | None = None
        self._first_row = self._end_row = 0  # of this layer among those of the run
        self.ring = QueryRing() if queries else None
        self._state, self._scores, self._rollback = state, scores, rollback

    def join(self, given: NextSlots, index: int) -> None:
        """Take single tokens as layer `index` of a run."""
        rows = self._state.rows
        self.given, self._first_row, self._end_row = given, index * rows, (index + 1) * rows
        if self.ring is not None:
            self.ring.make(rows, self._state.quota.budget.block_size)

    @property
    def joined(self) -> bool:
        """Whether the layer takes single tokens in a run."""
        return self.given is not None

    # ---- within a step --------------------------------------------------------------------------------------------

    def write(self, layer_idx: int, keys: Tensor, values: Tensor, as_given: bool) -> tuple[Tensor, Tensor]:
        """Take in a single token, `[B, H, 1, dim]`; returns all that attention gets.

        Args:
            layer_idx: of the layer, for messages.
            as_given: see `KeyOwner`.

        Raises:
            RuntimeError: the step was not prepared. ValueError: another number of rows than are held.
        """
        state, given, first, end = self._state, self.given, self._first_row, self._end_row
        if state.listener is not None:
            if state.listener.expects:
                raise state.listener.untold(layer_idx)
            state.listener.expects = True
        if given is None or keys.shape[0] != end - first:
            state.known.check_rows(keys.shape[0])
            raise RuntimeError(f"Layer {layer_idx} was left out of the forward before this one.")
        slots = given.slots[first:end]
        state.store.write(slots[:, :, 0], keys, values)
        if state.marks is not None:
            state.marks.arrived(keys)
            state.marks.overwrite(slots)
        filling = None if given.filling is None else given.filling[first:end]
        noted = state.store.noted(keys, 0, filling) if as_given and not keys.requires_grad else None
        return state.store.shown() if noted is None else (noted, values)

    def mask(self) -> Tensor | None:
        """What the token of this step may attend to of all slots, `[B, 1 or kv_heads, 1, slots]` bool; None = all."""
        visible = None if self.given is None else self.given.visible
        return None if visible is None else visible[self._first_row : self._end_row, :, None]

    # ---- between the steps ----------------------------------------------------------------------------------------

    def sort_pads(self) -> bool:
        """See `Rollback.sort_pads`."""
        return self._rollback.sort_pads()

    def written(self) -> None:
        """The host has counted a token that a graph has written."""
        state, store, listener = self._state, self._state.store, self._state.listener
        state.seen += 1
        if listener is not None and self.ring is not None:
            table = state.known
            listener.prepare(table, 1, None)
            held = table.held if table.may_fill_block or not store.rounds else 0  # to read is to decode
            listener.observe_step(table, self.ring.take(table.seen, store.shown(held)[0]))
        if store.rounds:
            store.wrote()
            self._scores.encode_block()
