"""A layer of a static cache among those that take compiled steps together."""

from torch import Tensor

from ..static.ring import QueryRing
from ..static.steps import NextSlots
from .contents import Contents
from .scores import Scores
from .takeback import Takeback


class Place:
    """How one layer takes a single token in a compiled step: `write` is in the graph and only writes, `written` does
    between the steps what the host has to do, see `static.steps`.

    The steps hold the place; it knows nothing of them but where the next token goes.

    Attributes:
        given: where the layers of its run write the next token; None before the first step.
        ring: where compiled steps leave their queries; None where nobody asks for them.

    Args:
        contents, scores, takeback: of the layer.
        queries: whether the policy asks for queries.
    """

    def __init__(self, contents: Contents, scores: Scores, takeback: Takeback, queries: bool) -> None:
        self.given: NextSlots | None = None
        self._first_row = self._end_row = 0  # of this layer among those of the run
        self.ring = QueryRing() if queries else None
        self._contents, self._scores, self._takeback = contents, scores, takeback

    def join(self, given: NextSlots, index: int) -> None:
        """Take single tokens as layer `index` of a run."""
        rows = self._contents.rows
        self.given, self._first_row, self._end_row = given, index * rows, (index + 1) * rows
        if self.ring is not None:
            self.ring.make(rows, self._contents.quota.budget.block_size)

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
        contents, given, first, end = self._contents, self.given, self._first_row, self._end_row
        if contents.listener is not None:
            if contents.listener.expects:
                raise contents.listener.untold(layer_idx)
            contents.listener.expects = True
        if given is None or keys.shape[0] != end - first:
            contents.known.check_rows(keys.shape[0])
            raise RuntimeError(f"Layer {layer_idx} was left out of the forward before this one.")
        slots = given.slots[first:end]
        contents.store.write(slots[:, :, 0], keys, values)
        if contents.marks is not None:
            contents.marks.arrived(keys)
            contents.marks.overwrite(slots)
        noted = contents.store.noted(keys) if as_given and not keys.requires_grad else None
        return contents.store.shown() if noted is None else (noted, values)

    # ---- between the steps ----------------------------------------------------------------------------------------

    def sort_pads(self) -> bool:
        """See `Takeback.sort_pads`."""
        return self._takeback.sort_pads()

    def written(self) -> None:
        """The host has counted a token that a graph has written."""
        contents, store, listener = self._contents, self._contents.store, self._contents.listener
        contents.seen += 1
        if listener is not None and self.ring is not None:
            table = contents.known
            listener.prepare(table, 1, None)
            held = table.held if table.may_fill_block or not store.rounds else 0  # to read is to decode
            listener.observe_step(table, self.ring.take(table.seen, store.shown(held)[0]))
        if store.rounds:
            store.wrote()
            self._scores.encode_block()
