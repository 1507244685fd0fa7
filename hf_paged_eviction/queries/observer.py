"""The statistics of one layer, for policies that use queries or attention.

Nothing is computed per token. The query of a single token is stored, and when its block is full, the attention of the
whole block is computed at once, over the tokens held at that moment. The queries of a prompt or a chunk are observed
before anything is evicted. A full prompt x prompt matrix never exists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.weights import Attention, Logits
from ..integration.heads import WHOLE, LocalHeads
from ..integration.rotary import Rotary
from ..policies import EvictionPolicy, QueryCount, Statistics
from ..store.columns import Columns, cat_rows, gather_slots
from ..store.tensors import byte_count
from ..tensors.parts import map_tensors
from ..tensors.pieces import per_piece


@dataclass(frozen=True)
class Queries:
    """The queries of one forward of a layer.

    Attributes:
        query: `[batch, query_heads, q, dim]`.
        key: `[batch, kv_heads or query_heads, tokens, dim]`, the keys that they were compared with.
        logits: scaling, soft-capping and sinks.
        lse: see `Attention`.
    """

    query: Tensor
    key: Tensor
    logits: Logits
    lse: Tensor | None = None

    def first(self, count: int) -> "Queries":
        """The first `count` queries, and the tokens that the last of them could see."""
        beyond = self.query.shape[2] - count
        lse = None if self.lse is None else self.lse[:, :, :count]
        return Queries(self.query[:, :, :count], self.key[:, :, : self.key.shape[2] - beyond], self.logits, lse)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "Queries":
        """The same with the rows indexed."""
        lse = None if self.lse is None else change(self.lse)
        return Queries(change(self.query), change(self.key), self.logits, lse)


#: `observe` of a policy or an allocator.
Observe = Callable[[Statistics, Attention], Statistics]


def fold(
    observe: Observe,
    statistics: Statistics,
    queries: Queries,
    key_positions: Tensor,
    query_positions: Tensor,
    window: int | None = None,
    local_heads: LocalHeads = WHOLE,
    rotary: Rotary | None = None,
    weights: bool = True,
    all_real: bool = False,
) -> Statistics:
    """Update statistics with the last `window` queries of a forward, in pieces.

    Args:
        key_positions: `[B, kv_heads, tokens]`.
        query_positions: `[B, q]`, -1 for queries that do not count.
        window: number of last queries to observe; None = all.
        local_heads: the KV heads of the layer that this process holds.
        rotary: the layer's rotation, if `observe` needs it.
        weights: whether `observe` reads attention weights; pieces are smaller then.
        all_real: whether all queries are known to count.
    """
    query, key, positions, lse = queries.query.detach(), queries.key.detach(), query_positions, queries.lse
    if all_real and window is not None:
        query, positions = query[:, :, -window:], positions[:, -window:]
        lse = None if lse is None else lse[:, :, -window:]
    elif window is not None and window < query.shape[2]:
        # The last real ones of each row; pads may stand behind them.
        order = torch.where(positions >= 0, torch.arange(positions.shape[1], device=positions.device), -1)
        chosen = order.topk(window, dim=-1).values.sort(dim=-1).values
        positions = positions.gather(-1, chosen.clamp_min(0)).masked_fill(chosen < 0, -1)
        query, lse = gather_slots(query, chosen.clamp_min(0)[:, None]), None
    rows, heads, _, dim = query.shape
    size = per_piece(query.device, rows * heads * (key.shape[2] if weights else dim))
    pieces = query.split(size, dim=2)
    sums = [None] * len(pieces) if lse is None else lse.split(size, dim=2)
    for piece, at, its in zip(pieces, positions.split(size, dim=1), sums, strict=True):
        seen = Attention(piece, key, at, key_positions, queries.logits, local_heads, rotary, its)
        statistics = observe(statistics, seen)
    return statistics


class Observer:
    """Holds the statistics of one layer, and the queries of the block that is being filled.

    Shapes: `B` rows, `H` KV heads, `P` block size, `C` budget.

    Attributes:
        observe: `policy.observe`, or a wrapper of it that looks up known results.
        count: number of observed queries by row; without rows before `start`.
        columns: the policy's token statistics, `[B, H, C]` float32 each, in slot order; `[B, H, held + n]` while tokens
            are chosen.

    Args:
        policy: the policy that uses the statistics.
        block_size: `P`.
        local_heads, rotary: see `fold`.
    """

    STATE = "_tokens", "_rows", "count", "_longest", "_kept", "_kept_real", "_logits"

    def __init__(
        self, policy: EvictionPolicy, block_size: int, local_heads: LocalHeads = WHOLE, rotary: Rotary | None = None
    ) -> None:
        self.policy, self.block_size, self.local_heads, self.rotary = policy, block_size, local_heads, rotary
        self.observe: Observe = policy.observe
        self._needs, self._asks = policy.needs, policy.needs.queries
        self.columns = Columns(zeroed=True)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.columns.use({})
        self._rows: dict[str, Tensor] = {}  # [B, ...]
        self._heads = 0
        self.count = _no_queries(torch.zeros(0, dtype=torch.int64, device="cpu"))
        # The last single tokens, those whose block is not full in some row: nothing is copied until it is.
        self._longest = self.block_size
        self._kept: list[Tensor] = []  # [B, query_heads, 1, dim]
        self._kept_real: list[Tensor | None] = []  # [B, 1], None = all
        self._logits = Logits(1.0)

    def start(self, rows: int, kv_heads: int, capacity: int, device: torch.device) -> None:
        """Make room for the statistics of a new prompt."""
        like = torch.empty(rows, kv_heads, 0, dtype=torch.float32, device=device)
        self.columns.use(self.columns.like(dict.fromkeys(self._needs.token_statistics, like), capacity))
        self._heads = kv_heads
        self.count = _no_queries(torch.zeros(rows, dtype=torch.int64, device=device))

    @property
    def bytes(self) -> int:
        """Bytes of statistics and of stored queries."""
        numbers = self.count.until, self.count.since, self.count.passing
        return self.columns.bytes + byte_count(*self._rows.values(), *numbers, *self._kept)

    def statistics(self, positions: Tensor, slots: Tensor | None = None) -> Statistics:
        """The statistics for the policy, by name.

        Args:
            positions: `[B, 1 or H, held]` in slot order.
            slots: `[B, 1 or H, n]`, the slots to read; None = all held ones.
        """
        new, statistics = positions >= self.count.until[:, None, None], dict(self._rows)
        for name, column in self.columns.tensors.items():
            # No query has seen the tokens after the last observation.
            observed = column[:, :, : positions.shape[-1]].masked_fill(new, 0.0)
            statistics[name] = observed if slots is None else gather_slots(observed, slots)
        return statistics

    # ---- single tokens --------------------------------------------------------------------------------------------

    def keep(self, queries: Queries, real: Tensor | None) -> None:
        """Store the query of a single token; `real` `[B, 1]` bool, False for a pad; None = no pads."""
        if self._asks and self._needs.observes_decode:
            self._kept.append(queries.query.detach())
            self._kept_real.append(real)
            self._logits = queries.logits

    def _kept_positions(self, seen: Tensor) -> Tensor:
        """`[B, stored]` positions of the stored queries, -1 for pads."""
        real = self._all_kept_real(seen)
        if real is None:
            return seen[:, None] - torch.arange(len(self._kept), 0, -1, device=seen.device)
        later = real.flip(-1).cumsum(-1).flip(-1)
        return (seen[:, None] - later).masked_fill(~real, -1)

    def _all_kept_real(self, of_rows: Tensor) -> Tensor | None:
        """`[B, stored]` bool, False for queries of pads; None = none is; `of_rows`: any tensor of these rows."""
        if all([real is None for real in self._kept_real]):
            return None
        everywhere = torch.ones(len(of_rows), 1, dtype=torch.bool, device=of_rows.device)
        return torch.cat([everywhere if real is None else real for real in self._kept_real], dim=1)

    def observe_block(self, key: Tensor, positions: Tensor, seen: Tensor, due: Tensor, all_due: bool) -> None:
        """Observe the stored queries of the rows whose block has just been filled.

        Args:
            key: `[B, kv_heads or query_heads, held, dim]` in slot order.
            positions: `[B, 1 or H, held]`.
            seen: `[B]` number of real tokens so far.
            due: `[B]` bool, these rows.
            all_due: whether `due` is known to be True for all rows.
        """
        observe_blocks([self], [key], [positions], seen, due, all_due)

    @property
    def kept_weights(self) -> int:
        """Number of attention weights of the stored queries per token."""
        return len(self._kept) and len(self._kept) * self._kept[0].shape[:2].numel()

    @property
    def alike(self) -> tuple[object, ...]:
        """What is equal in layers whose stored queries may be observed together."""
        logits = self._logits
        if logits.sinks is not None or any(map(torch.is_tensor, self._kept_real)):
            return (id(self),)
        own = self.observe, self._heads, self.local_heads, id(self.rotary), self._longest, len(self._kept)
        return *own, len(self._rows), logits.scaling, logits.softcap

    def _with_kept(
        self, statistics: Statistics, key: Tensor, positions: Tensor, seen: Tensor, due: Tensor
    ) -> Statistics:
        """The statistics after the stored queries of the rows `due`."""
        return _with_kept([self], statistics, key, positions, seen, due, self.count.until)

    def _drop_kept(self, count: int) -> None:
        del self._kept[:count], self._kept_real[:count]

    # ---- several tokens -------------------------------------------------------------------------------------------

    def observe_many(
        self, queries: Queries, key_positions: Tensor, query_positions: Tensor, held: int, all_real: bool = False
    ) -> Statistics:
        """Observe a forward of several tokens. Returns statistics for all tokens of the forward.

        Args:
            queries: queries of the forward.
            key_positions: `[B, 1 or H, tokens]`, positions in the `held` slots, then of the new tokens.
            query_positions: `[B, q]`, -1 for pads.
            held: number of slots in use before the forward.
            all_real: whether no query is known to be that of a pad.
        """
        if not self._asks:
            return {}
        key_positions = key_positions.expand(-1, self._heads, -1)
        new = key_positions.shape[-1] - held
        before = key_positions[..., :held]
        statistics = self.statistics(before)
        if self._kept:  # their block is not full yet, and the text goes on, except where there are only pads
            goes_on = (query_positions >= 0).any(-1)
            statistics = self._with_kept(
                statistics, queries.key[:, :, :held], before, before[:, 0].amax(-1) + 1, goes_on
            )
            self._drop_kept(len(self._kept) if all_real or bool(goes_on.all()) else 0)
        for name in self._needs.token_statistics:
            statistics[name] = torch.nn.functional.pad(statistics[name], (0, new))
        needs = self._needs
        statistics = fold(
            self.observe,
            statistics,
            queries,
            key_positions,
            query_positions,
            window=needs.window,
            local_heads=self.local_heads,
            rotary=self.rotary,
            weights=needs.reads_weights,
            all_real=all_real,
        )
        self.columns.use({name: statistics[name] for name in needs.token_statistics})
        self._rows = {name: statistics[name] for name in needs.row_statistics}
        self.count = replace(self.count, until=torch.maximum(self.count.until, query_positions.amax(-1) + 1))
        return self.statistics(key_positions)

    def forget(self, seen: Tensor) -> None:
        """Forget the statistics, as if no query had seen the `seen` `[B]` real tokens."""
        self.columns.zero()
        self._rows = {}
        self._drop_kept(len(self._kept))
        self.count = _no_queries(seen)

    def settle(self, kept_indices: Tensor | None, capacity: int) -> None:
        """Keep the statistics of the tokens `kept_indices` `[B, 1 or H, n]` (None = all), in slot order; make room for
        `capacity`."""
        columns = self.columns
        if kept_indices is not None:
            columns.take(columns.tensors, kept_indices, views=True)
        elif columns.tensors:
            columns.resize(capacity, min(columns.shape[2], capacity))

    # ---- rows and rollback ----------------------------------------------------------------------------------------

    def delay(self) -> None:
        """The tokens were divided into blocks again: stored queries wait for the end of the next block."""
        self._longest = 2 * self.block_size

    def move(self, order: Tensor | None, seen: Tensor, count: int) -> None:
        """Called after tokens were taken back.

        Args:
            order: `[B, 1 or H, held]`, slot that each token moved from; None = none moved.
            seen: `[B]` number of real tokens that remain.
            count: number of columns that were taken back.
        """
        self._kept = self._kept[: max(len(self._kept) - count, 0)]
        self._kept_real = self._kept_real[: len(self._kept)]
        if order is not None:
            self.columns.reorder(order)
        self.count = replace(self.count, until=self.count.until.minimum(seen), since=self.count.since.minimum(seen))

    def take_out(self, order: Tensor, before: Tensor, after: Tensor) -> None:
        """Called after hidden tokens were removed from their slots.

        Args:
            order: see `move`.
            before, after: `[B]` number of tokens of the row with a position. If the number is smaller afterwards, the
                queries of the last tokens no longer count.
        """
        if self._kept:
            positions = self._kept_positions(before)
            real = (positions >= 0) & (positions < after[:, None])
            self._kept_real = list(real.split(1, dim=1))
        self.move(order, after, 0)
        self.delay()

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all tensors."""
        self.columns.map_rows(change)
        self._rows, self.count, self._kept_real = map_tensors(change, (self._rows, self.count, self._kept_real))
        if self._kept:
            self._kept = list(change(torch.cat(self._kept, dim=2)).split(1, dim=2))

    # ---- saving ---------------------------------------------------------------------------------------------------

    @property
    def _tokens(self) -> dict[str, Tensor]:
        return self.columns.tensors

    @_tokens.setter
    def _tokens(self, statistics: dict[str, Tensor]) -> None:
        self.columns.use(statistics)


def observe_blocks(
    observers: Sequence[Observer],
    keys: Sequence[Tensor],
    positions: Sequence[Tensor],
    seen: Tensor,
    due: Tensor,
    all_due: bool,
) -> None:
    """`Observer.observe_block` for several layers, which are `alike`: keys and positions of each; `seen` and `due` with
    the rows of all of them, layer by layer."""
    first, rows, slots = observers[0], len(positions[0]), max([one.shape[-1] for one in positions])
    if not first._kept:
        return
    statistics = [one.statistics(own) for one, own in zip(observers, positions, strict=True)]
    before = {name: torch.cat([of[name] for of in statistics]) for name in first._rows}
    before |= {name: cat_rows([of[name] for of in statistics], slots) for name in first.columns.tensors}
    until = torch.cat([one.count.until for one in observers])
    where = cat_rows(positions, slots, empty=-1).expand(-1, first._heads, -1)
    after = _with_kept(observers, before, cat_rows(keys, slots), where, seen, due, until)
    if not all_due:
        for name, old in before.items():
            after[name] = torch.where(due.view(-1, *[1] * (old.ndim - 1)), after[name], old)
        seen = torch.where(due, seen, until)
    parts = {name: statistic.split(rows) for name, statistic in after.items()}
    for at, (one, own) in enumerate(zip(observers, seen.split(rows), strict=True)):
        for name, held in one.columns.tensors.items():
            held[:, :, :slots].copy_(parts[name][at][:, :, : held.shape[2]])
        one._rows = {name: parts[name][at] for name in first._needs.row_statistics}
        one.count = replace(one.count, until=own)
        one._drop_kept(len(one._kept) if all_due else max(len(one._kept) - one._longest, 0))


def _with_kept(
    observers: Sequence[Observer],
    statistics: Statistics,
    key: Tensor,
    positions: Tensor,
    seen: Tensor,
    due: Tensor,
    until: Tensor,
) -> Statistics:
    """The statistics of these layers after the stored queries of the rows `due`."""
    first = observers[0]
    query = torch.cat([torch.cat(one._kept, dim=2) for one in observers])
    query_positions = first._kept_positions(seen)
    query_positions = query_positions.masked_fill((query_positions < until[:, None]) | ~due[:, None], -1)
    places = query_positions, positions, first._logits, first.local_heads, first.rotary
    return first.observe(statistics, Attention(query, key.detach(), *places))


def _no_queries(seen: Tensor) -> QueryCount:
    """The count after `seen` `[B]` real tokens, of which no query counts."""
    return QueryCount(seen, seen, torch.zeros_like(seen))
