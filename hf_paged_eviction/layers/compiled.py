"""What a layer of a static cache does within a compiled step, and right after it."""

import torch
from torch import Tensor

from ..queries.observer import Queries
from ..queries.ring import QueryRing, RingSnapshot
from ..table.steps import StaticRun, StaticSteps
from .contents import Contents
from .scores import Scores
from .takeback import Takeback


class Compiled:
    """The place of one layer in the compiled steps of its cache. Code in a graph only writes, see `table.steps`.

    Attributes:
        steps: what all layers of the cache share.
        run: the layers that take steps together with this one; None before the first step.
        ring: where compiled steps leave their queries; None where nobody asks for them.

    Args:
        steps: see above.
        contents, scores, takeback: of the layer.
        queries: whether the policy asks for queries.
        layer_idx: index in the model.
    """

    def __init__(
        self,
        steps: StaticSteps,
        contents: Contents,
        scores: Scores,
        takeback: Takeback,
        queries: bool,
        layer_idx: int,
    ) -> None:
        self.steps = steps
        self.run: StaticRun | None = None
        self.ring = QueryRing() if queries else None
        self._contents, self._scores, self._takeback = contents, scores, takeback
        self._layer_idx = layer_idx
        self._first_row = self._end_row = 0  # among those of the run

    # ---- within a step --------------------------------------------------------------------------------------------

    def seen(self) -> Tensor:
        """Columns seen before the token of this step, int64."""
        return self.steps.seen_on(self._contents.device)

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a single token, `[B, H, 1, dim]`; returns all that attention gets.

        Raises:
            RuntimeError: the step was not prepared. ValueError: another number of rows than are held.
        """
        self.steps.check_ready()
        contents, run, first, end = self._contents, self.run, self._first_row, self._end_row
        if contents.listener is not None:
            contents.listener.check_told(self._layer_idx)
            contents.listener.expect()
        if run is None or keys.shape[0] != end - first:
            contents.known.check_rows(keys.shape[0])
            raise RuntimeError(f"Layer {self._layer_idx} was left out of the forward before this one.")
        slots = run.slots[first:end]
        if contents.outlet.takes:
            contents.let_go(slots, run.leaving[first:end])
        contents.store.write(slots[:, :, 0], keys, values)
        if contents.marks is not None:
            contents.marks.expect(contents.marks.take_arrived(keys))
            contents.marks.overwrite(slots)
            contents.marks.expect(None)
        return contents.shown()

    def leave(self, queries: Queries) -> bool:
        """Keep the query of a single token for the host; returns False for any other forward."""
        if self.ring is None or self.run is None or queries.query.shape[2] != 1:
            return False
        self.ring.put(self.steps.seen[self._contents.device], queries.query)
        return True

    # ---- between the steps ----------------------------------------------------------------------------------------

    def mask_sizes(self) -> tuple[int, int | Tensor]:
        """See `PagedLayer.get_mask_sizes`, of a single token: always the whole storage."""
        capacity = self._contents.quota.budget.capacity
        if torch.compiler.is_compiling():
            return capacity, self.seen().add(1 - capacity).clamp_min(0)
        self.steps.settle()
        return capacity, max(self._contents.known.seen + self._contents.waiting + 1 - capacity, 0)

    def join(self, run: StaticRun, index: int) -> None:
        """Take single tokens as layer `index` of this run."""
        rows = self._contents.rows
        self.run, self._first_row, self._end_row = run, index * rows, (index + 1) * rows
        if self.ring is not None:
            self.ring.make(rows, self._contents.quota.budget.block_size)

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

    def sort_pads(self) -> bool:
        """See `Takeback.sort_pads`."""
        return self._takeback.sort_pads()

    # ---- life -----------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Something else than a single token happens to the layer."""
        self.steps.interrupt()

    def clear(self) -> None:
        """The layer begins anew."""
        self.steps.interrupt()
        self.run = None

    @property
    def all_real(self) -> bool | None:
        """To be saved: see `StaticRun`; None where no run goes on."""
        return self.run.all_real if self.run is not None and self.steps.joined else None

    def ring_snapshot(self) -> RingSnapshot | None:
        """To be saved; None where there is nothing."""
        return None if self.ring is None else self.ring.snapshot()

    def restore_ring(self, saved: RingSnapshot | None, device: torch.device) -> None:
        """Know what another ring knew, if there is one."""
        if self.ring is not None and saved is not None:
            self.ring.restore(saved, device)
