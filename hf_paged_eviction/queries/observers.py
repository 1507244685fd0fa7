"""Statistics of the queries of live requests, for policies that need queries."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from ..integration.rotary import Rotary
from ..policies import EvictionPolicy, QueryCount, Statistics
from .observer import Observer, Queries

#: Statistics and query counts for the policy.
Observed = tuple[Statistics, QueryCount | None]


class Watched(NamedTuple):
    """Tokens of one layer of a request, the held ones followed by new ones: keys and values `[1, H, n, D]`, positions
    `[1, S, n]` with -1 for unused slots, and the statistics of their queries."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    observed: Observed


class Observers:
    """One observer per layer and request; none if the policy needs no queries.

    Attributes:
        any: whether the policy needs queries.

    Args:
        policy: of all layers.
        block_size: number of tokens per block.
        layers: of each layer that evicts, the KV heads that this process holds, and its rotation, if the policy needs
            it.
    """

    def __init__(
        self, policy: EvictionPolicy, block_size: int, layers: Sequence[tuple[LocalHeads, Rotary | None]]
    ) -> None:
        self.any = policy.needs.queries
        self._policy, self._block_size, self._layers = policy, block_size, layers
        self._of: dict[int, list[Observer]] = {}
        self._capacities: dict[int, int] = {}

    def add(self, number: int, capacity: int) -> None:
        """Add a request with this row and capacity."""
        self.forget(number)
        self._capacities[number] = capacity

    def forget(self, number: int) -> None:
        """Remove the request with this row."""
        self._of.pop(number, None)

    def give(self, number: int, observed: Sequence[Observer]) -> None:
        """Let a request continue with the statistics of these observers."""
        if self.any:
            self._of[number] = copy.deepcopy(list(observed))

    def copies(self, number: int) -> tuple[Observer, ...]:
        """Copies of the observers of this row."""
        return tuple(copy.deepcopy(self._of.get(number, [])))

    def _observer(self, number: int, layer: int, key: Tensor) -> Observer:
        if number not in self._of:
            self._of[number] = [Observer(self._policy, self._block_size, *place) for place in self._layers]
            for observer in self._of[number]:
                observer.start(1, key.shape[1], self._capacities[number], key.device)
        return self._of[number][layer]

    def statistics(self, number: int, layer: int, positions: Tensor) -> Observed:
        """Statistics of the tokens at `positions` `[1, S, n]`, in slot order."""
        if number not in self._of:
            return {}, None
        observer = self._of[number][layer]
        return observer.statistics(positions), observer.count

    # ---- a forward ------------------------------------------------------------------------------------------------

    def see_several(self, number: int, layer: int, queries: Queries, positions: Tensor, held: int) -> Observed:
        """Observe the queries of several tokens.

        Args:
            queries: queries, with the keys of the held tokens followed by new ones.
            positions: `[1, S, n]` positions of these keys.
            held: number of slots in use before.
        """
        if not self.any:
            return {}, None
        observer = self._observer(number, layer, queries.key)
        query_positions = positions[:, 0, held:]
        return observer.observe_many(queries, positions, query_positions, held, all_real=True), observer.count

    def settle(self, number: int, layer: int, kept_indices: Tensor | None) -> None:
        """Keep the statistics of the tokens at `kept_indices` `[1, S, n]`; None = all."""
        if self.any:
            self._of[number][layer].settle(
                kept_indices, self._capacities[number] if kept_indices is None else kept_indices.shape[-1]
            )

    def see_one(self, number: int, layer: int, queries: Queries) -> None:
        """Store the query of a single token."""
        self._observer(number, layer, queries.key).keep(queries, None)

    def block_filled(self, number: int, layer: int, key: Tensor, positions: Tensor, seen: int, in_step: bool) -> None:
        """Observe the stored queries when a block of some set is full.

        Args:
            key: `[1, H, n, D]` held keys, at `positions` `[1, S, n]`.
            seen: number of tokens seen.
            in_step: whether the blocks of all sets are full.
        """
        due = torch.ones(1, dtype=torch.bool, device=key.device)
        count = torch.tensor([seen], device=key.device)
        self._of[number][layer].observe_block(key, positions, count, due, in_step)
