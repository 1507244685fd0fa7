"""Where a layer of a static cache stands among those that take compiled steps, and what it does between two steps."""

from ..layer.contents import Contents
from ..layer.scores import Scores
from ..layer.takeback import Takeback
from .ring import QueryRing
from .steps import NextSlots


class Place:
    """One layer's place. It knows where the next token goes, neither the run nor the steps, which hold it.

    Attributes:
        given: where the layers of its run write the next token; None before the first step.
        first_row, end_row: of this layer among those of the run.
        ring: where compiled steps leave their queries; None where nobody asks for them.

    Args:
        contents, scores, takeback: of the layer.
        queries: whether the policy asks for queries.
    """

    def __init__(self, contents: Contents, scores: Scores, takeback: Takeback, queries: bool) -> None:
        self.given: NextSlots | None = None
        self.first_row = self.end_row = 0
        self.ring = QueryRing() if queries else None
        self._contents, self._scores, self._takeback = contents, scores, takeback

    def join(self, given: NextSlots, index: int) -> None:
        """Take single tokens as layer `index` of a run."""
        rows = self._contents.rows
        self.given, self.first_row, self.end_row = given, index * rows, (index + 1) * rows
        if self.ring is not None:
            self.ring.make(rows, self._contents.quota.budget.block_size)

    def sort_pads(self) -> bool:
        """See `Takeback.sort_pads`."""
        return self._takeback.sort_pads()

    def written(self) -> None:
        """The host has counted a token that a graph has written."""
        store, listener = self._contents.store, self._contents.listener
        if listener is not None and self.ring is not None:
            table = self._contents.known
            listener.prepare(table, 1, None)
            held = table.held if table.may_fill_block or not store.rounds else 0  # to read is to decode
            listener.observe_step(table, self.ring.take(table.seen, self._contents.shown(held)[0]))
        store.wrote()
        self._scores.encode_block()
