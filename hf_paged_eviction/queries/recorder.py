"""Records the queries of a layer, and passes them to the observer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..masks.visible import mask_by_position
from ..policies import Statistics
from ..store.columns import gather_slots
from ..store.pending import Pending
from ..table.table import BlockTable
from .observer import Observer, Queries


class QueryRecorder:
    """Passes queries to the observer of a layer at the right moment, and makes their masks.

    Attention runs after `update`. So the tokens of a forward of several tokens stay pending until their queries are
    known, and eviction follows between this layer's attention and the next layer's `update`. A single token is taken in
    at once; its query counts from the next choice of a victim on.

    Attributes:
        observer: statistics of attention.
        queries: queries of the pending tokens; None if attention has not shown them.
        positions: `[B, q]` int64 positions of the arriving tokens, -1 for pads; for a single token only if it was
            pending.
        arriving: number of arriving tokens.
        real: `[B, q]` bool, False for pads among them; None = all are real.
        expects: whether attention must show queries next.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.queries: Queries | None = None
        self.positions = torch.empty(0, 0, dtype=torch.int64, device="cpu")
        self.real: Tensor | None = None
        self.arriving = 0
        self.expects = False

    # ---- one forward ----------------------------------------------------------------------------------------------

    def untold(self, layer_idx: int) -> RuntimeError:
        """The error for queries that attention has not shown."""
        return RuntimeError(
            f"The policy {self.observer.policy.label!r} decides by attention, but the model did not show any to layer "
            f"{layer_idx}. Call model.set_attn_implementation('paged_eviction') before the first forward. If it is set "
            "so, a forward has failed: call cache.reset() before the next."
        )

    def prepare(self, table: BlockTable, count: int, real: Tensor | None) -> None:
        """Prepare for the next `count` tokens."""
        self.real = real
        self.arriving = count
        if count > 1 or self.queries is not None:
            self.positions = table.new_positions(count, real)[:, 0]
        if self.queries is not None and self.queries.query.shape[2] != count:
            self.queries = self.queries.first(count)

    def observe_appended(self, table: BlockTable, held: int, count: int) -> None:
        """Observe the queries of `count` tokens that were written behind the `held` ones."""
        if self.queries is not None and count > 1:
            self.observer.observe_many(self.queries, table.positions, self.positions, held, self.real is None)
            self.observer.settle(None, table.capacity)

    def observe_overflow(self, positions: Tensor, held: int) -> Statistics:
        """Observe a forward that overflows; returns statistics of all tokens, at `positions` `[B, S, held + n]`.

        Raises:
            RuntimeError: attention has not shown the queries.
        """
        if self.queries is None:
            raise RuntimeError("A forward of several tokens is scored after its attention only.")
        return self.observer.observe_many(self.queries, positions, self.positions, held, self.real is None)

    def observe_step(self, table: BlockTable, queries: Queries) -> None:
        """Store the query of a single token that was taken in."""
        self.observer.keep(queries, self.real)
        counters = table.counters
        if counters.may_fill_block:
            due = ((counters.seen - table.phase.full_at) % counters.block_size == 0).any(-1)  # rows with a full block
            seen = table.seen - table.pads
            self.observer.observe_block(queries.key, table.positions, seen, due, table.counters.in_step)

    def moved(self, waiting: Queries, before: Tensor, table: BlockTable) -> Queries:
        """The query of a single token that waits, after the held tokens have moved to other slots.

        Args:
            waiting: the query, and the keys of the held tokens and its own.
            before: `[B, S, n]` positions of the held tokens when it was compared with them.
        """
        waiting = waiting.first(1)
        key = waiting.key
        places = (table.positions[..., None] == before[:, :, None]).int().argmax(-1)  # [B, S, held]
        held = gather_slots(key, places.repeat_interleave(key.shape[1] // places.shape[1], dim=1))
        return Queries(waiting.query, torch.cat([held, key[:, :, -1:]], dim=2), waiting.logits)

    def observe_waiting_step(self, table: BlockTable, waiting: Queries) -> None:
        """Like `observe_step`, for a token that was pending: its query was compared with [held, new], and now it has a
        slot."""
        held, queries = table.held, waiting.first(1)
        if queries.key.shape[2] != held:
            place = (table.positions == self.positions[:, None]).float().argmax(-1)  # [B, S]
            key, new = queries.key[:, :, :held].clone(), queries.key[:, :, -1:]
            index = place.repeat_interleave(key.shape[1] // place.shape[1], dim=1)[:, :, None, None]
            key.scatter_(2, index.expand(-1, -1, 1, key.shape[-1]), new)
            queries = Queries(queries.query, key, queries.logits)
        self.observe_step(table, queries)

    def observe_passing(self, table: BlockTable, pending: Pending | None) -> None:
        """Observe the queries of pending tokens, which count whether or not the tokens are taken back.

        Raises:
            RuntimeError: no tokens are pending, or attention has not shown their queries.
        """
        if pending is None or self.queries is None:
            raise RuntimeError("No tokens wait: record_past must be on, and their forward must be through.")
        query_positions = table.new_positions(pending.count, pending.real)[:, 0]
        observer, before = self.observer, self.observer.count
        observer.observe_many(self.queries, table.positions_with(query_positions), query_positions, table.held)
        observer.settle(None, table.capacity)
        observer.count = replace(before, passing=before.passing + (query_positions >= 0).sum(-1))

    # ---- mask -----------------------------------------------------------------------------------------------------

    def mask(self, table: BlockTable, pending: Pending | None, query_length: int) -> Tensor | None:
        """The mask for the queries of the last `update` and the tokens that it returned.

        Returns:
            `[batch, 1 or kv_heads, query_length, tokens]` bool; None if a single token sees all.
        """
        if pending is None:
            if table.all_real:
                return None
            if self.arriving == 1:  # the newest sees all
                used = table.used[:, :, None]
                return used if self.real is None else used | ~self.real[:, None, None]
            keys, queries = table.positions, self.positions
        else:
            queries = table.new_positions(pending.count, pending.real)[:, 0]
            keys = table.positions_with(queries)
        return mask_by_position(keys, queries[:, -query_length:])

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all tensors."""
        self.observer.map_rows(change)
        self.queries = None if self.queries is None else self.queries.map_rows(change)

    def clear(self) -> None:
        """Forget everything."""
        self.observer.clear()
        self.queries = None
        self.expects = False
