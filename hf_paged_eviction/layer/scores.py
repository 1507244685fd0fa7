"""Scores of the tokens of a layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policies.scorer import Scorer
from ..precision.coded import CodedStore
from ..precision.exact import Newest
from ..table.table import BlockTable
from .layer_state import LayerState


class Scores:
    """Calls the policy for tokens that a layer holds or takes in.

    Attributes:
        early: whether each token is scored once, before it is rounded: tokens of a prompt when they come, single tokens
            just before their block is encoded.

    Args:
        scorer: calls the policy.
        state: state of the layer.
    """

    def __init__(self, scorer: Scorer, state: LayerState) -> None:
        self._scorer, self._state = scorer, state
        self._token_local = scorer.policy.needs.token_local
        self.early = state.store.rounds and self._token_local and not state.action.picks_blocks

    def ask(self, keys: Tensor, values: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Score tokens of several layers at once, see `Scorer`; for policies whose scores do not depend on the
        layer."""
        return self._scorer(keys, values, positions, seen, budget=self._state.budget.for_policy)

    def in_slots(self, slots: Tensor | None) -> Tensor:
        """Score the tokens in the slots `[B, S, n]`, or all held tokens: `[B, S, n]`."""
        state = self._state
        table, store, recorder = state.known, state.store, state.recorder
        if state.action.picks_blocks and table.full:
            scores = state.action.scores(table)
            return scores if slots is None else scores.gather(-1, slots)
        if self.early:
            if (store_to_encode := self.uncoded) is not None:
                self.score_newest(store_to_encode.newest())
            return table.scores if slots is None else table.scores.gather(-1, slots)
        if slots is None:
            positions, keys, values = table.positions, *store.read(table.held)
        else:
            positions, keys, values = table.positions.gather(-1, slots), *store.at(slots)
        observer = None if recorder is None else recorder.observer
        statistics = {} if observer is None else observer.statistics(table.positions, slots)
        observed = None if observer is None else observer.count
        room, seen = state.budget.for_policy, table.seen - table.pads
        return self._scorer(keys, values, positions, seen, statistics, observed, room)

    def of_overflow(self, table: BlockTable, keys: Tensor, values: Tensor, positions: Tensor, count: int) -> Tensor:
        """Score the held tokens and `count` new ones behind them: `[B, S, held + count]`.

        Args:
            table: table of the layer.
            keys, values: `[B, H, held + count, dim]`.
            positions: `[B, S, held + count]`.
        """
        state = self._state
        recorder, held = state.recorder, table.counters.held
        seen = positions[:, 0].amax(-1) + 1
        if recorder is not None:
            statistics = recorder.observe_overflow(positions, held)
            if not self.early:
                observed, room = recorder.observer.count, state.budget.for_policy
                return self._scorer(keys, values, positions, seen, statistics, observed, room)
        if not self._token_local or held == 0:
            return self.ask(keys, values, positions, seen)
        table.refresh_scores(self.in_slots)
        new = self.ask(keys[:, :, -count:], values[:, :, -count:], positions[..., -count:], seen)
        return torch.cat([table.scores, new], dim=-1)

    # ---- tokens that will be rounded ------------------------------------------------------------------------------

    def note_appended(self, keys: Tensor, values: Tensor) -> None:
        """Score several tokens that were appended and encoded at once; keys and values `[B, H, n, dim]` before
        encoding."""
        if self.early:
            table, count = self._state.known, keys.shape[2]
            scores = self.ask(keys, values, table.positions[..., -count:], table.seen - table.pads)
            table.tokens.scores[:, :, table.held - count : table.held] = scores

    @property
    def uncoded(self) -> CodedStore | None:
        """The store, if it has single tokens that are not encoded yet."""
        store = self._state.store
        return store if isinstance(store, CodedStore) and store.uncoded else None

    @property
    def block_waits(self) -> bool:
        """Whether so many single tokens are not encoded that the next one needs the place of one of them."""
        return self._state.store.uncoded == self._state.budget.now.block_size

    def encode(self) -> None:
        """Score and encode the single tokens that are not encoded yet."""
        encode_together([self])

    def score_newest(self, newest: Newest) -> None:
        """Score those of the newest tokens that wait for their codes, if that is due then."""
        if not self.early:
            return
        table = self._state.known
        scores = table.tokens.scores
        sets = scores.shape[1]
        slots, new = newest.slots[:, :sets], newest.waits[:, :sets]
        new_scores = self.ask(newest.keys, newest.values, table.positions.gather(-1, slots), table.seen - table.pads)
        scores.scatter_(-1, slots, torch.where(new, new_scores, scores.gather(-1, slots)))


def encode_together(layers: Sequence[Scores]) -> None:
    """Score and encode the single tokens of these layers that are not encoded yet, of layers that are alike at once."""
    waiting = [(layer, store) for layer in layers if (store := layer.uncoded) is not None]
    while waiting:
        first = waiting[0][1]
        alike = [pair for pair in waiting if first.encodes_like(pair[1])]
        waiting = [pair for pair in waiting if pair not in alike]
        newest = first.encode([store for _, store in alike[1:]])
        for (layer, _), new in zip(alike, newest, strict=True):
            layer.score_newest(new)
