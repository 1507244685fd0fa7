"""A layer whose policy decides by queries or attention."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .layer import PagedLayer
from .observer import Observer, Queries
from .policies import QueryCount
from .table.budget import BlockBudget


class ObservedLayer(PagedLayer):
    """A `PagedLayer` that is also told of the queries, by the attention implementation "paged_eviction".

    Attention runs after `update`, so a forward of several tokens is held back until its queries are known: it is
    evicted between this layer's attention and the next layer's `update`. A single token is taken in at once; its
    query counts from the next choice of a victim on.

    Args:
        masks_itself: the model's own mask does not fit this layer, whose number of tokens is not that of the others.

    Raises:
        RuntimeError: (by `update` and `commit`) attention did not tell of the last forward.
    """

    def __init__(self, *args: Any, masks_itself: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masks_itself = masks_itself
        self._observer = Observer(self.policy, self.budget.block_size, self.share, self.rotary)
        self._queries: Queries | None = None  # of the tokens that wait
        self._expected = False

    @property
    def observer_bytes(self) -> int:
        """Bytes of statistics and of kept queries."""
        return self._observer.bytes

    @property
    def observed(self) -> dict[str, Tensor]:
        """The policy's statistics by name: `[batch, kv_heads, held]` in slot order, or `[batch, ...]`."""
        return self._statistics(None)

    # ---- update ---------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens; `attended` must follow. See `PagedLayer.update`."""
        self._check_told()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._expected = key_states.shape[2] > 0
        if self.masks_itself and keys is self.keys:
            keys = keys[:]  # attention notes on them what may be seen, which the storage must not keep
        return keys, values

    def attended(self, queries: Queries) -> None:
        """The queries of the last forward, and what they were compared with."""
        self._expected = False
        if self._pending is not None:
            self._queries = queries
            if not self.record_past:
                self.commit()
        else:
            self._observe_step(queries)

    def _check_told(self) -> None:
        if self._expected:
            raise RuntimeError(
                f"The policy {self.policy.label!r} decides by attention, but the model did not show any to layer "
                f"{self.layer_idx}. Call model.set_attn_implementation('paged_eviction') before the first forward."
            )

    def _holds_back(self, count: int) -> bool:
        return self.record_past or count > 1 or self._overflows(count)

    def commit(self) -> None:
        """Take in the tokens that wait, evicting as needed."""
        self._check_told()
        super().commit()
        self._queries = None

    def _make_storage(self, keys: Tensor, values: Tensor) -> None:
        starts = self._table is None
        super()._make_storage(keys, values)
        if starts:
            self._observer.start(keys.shape[0], keys.shape[1], self.table.capacity, keys.device)

    def _take(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        count, waiting = keys.shape[2], self._queries
        step = count == 1 and not self._overflows(count)
        self._prepare(count, real)
        returned = super()._take(keys, values, real)
        if waiting is not None and step:
            self._observe_step(self._by_slot(waiting.first(1)))
        return returned

    def _prepare(self, count: int, real: Tensor | None) -> None:
        self._step_real = real
        if count > 1 or self.masks_itself or self._queries is not None:
            self._step_positions = self.table.new_positions(count, real)[:, 0]
        if self._queries is not None:
            self._queries = self._queries.first(count)

    def _append(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        held = self.held
        returned = super()._append(keys, values, real)
        if self._queries is not None and keys.shape[2] > 1:
            self._observer.observe_many(
                self._queries, self.table.positions, self._step_positions, held, self._step_real is None
            )
            self._observer.settle(None, self.table.capacity)
        return returned

    # ---- mask -----------------------------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """See `PagedLayer.get_mask_sizes`; where the model's mask is not used, one that is too narrow is asked for."""
        if not self.masks_itself or not self.get_seq_length():
            return super().get_mask_sizes(query_length)
        return 1, self.get_seq_length()

    def mask(self, query_length: int) -> Tensor | None:
        """What the queries of the last `update` may attend to, of the tokens that it returned.

        Returns:
            `[batch, 1 or kv_heads, query_length, tokens]` bool; None where a single token sees all.
        """
        table = self.table
        if self._pending is None:
            keys, queries = table.positions, self._step_positions
            if table.all_real:
                return None
        else:
            queries = table.new_positions(self._pending.count, self._pending.real)[:, 0]
            keys = table.positions_with(queries)
        keys, queries = keys[:, :, None, :], queries[:, None, -query_length:, None]
        visible = (keys >= 0) & (keys <= queries)
        # A pad sees everything: a softmax over nothing would be nan, and nobody looks at what it says.
        return visible | (queries < 0)

    # ---- observing ------------------------------------------------------------------------------------------------

    def _observe_step(self, queries: Queries) -> None:
        table = self.table
        self._observer.keep(queries, self._step_real)
        due = table.block_filled()
        if due is not None:
            seen = table.seen - table.pads
            self._observer.observe_block(queries.key, table.positions, seen, due, table.in_step)

    def _by_slot(self, queries: Queries) -> Queries:
        """A token that waited was compared with [held, new]; now it lies in a slot of its own."""
        held = self.held
        if queries.key.shape[2] == held:
            return queries
        place = (self.table.positions == self._step_positions[:, None]).float().argmax(-1)  # [B, S]
        key = queries.key[:, :, :held].clone()
        new = queries.key[:, :, -1:]
        index = place.repeat_interleave(key.shape[1] // place.shape[1], dim=1)[:, :, None, None]
        key.scatter_(2, index.expand(-1, -1, 1, key.shape[-1]), new)
        return Queries(queries.query, key, queries.logits)

    def _score_overflow(self, keys: Tensor, values: Tensor, positions: Tensor, count: int) -> Tensor:
        if self._queries is None:
            raise RuntimeError("A forward of several tokens is scored after its attention only.")
        held = positions.shape[-1] - count
        self._observer.observe_many(self._queries, positions, self._step_positions, held, self._step_real is None)
        seen = positions[:, 0].amax(-1) + 1
        return self._scores(keys, values, positions, seen, self._observer.statistics(positions), self._observer.count)

    def _statistics(self, slots: Tensor | None) -> dict[str, Tensor]:
        return self._observer.statistics(self.table.positions, slots)

    @property
    def queries_observed(self) -> QueryCount | None:
        return self._observer.count

    def _kept(self, kept: Tensor | None) -> None:
        self._observer.settle(kept, self.table.capacity)

    def forget_attention(self) -> None:
        """Forget what has been observed, as if the tokens held had met no query yet."""
        self.commit()
        if self._table is not None:
            self._observer.forget(self.table.seen - self.table.pads)

    def observe_waiting(self) -> None:
        """Let the queries of the tokens that wait count for those held, whether or not `crop` takes them back.

        Raises:
            RuntimeError: no tokens wait, or attention has not told of their queries.
        """
        pending, queries, table = self._pending, self._queries, self.table
        if pending is None or queries is None:
            raise RuntimeError("No tokens wait: record_past must be on, and their forward must be through.")
        asked = table.new_positions(pending.count, pending.real)[:, 0]
        positions = table.positions_with(asked)
        self._observer.observe_passing(queries, positions, asked, table.held, table.capacity)

    def shrink(self, budget: BlockBudget) -> None:
        """See `PagedLayer.shrink`. Queries of the block that is being filled count at the end of the next one."""
        super().shrink(budget)
        if self._table is not None:
            self._observer.delay()

    # ---- rows, rollback, life -------------------------------------------------------------------------------------

    def _moved(self, order: Tensor | None, count: int) -> None:
        self._observer.move(order, self.held + count, self.table.seen - self.table.pads, count)

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_rows(change)
        if self._table is not None:
            self._observer.map_rows(change)
            self._queries = None if self._queries is None else self._queries.map_rows(change)

    def _clear(self) -> None:
        super()._clear()
        self._observer.clear()
        self._queries = None
        self._expected = False
