"""A layer whose share of the budget is decided by what it has read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .allocation import Allocation
from .allocators import HeadAllocator, share_out
from .observed_layer import ObservedLayer
from .observer import Queries
from .storage import gather_slots
from .table.ranking import best_within


class UnequalLayer(ObservedLayer):
    """Holds a number of tokens of its own in each row, or in each row and KV head.

    The storage is as long as the largest of these numbers; slots beyond a smaller one are dead. Shares are decided by
    every forward of several tokens.

    Args:
        allocation: shares among layers, one object per cache; None where layers are equal.
        head_allocator: shares among the heads of a layer; None where heads are equal.
    """

    def __init__(
        self,
        *args: Any,
        allocation: Allocation | None = None,
        head_allocator: HeadAllocator | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._allocation = allocation
        self._head_allocator = head_allocator
        # Scores of the tokens held, as of the forward that goes on: what neighbours or sums were before it evicted.
        self._decided: Tensor | None = None
        if allocation is not None:
            allocation.add(self)

    # ---- the share ------------------------------------------------------------------------------------------------

    def _decide(self, allocation: Allocation, queries: Queries) -> None:
        new = self._step_positions
        positions = self.table.positions_with(new).expand(-1, self.storage[0].shape[1], -1)
        allocation.attended(self, queries, positions, new)

    def _limits(self, scores: Tensor, positions: Tensor) -> Tensor:
        """`[B, S]` tokens that each set may hold from now on."""
        size, sets = self.budget.block_size, positions.shape[1]
        if self._head_allocator is None:
            share = self._allocation.share(self) if self._allocation is not None else None
            mean = torch.full((positions.shape[0], 1), self._asked.capacity, device=positions.device)
            return (mean if share is None else share.to(mean)).expand(-1, sets)
        blocks = self._asked.capacity // size
        pinned = scores.masked_fill(self._protected(positions), float("inf"))
        pinned = pinned.masked_fill(positions < 0, float("-inf"))
        weights = self._head_allocator.weights(pinned, self._asked.capacity)
        real = (positions[:, 0] >= 0).sum(-1)
        most = -(-real // size)
        return share_out(weights, blocks * sets, self._asked.smallest // size, most).to(positions.device) * size

    @property
    def _room(self) -> int | Tensor:
        share = None if self._allocation is None else self._allocation.share(self)
        return self._asked.capacity if share is None else share[..., None]

    def resize(self) -> None:
        """Give up, or get room for, tokens: the share has changed. Tokens that wait for `crop` are decided on later."""
        if self._table is not None and self._pending is None:
            self._fit()

    def _fit(self) -> None:
        table = self.table
        positions = table.positions
        scores = self.score_slots(None) if self._decided is None else self._decided
        limits = self._limits(scores, positions)
        if table.limits is None or not torch.equal(limits, table.limits):
            keys, values = (states[:, :, : table.held] for states in self.storage)
            self._keep_best(keys, values, positions, scores, 0, None)
        self.budget = self.budget.of(table.capacity)

    def _make_storage(self, keys: Tensor, values: Tensor) -> None:
        if self._head_allocator is not None and self.share.processes(keys.shape[1]) > 1:
            raise ValueError(
                f"The allocator {self._head_allocator.name!r} compares all KV heads of a layer, and tensor parallelism "
                "gave some to other processes, which would have to make room for what is decided here. Use "
                "allocator='uniform' or one that shares out among layers, or keep the model in one process."
            )
        super()._make_storage(keys, values)

    # ---- update ---------------------------------------------------------------------------------------------------

    def _take(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        self._decided = None
        if keys.shape[2] > 1:
            self._prepare(keys.shape[2], real)
            if self._allocation is not None and self._queries is not None:
                self._decide(self._allocation, self._queries)
            return self._overflow(keys, values, real)
        return super()._take(keys, values, real)

    def _keep_best(
        self, full_k: Tensor, full_v: Tensor, positions: Tensor, scores: Tensor, count: int, real: Tensor | None
    ) -> None:
        limits = self._limits(scores, positions)
        capacity = int(limits.max())
        kept, positions = best_within(self._rank(scores, positions), positions, limits, capacity)
        keys, values = self._new_storage(*self.storage, capacity)
        keys.copy_(gather_slots(full_k, kept))
        values.copy_(gather_slots(full_v, kept))
        self._set_storage(keys, values)
        self._decided = scores.gather(-1, kept)
        local_scores = self._decided if self.policy.token_local else None
        self.budget = self.budget.of(capacity)
        self.table.replace(positions, local_scores, count, real, limits)
        self._kept(kept)

    def forget_attention(self) -> None:
        """See `ObservedLayer.forget_attention`."""
        super().forget_attention()
        self._decided = None

    def observe_waiting(self) -> None:
        """See `ObservedLayer.observe_waiting`."""
        super().observe_waiting()
        self._decided = None

    def _moved(self, order: Tensor | None, count: int) -> None:
        super()._moved(order, count)
        self._decided = None

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_rows(change)
        self._decided = None

    def _clear(self) -> None:
        super()._clear()
        self._decided = None
