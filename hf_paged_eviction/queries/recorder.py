"""What one layer does with the queries that attention shows."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..policies import Statistics
from ..store.pending import Pending
from ..table.table import BlockTable
from .observer import Observer, Queries


class QueryRecorder:
    """Lets a layer's observer see queries at the right moment, and says what they may see.

    Attention runs after `update`, so a forward of several tokens is held back until its queries are known: it is
    evicted between this layer's attention and the next layer's `update`. A single token is taken in at once; its
    query counts from the next choice of a victim on.

    Attributes:
        observer: statistics of attention.
        queries: of the tokens that wait; None where attention has not told of them.
        positions: `[B, q]` int64 of the tokens that are being taken in, -1 for pads; of a single one only where it
            waited.
        arriving: how many are being taken in.
        real: `[B, q]` bool, which of them are real; None = all.
        expects: whether attention must tell of queries before anything else happens.
    """

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.queries: Queries | None = None
        self.positions = torch.empty(0, 0, dtype=torch.int64)
        self.real: Tensor | None = None
        self.arriving = 0
        self.expects = False

    # ---- one forward ----------------------------------------------------------------------------------------------

    def untold(self, layer_idx: int) -> RuntimeError:
        """What to say where attention has not told of the queries that are expected."""
        return RuntimeError(
            f"The policy {self.observer.policy.label!r} decides by attention, but the model did not show any to layer "
            f"{layer_idx}. Call model.set_attn_implementation('paged_eviction') before the first forward. If it is set "
            "so, a forward has failed: call cache.reset() before the next."
        )

    def prepare(self, table: BlockTable, count: int, real: Tensor | None) -> None:
        """The next `count` tokens are being taken in."""
        self.real = real
        self.arriving = count
        if count > 1 or self.queries is not None:
            self.positions = table.new_positions(count, real)[:, 0]
        if self.queries is not None and self.queries.query.shape[2] != count:
            self.queries = self.queries.first(count)

    def observe_appended(self, table: BlockTable, held: int, count: int) -> None:
        """`count` tokens were written behind the `held` ones."""
        if self.queries is not None and count > 1:
            self.observer.observe_many(self.queries, table.positions, self.positions, held, self.real is None)
            self.observer.settle(None, table.capacity)

    def observe_overflow(self, positions: Tensor, held: int) -> Statistics:
        """Tokens at `positions` `[B, S, held + n]` are to be chosen from: their statistics, see `Observer.statistics`.

        Raises:
            RuntimeError: attention has not told of their queries.
        """
        if self.queries is None:
            raise RuntimeError("A forward of several tokens is scored after its attention only.")
        return self.observer.observe_many(self.queries, positions, self.positions, held, self.real is None)

    def observe_step(self, table: BlockTable, queries: Queries) -> None:
        """A single token was taken in."""
        self.observer.keep(queries, self.real)
        due = table.block_filled()
        if due is not None:
            seen = table.seen - table.pads
            self.observer.observe_block(queries.key, table.positions, seen, due, table.in_step)

    def observe_waiting_step(self, table: BlockTable, waiting: Queries) -> None:
        """As `observe_step`, of a token that waited: it was compared with [held, new]; now it lies in a slot of its
        own."""
        held, queries = table.held, waiting.first(1)
        if queries.key.shape[2] != held:
            place = (table.positions == self.positions[:, None]).float().argmax(-1)  # [B, S]
            key, new = queries.key[:, :, :held].clone(), queries.key[:, :, -1:]
            index = place.repeat_interleave(key.shape[1] // place.shape[1], dim=1)[:, :, None, None]
            key.scatter_(2, index.expand(-1, -1, 1, key.shape[-1]), new)
            queries = Queries(queries.query, key, queries.logits)
        self.observe_step(table, queries)

    def observe_passing(self, table: BlockTable, pending: Pending | None) -> None:
        """Let the queries of the tokens that wait count for those held, whether or not they are taken back.

        Raises:
            RuntimeError: no tokens wait, or attention has not told of their queries.
        """
        if pending is None or self.queries is None:
            raise RuntimeError("No tokens wait: record_past must be on, and their forward must be through.")
        query_positions = table.new_positions(pending.count, pending.real)[:, 0]
        self.observer.observe_passing(
            self.queries, table.positions_with(query_positions), query_positions, table.held, table.capacity
        )

    # ---- mask -----------------------------------------------------------------------------------------------------

    def mask(self, table: BlockTable, pending: Pending | None, query_length: int) -> Tensor | None:
        """What the queries of the last `update` may attend to, of the tokens that it returned.

        Returns:
            `[batch, 1 or kv_heads, query_length, tokens]` bool; None where a single token sees all.
        """
        if pending is None:
            if table.all_real:
                return None
            keys, queries = table.positions, self.positions
            if self.arriving == 1:
                newest = (table.seen - table.pads - 1)[:, None]
                queries = newest if self.real is None else newest.masked_fill(~self.real, -1)
        else:
            queries = table.new_positions(pending.count, pending.real)[:, 0]
            keys = table.positions_with(queries)
        keys, queries = keys[:, :, None, :], queries[:, None, -query_length:, None]
        visible = (keys >= 0) & (keys <= queries)
        # A pad sees everything: a softmax over nothing would be nan, and nobody looks at what it says.
        return visible | (queries < 0)

    # ---- rows and life --------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to everything."""
        self.observer.map_rows(change)
        self.queries = None if self.queries is None else self.queries.map_rows(change)

    def clear(self) -> None:
        """Forget everything."""
        self.observer.clear()
        self.queries = None
        self.expects = False
