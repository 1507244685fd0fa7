"""What has been seen of the queries of each live request, for policies that decide by them."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layer.paged import PagedLayer
from ..policies import QueryCount, Statistics
from ..queries.observer import Observer, Queries

#: What a policy is told of queries.
Observed = tuple[Statistics, QueryCount | None]


class Watched(NamedTuple):
    """Tokens of one layer of a request, those held and behind them new ones: `[1, H, n, D]`, `[1, S, n]`, -1 where a
    slot is not in use; and what is known of their queries."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    observed: Observed


class Observers:
    """One observer for each layer of each request; none where the policy asks for no queries.

    Args:
        layers: those that evict.
        block_size: tokens of a block.
    """

    def __init__(self, layers: Sequence[PagedLayer], block_size: int) -> None:
        self.any = layers[0].needs.queries
        self._layers, self._block_size = layers, block_size
        self._of: dict[int, list[Observer]] = {}
        self._capacities: dict[int, int] = {}

    def add(self, number: int, capacity: int) -> None:
        """A new request takes this row, which holds so many tokens."""
        self.forget(number)
        self._capacities[number] = capacity

    def forget(self, number: int) -> None:
        """Nobody has this row."""
        self._of.pop(number, None)

    def give(self, number: int, observed: Sequence[Observer]) -> None:
        """This request goes on from what these have seen."""
        if self.any:
            self._of[number] = copy.deepcopy(list(observed))

    def copies(self, number: int) -> tuple[Observer, ...]:
        """What has been seen of this row's queries."""
        return tuple(copy.deepcopy(self._of.get(number, [])))

    def _observer(self, number: int, layer: int, key: Tensor) -> Observer:
        if number not in self._of:
            self._of[number] = [self._new(index, key, self._capacities[number]) for index in self._layers]
        return self._of[number][layer]

    def _new(self, layer: PagedLayer, key: Tensor, capacity: int) -> Observer:
        observer = Observer(layer.policy, self._block_size, layer.local_heads, layer.rotary)
        observer.start(1, key.shape[1], capacity, key.device)
        return observer

    def statistics(self, number: int, layer: int, positions: Tensor) -> Observed:
        """What is known of the tokens at `positions` `[1, S, n]` in slot order."""
        if number not in self._of:
            return {}, None
        observer = self._of[number][layer]
        return observer.statistics(positions), observer.count

    # ---- a forward ------------------------------------------------------------------------------------------------

    def see_several(self, number: int, layer: int, queries: Queries, positions: Tensor, held: int) -> Observed:
        """The queries of several tokens.

        Args:
            queries: with the keys that they were compared with: those held, then new ones.
            positions: `[1, S, n]` of these.
            held: slots held before.
        """
        if not self.any:
            return {}, None
        observer = self._observer(number, layer, queries.key)
        query_positions = positions[:, 0, held:]
        return observer.observe_many(queries, positions, query_positions, held, all_real=True), observer.count

    def settle(self, number: int, layer: int, kept_indices: Tensor | None) -> None:
        """Of these tokens `kept_indices` `[1, S, n]` stay; None = all."""
        if self.any:
            self._of[number][layer].settle(
                kept_indices, self._capacities[number] if kept_indices is None else kept_indices.shape[-1]
            )

    def see_one(self, number: int, layer: int, queries: Queries) -> None:
        """The query of a single token."""
        self._observer(number, layer, queries.key).keep(queries, None)

    def block_filled(self, number: int, layer: int, key: Tensor, positions: Tensor, seen: int, in_step: bool) -> None:
        """A block of some set is full: look at the queries of its tokens.

        Args:
            key: `[1, H, n, D]` held now, at `positions` `[1, S, n]`.
            seen: tokens.
            in_step: whether the blocks of all sets are.
        """
        due = torch.ones(1, dtype=torch.bool, device=key.device)
        count = torch.tensor([seen], device=key.device)
        self._of[number][layer].observe_block(key, positions, count, due, in_step)
