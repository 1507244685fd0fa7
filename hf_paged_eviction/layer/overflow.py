"""Evict token by token: after a forward of several tokens, or for a smaller budget."""

import torch
from torch import Tensor

from ..disposals import Held
from ..policies.needs import Needs
from ..ranking import not_kept
from ..store.pending import Offered, Pending
from ..store.store import Arrived
from ..store.tensors import with_new
from ..table.table import BlockTable
from .kept_tokens import KeptTokens
from .layer_state import LayerState
from .scores import Scores


class Overflow:
    """Keeps the best tokens when there are more than the budget, chosen token by token. The action handles the others.

    Args:
        state, scores, kept_tokens: parts of the layer.
        needs: needs of the policy.
    """

    def __init__(self, state: LayerState, scores: Scores, kept_tokens: KeptTokens, needs: Needs) -> None:
        self._state, self._scores, self._kept_tokens = state, scores, kept_tokens
        self._needs = needs

    def take(
        self,
        table: BlockTable,
        keys: Tensor,
        values: Tensor,
        real: Tensor | None,
        shown: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keep the best of the held tokens and of these new ones `[B, H, n, dim]`; see `PagedLayer.update`.

        Args:
            table: table of the layer.
            real: `[B, n]` bool, False for pads among the new tokens; None = all are real.
            shown: what is returned, where it is known already.

        Returns:
            Keys and values of all of them, for attention: `[B, H, held + n, dim]`.
        """
        state, store, recorder = self._state, self._state.store, self._state.recorder
        if store.uncoded:
            self._scores.encode()
        held, count, offered = table.counters.held, keys.shape[2], state.offered
        arriving = None if recorder is None or count == 1 else recorder.positions
        positions = table.positions_with(table.new_positions(count, real)[:, 0] if arriving is None else arriving)
        if state.budget.split.unequal:
            state.budget.split.divide(state.budget, positions[:, 0].amax(-1) + 1)
        attended = full_k, full_v = shown or state.shown_with(held, keys, values, real)
        if held and store.turns:
            full_k, full_v = with_new(store.read(held), keys, values)
        scores = None if offered is None else offered.scores
        if scores is None:
            scores = self._scores.of_overflow(table, full_k, full_v, positions, count)
            scores = self._kept_tokens.judged(scores, positions)
        self._keep_best(table, Held(full_k, full_v, positions), scores, count, real)
        return attended

    def offer(self, table: BlockTable, pending: Pending, score: bool) -> None:
        """Tell the split which of the held and the pending tokens could stay; `score`: score them now, and forget their
        queries."""
        state, recorder = self._state, self._state.recorder
        if recorder is None:
            raise RuntimeError("Only a layer that sees attention waits for the others.")
        self._scores.encode()
        held, scores = table.counters.held, None
        positions = table.positions_with(recorder.positions)
        if score:
            shown = None if state.store.turns else pending.shown
            full_k, full_v = shown or with_new(state.store.read(held), pending.keys, pending.values)
            scores = self._scores.of_overflow(table, full_k, full_v, positions, pending.count)
            scores = self._kept_tokens.judged(scores, positions)
            self._kept_tokens.offer(table, scores, positions)
            recorder.queries = None
        state.offered = Offered(positions[:, 0].amax(-1) + 1, scores)

    def offer_held(self) -> None:
        """Tell the split which of the held tokens could stay."""
        table = self._state.table
        if table is not None and self._state.budget.split.compares:
            self._scores.encode()
            self._kept_tokens.offer(table, self._judged(table, table.positions), table.positions)

    def fit(self, *, anew: bool = False) -> None:
        """Adapt tokens and storage to a budget that has changed; `anew`: divide the tokens into blocks again even if
        none has to be evicted."""
        self._scores.encode()
        state, capacity = self._state, self._state.budget.now.capacity
        table, store = state.known, state.store
        if state.budget.split.unequal:
            self._fit_unequal(table, anew)
        elif table.capacity == capacity and not anew:
            return
        elif table.held >= capacity:
            table.refresh_scores(self._scores.in_slots)
            self._keep_best(table, Held(*store.read(table.held), table.positions), table.scores, 0, None)
        else:
            if store.slots > capacity:
                store.move(capacity, table.held)
            table.resize(capacity)
            state.settle(table, None)

    def _fit_unequal(self, table: BlockTable, anew: bool) -> None:
        budget, positions = self._state.budget, table.positions
        scores = self._judged(table, positions)
        limits = self._kept_tokens.limits(table, scores, positions, self._kept_tokens.protected(table, positions))
        if limits is not None and (anew or table.limits is None or not torch.equal(limits, table.limits)):
            self._keep_best(table, Held(*self._state.store.read(table.held), positions), scores, 0, None)
        budget.resize(table.capacity)

    def fit_rows(self, rows: Tensor) -> None:
        """Like `fit`, for the rows `[B]` bool only; the other rows do not change."""
        self._scores.encode()
        state, table = self._state, self._state.known
        positions = table.positions
        scores = self._judged(table, positions)
        self._keep_best(table, Held(*state.store.read(table.held), positions), scores, 0, None, rows=rows)

    def _judged(self, table: BlockTable, positions: Tensor) -> Tensor:
        """Scores of the held tokens, which are at these positions."""
        table.refresh_scores(self._scores.in_slots)
        return self._kept_tokens.judged(table.scores, positions)

    def _keep_best(
        self,
        table: BlockTable,
        tokens: Held,
        scores: Tensor,
        count: int,
        real: Tensor | None,
        rows: Tensor | None = None,
    ) -> None:
        """Keep the best of these tokens, the held ones followed by `count` new ones; `rows`: see `fit_rows`."""
        state, positions, kept_tokens = self._state, tokens.positions, self._kept_tokens
        store, action, budget = state.store, state.action, state.budget
        held, seen = table.counters.held, table.counters.seen
        protected = kept_tokens.protected(table, positions)
        limits = kept_tokens.limits(table, scores, positions, protected)
        if limits is not None:
            size = budget.now.block_size
            budget.resize(-(-int(limits.max()) // size) * size)
        capacity = budget.now.capacity
        kept_indices, kept_positions = kept_tokens.choose(
            table, scores, positions, protected, limits, count=capacity, columns=seen + count
        )
        if rows is not None:
            kept_indices, kept_positions = _of_rows(rows, kept_indices, kept_positions, positions)
        turns = store.rerotation is not None
        shifts = table.moved_shifts(kept_indices, kept_positions, positions, count) if turns else None
        if action.takes or action.plans:
            leaves = not_kept(positions, kept_indices, kept_positions)
            offered = Held(tokens.keys, tokens.values, positions.expand_as(leaves), scores)
            tokens = action.overflow(offered, leaves)
        came = count if real is None else real.sum(-1)
        arrived = Arrived(kept_positions, positions[..., held:], seen - table.phase.pads + came, limits)
        store.keep(tokens.keys, tokens.values, kept_indices, held, arrived, views=count == 0)
        scores = scores.gather(-1, kept_indices)
        scored = scores if self._needs.token_local and not action.picks_blocks else None
        if rows is not None and limits is not None:
            table.replace_rows(rows, kept_positions, scored, limits, shifts)
        else:
            table.replace(kept_positions, scored, count, real, limits, shifts)
        if action.picks_blocks:
            table.align()
        if turns:
            state.rerotate_keys()
        state.settle(table, kept_indices)


def _of_rows(rows: Tensor, kept_indices: Tensor, kept_positions: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that stay in the rows `[B]` bool; in other rows the present tokens, slot by slot. Both `[B, S, n]`."""
    held, count = positions.shape[-1], kept_indices.shape[-1]
    there = torch.arange(count, device=kept_indices.device).clamp_max(held - 1)
    were = torch.nn.functional.pad(positions, (0, max(count - held, 0)), value=-1)[..., :count]
    chosen = rows[:, None, None]
    return torch.where(chosen, kept_indices, there), torch.where(chosen, kept_positions, were)
