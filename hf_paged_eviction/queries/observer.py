"""The statistics of one layer, for policies that use queries or attention.

Nothing is computed per token. The query of a single token is stored, and when its block is full, the attention of the
whole block is computed at once, over the tokens held at that moment. The queries of a prompt or a chunk are observed
before anything is evicted. A full prompt x prompt matrix never exists.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.weights import Attention, Logits
from ..integration.heads import WHOLE, LocalHeads
from ..integration.rotary import Rotary
from ..parts import map_tensors
from ..policies import EvictionPolicy, QueryCount, Statistics
from ..saved import LONGEST, SavedState, StateDict
from ..store.arriving import StateKind
from ..store.columns import Columns, gather_slots
from ..store.room import Room
from ..store.tensors import byte_count

#: Largest size of attention weights, or queries, in memory, in bytes; long prompts are observed in pieces.
_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Queries:
    """The queries of one forward of a layer.

    Attributes:
        query: `[batch, query_heads, q, dim]`.
        key: `[batch, kv_heads or query_heads, tokens, dim]`, the keys that they were compared with.
        logits: scaling, soft-capping and sinks.
    """

    query: Tensor
    key: Tensor
    logits: Logits

    def first(self, count: int) -> "Queries":
        """The first `count` queries, and the tokens that the last of them could see."""
        beyond = self.query.shape[2] - count
        return Queries(self.query[:, :, :count], self.key[:, :, : self.key.shape[2] - beyond], self.logits)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "Queries":
        """The same with the rows indexed."""
        return Queries(change(self.query), change(self.key), self.logits)


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
    key = queries.key.detach()
    for query, positions in _pieces(window, queries, query_positions, weights, all_real):
        seen = Attention(query, key, positions, key_positions, queries.logits, local_heads, rotary)
        statistics = observe(statistics, seen)
    return statistics


def _pieces(
    window: int | None, queries: Queries, positions: Tensor, weights: bool, all_real: bool
) -> list[tuple[Tensor, Tensor]]:
    query = queries.query.detach()
    if all_real and window is not None:
        query, positions = query[:, :, -window:], positions[:, -window:]
    elif window is not None and window < query.shape[2]:
        # The last real ones of each row; pads may stand behind them.
        order = torch.where(positions >= 0, torch.arange(positions.shape[1], device=positions.device), -1)
        chosen = order.topk(window, dim=-1).values.sort(dim=-1).values
        positions = positions.gather(-1, chosen.clamp_min(0)).masked_fill(chosen < 0, -1)
        query = gather_slots(query, chosen.clamp_min(0)[:, None])
    rows, heads, _, dim = query.shape
    size = max(1, _PIECE // (4 * rows * heads * (queries.key.shape[2] if weights else dim)))
    return list(zip(query.split(size, dim=2), positions.split(size, dim=1), strict=True))


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
        local_heads: see `fold`.
        rotary: the layer's rotation, if the policy needs it.
    """

    def __init__(
        self, policy: EvictionPolicy, block_size: int, local_heads: LocalHeads = WHOLE, rotary: Rotary | None = None
    ) -> None:
        self.policy = policy
        self.observe: Observe = policy.observe
        self._needs, self._asks = policy.needs, policy.needs.queries
        self.block_size = block_size
        self.local_heads = local_heads
        self.rotary = rotary
        self.columns = Columns(Room(zeroed=True))
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.columns.use({})
        self._rows: dict[str, Tensor] = {}  # [B, ...]
        self._heads = 0
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.count = QueryCount(none, none, none)
        # The last single tokens, those whose block is not full in some row: nothing is copied until it is.
        self._longest = self.block_size
        self._kept: list[Tensor] = []  # [B, query_heads, 1, dim]
        self._kept_real: list[Tensor | None] = []  # [B, 1], None = all
        self._logits: Logits | None = None

    def start(self, rows: int, kv_heads: int, capacity: int, device: torch.device) -> None:
        """Make room for the statistics of a new prompt."""
        like = torch.empty(rows, kv_heads, 0, dtype=torch.float32, device=device)
        self.columns.use(self.columns.room.like(dict.fromkeys(self._needs.token_statistics, like), capacity))
        self._heads = kv_heads
        none = torch.zeros(rows, dtype=torch.int64, device=device)
        self.count = QueryCount(none, none, none)

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

    def _kept_positions(self, seen: Tensor, count: int) -> Tensor:
        """`[B, count]` positions of the stored queries, -1 for pads."""
        behind = torch.arange(count - 1, -1, -1, device=seen.device)
        if all(real is None for real in self._kept_real):
            return seen[:, None] - 1 - behind
        everywhere = torch.ones(len(seen), count, dtype=torch.bool, device=seen.device)
        pairs = zip(everywhere.split(1, dim=1), self._kept_real, strict=True)
        real = torch.cat([column if mask is None else mask for column, mask in pairs], dim=1)
        later = real.flip(-1).cumsum(-1).flip(-1)
        return (seen[:, None] - later).masked_fill(~real, -1)

    def observe_block(self, key: Tensor, positions: Tensor, seen: Tensor, due: Tensor, all_due: bool) -> None:
        """Observe the stored queries of the rows whose block has just been filled.

        Args:
            key: `[B, kv_heads or query_heads, held, dim]` in slot order.
            positions: `[B, 1 or H, held]`.
            seen: `[B]` number of real tokens so far.
            due: `[B]` bool, these rows.
            all_due: whether `due` is known to be True for all rows.
        """
        if not self._kept or self._logits is None:
            return
        positions = positions.expand(-1, self._heads, -1)
        after = self._with_kept(self.statistics(positions), key, positions, seen, due)
        self._store(after, due)
        self.count = replace(self.count, until=torch.where(due, seen, self.count.until))
        self._drop_kept(len(self._kept) if all_due else max(len(self._kept) - self._longest, 0))

    def _with_kept(
        self, statistics: Statistics, key: Tensor, positions: Tensor, seen: Tensor, due: Tensor
    ) -> Statistics:
        """The statistics after the stored queries of the rows `due`."""
        if not self._kept or self._logits is None:
            return statistics
        query = torch.cat(self._kept, dim=2)
        query_positions = self._kept_positions(seen, query.shape[2])
        query_positions = query_positions.masked_fill((query_positions < self.count.until[:, None]) | ~due[:, None], -1)
        attention = Attention(
            query, key.detach(), query_positions, positions, self._logits, self.local_heads, self.rotary
        )
        return self.observe(statistics, attention)

    def _drop_kept(self, count: int) -> None:
        del self._kept[:count], self._kept_real[:count]

    def _store(self, after: dict[str, Tensor], due: Tensor) -> None:
        for name, values in self.columns.tensors.items():
            old = values[:, :, : after[name].shape[-1]]
            old.copy_(torch.where(due[:, None, None], after[name], old))
        for name in self._needs.row_statistics:
            new = after[name]
            if name in self._rows:
                new = torch.where(due.view(-1, *[1] * (new.ndim - 1)), new, self._rows[name])
            self._rows[name] = new

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

    def observe_passing(
        self, queries: Queries, key_positions: Tensor, query_positions: Tensor, held: int, capacity: int
    ) -> None:
        """Like `observe_many`, for tokens that will not be held: only their queries count."""
        until, passing = self.count.until, (query_positions >= 0).sum(-1)
        self.observe_many(queries, key_positions, query_positions, held)
        self.settle(None, capacity)
        self.count = replace(self.count, until=until, passing=self.count.passing + passing)

    def forget(self, seen: Tensor) -> None:
        """Forget the statistics, as if no query had seen the `seen` `[B]` real tokens."""
        self.columns.zero()
        self._rows = {}
        self._drop_kept(len(self._kept))
        self.count = QueryCount(seen, seen, torch.zeros_like(seen))

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
        query_count = self.count
        self.count = replace(query_count, until=query_count.until.minimum(seen), since=query_count.since.minimum(seen))

    def take_out(self, order: Tensor, before: Tensor, after: Tensor) -> None:
        """Called after hidden tokens were removed from their slots.

        Args:
            order: see `move`.
            before, after: `[B]` number of tokens of the row with a position. If the number is smaller afterwards, the
                queries of the last tokens no longer count.
        """
        if self._kept:
            positions = self._kept_positions(before, len(self._kept))
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

    def state_dict(self) -> StateDict:
        """The state: statistics, counts and stored queries."""
        masks, queries = [real for real in self._kept_real if real is not None], self._kept
        everywhere = torch.ones(len(queries[0]), 1, dtype=torch.bool, device=queries[0].device) if queries else None
        real = [everywhere if mask is None else mask for mask in self._kept_real]
        return {
            "tokens": self.columns.state_dict(self.columns.shape[2]) if self.columns.tensors else {},
            "rows": self._rows,
            "count": self.count,
            "longest": self._longest,
            "kept": torch.cat(queries, dim=2) if queries else None,
            "kept_real": torch.cat(real, dim=1) if masks else None,  # type: ignore[arg-type]
            "logits": self._logits,
        }

    def load_state(self, saved: SavedState, kind: StateKind, rows: int, slots: int, seen: int) -> None:
        """Restore the state of another observer.

        Args:
            kind: shapes and dtype of the layer's keys.
            slots: number of slots of the layer.
            seen: number of columns seen.

        Raises:
            ValueError: the state does not fit.
        """
        self.start(rows, kind.heads, slots, saved.device)
        self.columns.load_state(saved.part("tokens"), slots)
        of_rows = saved.part("rows")
        for name in set(of_rows.keys()) & set(self._needs.row_statistics):
            self._rows[name] = of_rows.of_rows(name, rows)
        count, none = saved.part("count"), self.count.until
        self.count = QueryCount(
            count.like("until", none, 0, seen),
            count.like("since", none, 0, seen),
            count.like("passing", none, 0, LONGEST),
        )
        self._longest = saved.number("longest", self.block_size, 2 * self.block_size)
        saved.need(self._longest % self.block_size == 0, f"{self._longest} queries are kept at most")
        if saved.has("logits"):
            self._logits = Logits.load(saved.part("logits"))
        saved.need(self._logits is not None or not saved.has("kept"), "its queries have no scale")
        if saved.has("kept"):
            queries = load_queries(saved, "kept", kind, rows, None, self.local_heads.latent)
            self._kept = [*queries.split(1, dim=2)]
            self._kept_real = [None] * len(self._kept)
            if saved.has("kept_real"):
                real = saved.tensor("kept_real", (rows, len(self._kept)), torch.bool)
                self._kept_real = [*real.split(1, dim=1)]


def load_queries(saved: SavedState, key: str, kind: StateKind, rows: int, count: int | None, latent: bool) -> Tensor:
    """Read stored queries `[rows, query_heads, count, dim]`. They are as wide as keys, unless keys are latents, and
    have the dtype of keys or, under autocast, a narrower one.

    Raises:
        ValueError: shape or dtype does not fit.
    """
    queries = saved.tensor(key, (rows, None, count, None if latent else kind.key_width), None)
    narrower = torch.promote_types(queries.dtype, kind.dtype) == kind.dtype
    saved.need(narrower, f"a query is {queries.dtype}, and keys are {kind.dtype}")
    return queries
