"""More tokens than may stay: after a forward of several, or for a smaller budget."""

import torch
from torch import Tensor

from ..disposals import Held
from ..policies.needs import Needs
from ..ranking import not_kept
from ..store.store import Arrived
from ..store.tensors import with_new
from ..table.table import BlockTable
from .contents import Contents
from .scores import Scores
from .survivors import Survivors


class Overflow:
    """Keeps the best of more tokens than may stay, chosen token by token; the others leave through the outlet.

    Args:
        contents, scores, survivors: of the layer.
        needs: of the policy.
    """

    def __init__(self, contents: Contents, scores: Scores, survivors: Survivors, needs: Needs) -> None:
        self._contents, self._scores, self._survivors = contents, scores, survivors
        self._needs = needs

    def take(self, table: BlockTable, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hold the best of all tokens held and of these new ones `[B, H, n, dim]`; see `PagedLayer.update`.

        Args:
            table: of the layer.
            real: `[B, n]` bool, which of the new tokens are no pads; None = all.

        Returns:
            All of them, as attention gets them: `[B, H, held + n, dim]`.
        """
        contents, store, survivors = self._contents, self._contents.store, self._survivors
        if store.uncoded:
            self._scores.encode()
        held, count = table.counters.held, keys.shape[2]
        positions = table.positions_with(table.new_positions(count, real)[:, 0])
        attended = full_k, full_v = contents.shown_with(held, keys, values, real)
        if held and store.turns:
            full_k, full_v = with_new(store.read(held), keys, values)
        scores = self._scores.of_overflow(table, full_k, full_v, positions, count)
        if contents.quota.common:
            scores = survivors.judged(scores, positions)
            survivors.offer(table, scores, positions)
        self._keep_best(table, Held(full_k, full_v, positions), scores, count, real)
        return attended

    def fit(self, *, anew: bool = False, free: Tensor | None = None) -> None:
        """Bring tokens and storage in line with the quota, which has changed.

        Args:
            anew: cut blocks in any case.
            free: `[B]` slots of each set that are to be empty, see `offer`.
        """
        self._scores.encode()
        contents, capacity = self._contents, self._contents.quota.budget.capacity
        table, store = contents.known, contents.store
        if contents.quota.unequal:
            self._fit_unequal(table, anew, free)
        elif table.capacity == capacity and not anew:
            return
        elif table.held >= capacity:
            table.refresh_scores(self._scores.in_slots)
            self._keep_best(table, Held(*store.read(table.held), table.positions), table.scores, 0, None)
        else:
            if store.slots > capacity:
                store.move(capacity, table.held)
            table.resize(capacity)
            contents.settle(table, None)

    def _fit_unequal(self, table: BlockTable, anew: bool, free: Tensor | None) -> None:
        quota, positions = self._contents.quota, table.positions
        scores = self._judged(table, positions)
        limits = self._survivors.limits(table, scores, positions, self._survivors.protected(table, positions))
        anew = anew or free is not None
        if limits is not None and (anew or table.limits is None or not torch.equal(limits, table.limits)):
            self._keep_best(table, Held(*self._contents.store.read(table.held), positions), scores, 0, None, free)
        quota.resize(table.capacity)

    def offer(self, free: Tensor | None = None) -> None:
        """Say what could stay of what is held, where layers are compared and it was not said before.

        Args:
            free: `[B]` single tokens to come, for which room is to be made; 0 leaves a row as it is.
        """
        contents, table = self._contents, self._contents.table
        known = contents.quota.offered and free is None
        if known or table is None or contents.pending is not None or not table.held:
            return
        self._scores.encode()
        positions = table.positions
        contents.quota.scores = scores = self._judged(table, positions)
        self._survivors.offer(table, scores, positions, free)

    def _judged(self, table: BlockTable, positions: Tensor) -> Tensor:
        """Scores of what is held, at these positions: those of the forward that goes on, where they are known."""
        scores = None if self._needs.reads_budget else self._contents.quota.scores
        if scores is not None:
            return scores
        table.refresh_scores(self._scores.in_slots)
        return self._survivors.judged(table.scores, positions)

    def _keep_best(
        self,
        table: BlockTable,
        tokens: Held,
        scores: Tensor,
        count: int,
        real: Tensor | None,
        free: Tensor | None = None,
    ) -> None:
        """Of these tokens, those held and `count` new ones behind them, keep the best; `free`: see `fit`."""
        contents, positions, survivors = self._contents, tokens.positions, self._survivors
        store, outlet, quota = contents.store, contents.outlet, contents.quota
        held, seen = table.counters.held, table.counters.seen
        protected = survivors.protected(table, positions)
        limits = survivors.limits(table, scores, positions, protected)
        if limits is not None:
            size = quota.budget.block_size
            quota.resize(-(-int(limits.max()) // size) * size)
        capacity = quota.budget.capacity
        kept, kept_positions = survivors.choose(
            *(table, scores, positions, protected, limits, capacity, seen + count), free=free
        )
        turns = store.turning is not None
        shifts = table.moved_shifts(kept, kept_positions, positions, count) if turns else None
        if outlet.takes or outlet.plans:
            leaves = not_kept(positions, kept, kept_positions)
            offered = Held(tokens.keys, tokens.values, positions.expand_as(leaves), scores)
            tokens = outlet.overflow(offered, leaves)
        came = count if real is None else real.sum(-1)
        arrived = Arrived(kept_positions, positions[..., held:], seen - table.phase.pads + came, limits)
        store.keep(tokens.keys, tokens.values, kept, held, arrived, views=count == 0)
        if contents.marks is not None:
            contents.marks.keep(kept, held, count)
        scores = scores.gather(-1, kept)
        quota.scores = scores if limits is not None else None
        scored = scores if self._needs.token_local and not outlet.picks_blocks else None
        table.replace(kept_positions, scored, count, real, limits, shifts)
        if outlet.picks_blocks:
            table.align()
        if turns:
            contents.turn_keys()
        contents.settle(table, kept)
