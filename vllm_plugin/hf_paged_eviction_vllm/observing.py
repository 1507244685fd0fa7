"""Statistics of the queries of live requests, for policies that look at queries or attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_paged_eviction.internals import Observer, Queries, QueryCount, Statistics

from .settings import Layer, Settings

#: Statistics and query counts for the policy.
Observed = tuple[Statistics, QueryCount | None]


class Observing:
    """One observer per layer and request; none if the policy needs no queries.

    Attributes:
        on: whether the policy needs queries.
    """

    def __init__(self, settings: Settings, layers: Sequence[Layer]) -> None:
        self.on = settings.policy.needs.queries
        self._settings, self._layers = settings, layers
        self._of: dict[int, list[Observer]] = {}
        self._capacities: dict[int, int] = {}

    def begin(self, row: int, capacity: int) -> None:
        """A request takes this row."""
        self._of.pop(row, None)
        self._capacities[row] = capacity

    def _observer(self, row: int, layer: int, key: Tensor) -> Observer:
        if row not in self._of:
            self._of[row] = [self._settings.observer(one) for one in self._layers]
            for observer in self._of[row]:
                observer.start(1, key.shape[1], self._capacities[row], key.device)
        return self._of[row][layer]

    def statistics(self, row: int, layer: int, positions: Tensor) -> Observed:
        """Statistics of the tokens at `positions` `[1, S, n]`, in slot order."""
        if row not in self._of:
            return {}, None
        observer = self._of[row][layer]
        return observer.statistics(positions), observer.count

    def several(self, row: int, layer: int, queries: Queries, positions: Tensor, held: int) -> Observed:
        """Observe the queries of several tokens.

        Args:
            queries: with the keys of the held tokens, followed by new ones.
            positions: `[1, S, n]` of these keys.
            held: number of slots in use before.
        """
        if not self.on:
            return {}, None
        observer = self._observer(row, layer, queries.key)
        at = positions[:, 0, held:]
        return observer.observe_many(queries, positions, at, held, all_real=True), observer.count

    def settle(self, row: int, layer: int, kept: Tensor | None) -> None:
        """Keep the statistics of the tokens `kept` `[1, S, n]`; None = of all."""
        if self.on:
            count = self._capacities[row] if kept is None else kept.shape[-1]
            self._of[row][layer].settle(kept, count)

    def one(self, row: int, layer: int, queries: Queries) -> None:
        """Store the query of a single token."""
        self._observer(row, layer, queries.key).keep(queries, None)

    def block_filled(self, row: int, layer: int, key: Tensor, positions: Tensor, seen: int, in_step: bool) -> None:
        """Observe the stored queries when a block of some set is full.

        Args:
            key: `[1, H, n, D]` held keys, at `positions` `[1, S, n]`.
            seen: number of tokens seen.
            in_step: whether the blocks of all sets are full.
        """
        due = torch.ones(1, dtype=torch.bool, device=key.device)
        count = torch.tensor([seen], device=key.device)
        self._of[row][layer].observe_block(key, positions, count, due, in_step)
