"""All that one layer holds, part by part, and what happens to every part alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..allocators.quota import Quota
from ..disposals import Held, Outlet
from ..parts import Snapshot, persistent
from ..policies.scorer import Scorer
from ..queries.listener import Listener
from ..queries.observer import ObserverSnapshot
from ..static.ring import RingSnapshot
from ..store.marks import Marks
from ..store.pending import Pending
from ..store.store import HeldSnapshot, Store
from ..store.tensors import with_new
from ..table.budget import BlockBudget
from ..table.table import BlockTable, TableSnapshot
from .stats import LayerStats


@dataclass(frozen=True)
class PagedSnapshot(Snapshot):
    """What a paged layer holds, part by part. Without a table it has met no token.

    Attributes:
        tokens: its budget, once known.
        processes, first_head: over how many processes the layer was split, and which of its heads were the first here.
        store, table, observer, ring: of these parts, where there are any.
        outlet: of the disposal, where it keeps anything.
        scores: see `Quota`.
        all_real: of the run of compiled steps that the layer takes part in, see `StaticRun`; None where there is none.
        marks: `[batch, kv_heads, held]`, where the policy reads any.
        as_given: see `KeyOwner`.
    """

    tokens: int | None = None
    processes: int = 1
    first_head: int = 0
    store: HeldSnapshot | None = None
    table: TableSnapshot | None = None
    observer: ObserverSnapshot | None = None
    ring: RingSnapshot | None = None
    outlet: Snapshot | None = None
    scores: Tensor | None = None
    all_real: bool | None = None
    marks: Tensor | None = None
    as_given: bool = False


class Contents:
    """The parts of one layer: store, table, quota, outlet, listener and marks.

    Attributes:
        store: where keys and values lie.
        quota: how many tokens there may be.
        outlet: through which tokens leave.
        listener: what attention says of the tokens; None where nobody asks.
        marks: what the policy is told of them from outside; None where it does not ask.
        table: which token is where; None before the first forward.
        seen: columns fed so far, pads and tokens that wait included.
        pending: tokens that wait for `crop` or for attention, beside those in the table; None = no tokens.
        came_with_gradients: whether a forward was to have a gradient.

    Args:
        store, quota, outlet, listener, marks: see above.
        scorer: knows which KV heads evict the same tokens, and what the policy needs.
    """

    def __init__(
        self,
        store: Store,
        quota: Quota,
        outlet: Outlet,
        listener: Listener | None,
        scorer: Scorer,
        marks: Marks | None = None,
    ) -> None:
        self.store = store
        self.quota = quota
        self.outlet = outlet
        self.listener = listener
        self.marks = marks
        self.table: BlockTable | None = None
        self.seen = 0
        self.pending: Pending | None = None
        self.came_with_gradients = False
        self._scorer, self._needs = scorer, scorer.policy.needs

    # ---- what there is --------------------------------------------------------------------------------------------

    @property
    def known(self) -> BlockTable:
        """The table.

        Raises:
            RuntimeError: nothing was seen yet.
        """
        if self.table is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.table

    @property
    def waiting(self) -> int:
        """Tokens per row in `pending`."""
        return 0 if self.pending is None else self.pending.count

    @property
    def held(self) -> int:
        """Slots in use, equal in all rows."""
        return 0 if self.table is None else self.table.counters.held

    @property
    def device(self) -> torch.device:
        """Where the tokens lie."""
        return self.store.tensors[0].device

    @property
    def rows(self) -> int:
        """Of the batch."""
        return self.store.shape[0]

    @property
    def heads(self) -> int:
        """KV heads of the layer that this process holds."""
        return self.store.shape[1]

    def alike(self, other: "Contents") -> bool:
        """Whether victims of both can be chosen together now. Reads no tensor."""
        if other is self:
            return True
        if other.table is None or self.outlet.picks_blocks or not self.known.alike(other.table):
            return False
        mine, theirs = self.store.tensors, other.store.tensors
        local, its_local = self._scorer.local_heads, other._scorer.local_heads
        return (mine[0].shape, mine[1].shape, mine[0].device, local) == (
            *(theirs[0].shape, theirs[1].shape, theirs[0].device),
            its_local,
        )

    def stats(self, layer_idx: int) -> LayerStats:
        """Counts and bytes. Reads tensors."""
        table, outlet = self.table, self.outlet
        held, budget = 0 if table is None else table.held, self.quota.budget.tokens
        evicted_tokens = evicted_blocks = 0
        if table is not None and held:
            if table.limits is not None:
                held = budget = round(table.limits.double().mean().item())
            evicted_tokens, evicted_blocks = int(table.evicted_tokens.sum()), int(table.evicted_blocks.sum())
        return LayerStats(
            layer_idx=layer_idx,
            seen=self.seen,
            held=held,
            budget=budget,
            evicted_tokens=evicted_tokens,
            evicted_blocks=evicted_blocks,
            storage_bytes=self.store.bytes,
            storage_parts=self.store.bytes_by_part,
            summary_bytes=outlet.device_bytes,
            host_bytes=outlet.host_bytes,
            faults=outlet.faults,
            demoted_tokens=outlet.tokens_beside,
        )

    # ---- what attention reads -------------------------------------------------------------------------------------

    def shown_with(self, held: int, keys: Tensor, values: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first `held` slots as attention gets them, see `Store.shown`, with new states behind them.

        Args:
            real: `[B, n]` bool, which of the new ones are no pads; None = all.
        """
        if held == 0:
            return keys, values
        # A single token sees what it would see if it were taken in at once.
        single = self.store.rounds and keys.shape[2] == 1
        return with_new(self.store.shown_before(held, real) if single else self.store.shown(held), keys, values)

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self, keys: Tensor, values: Tensor) -> BlockTable:
        """The first tokens are about to come, `[batch, kv_heads, new, dim]`: make room, and a table."""
        rows, heads, count, _ = keys.shape
        self.quota.budget = budget = self.quota.budget.resolve(count)
        capacity, device = budget.capacity, keys.device
        least = self.store.slots_to_begin_with(count, budget.block_size, capacity)
        self.store.start(keys, values, least, capacity)
        sets = self._scorer.sets(heads)
        self.table = table = self._new_table(budget, rows, sets, device)
        self.outlet.start(rows, heads, sets, capacity, device)
        if self.listener is not None:
            self.listener.observer.start(rows, heads, capacity, device)
        if self.marks is not None:
            self.marks.start(rows, heads, capacity, device)
        return table

    def _new_table(self, budget: BlockBudget, rows: int, sets: int, device: torch.device) -> BlockTable:
        needs, picks = self._needs, self.outlet.picks_blocks
        interval = 1 if picks else needs.decision_interval
        return BlockTable(
            *(budget, rows, sets, device, needs.token_local and not picks, interval),
            absolute_noise=needs.absolute_noise,
            shifting=self.store.turning is not None,
        )

    def clear(self) -> None:
        """Forget every token. The storage stays."""
        self.table = self.pending = None
        self.seen = 0
        self.came_with_gradients = False
        self.quota.clear()
        self.store.clear()
        self.outlet.clear()
        if self.listener is not None:
            self.listener.clear()
        if self.marks is not None:
            self.marks.clear()

    # ---- what happens to all --------------------------------------------------------------------------------------

    def let_go(self, slots: Tensor, positions: Tensor) -> None:
        """What stands in these slots `[B, S, 1]`, tokens at `positions` `[B, S, 1]`, is about to be overwritten."""
        self.outlet.let_go(Held(*self.store.at(slots), positions), slots)

    def plan(self, begins: Tensor) -> None:
        """A victim was chosen where `begins` `[B, S]` says so."""
        table, store = self.known, self.store
        self.outlet.plan(table.choice.slots, begins, Held(*store.read(), table.positions, table.scores))

    def turn_keys(self) -> None:
        """Turn the keys held to where they stand now, for attention; see `table.gaps`."""
        shifts = self.known.shifts
        if shifts is not None:
            self.store.turn(shifts)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to everything."""
        if self.table is None:
            return
        self.store.map_rows(change)
        self.table.map_rows(change)
        self.quota.scores = None
        self.outlet.map_rows(change)
        if self.pending is not None:
            self.pending = self.pending.map_rows(change)
        if self.listener is not None:
            self.listener.map_rows(change)
        if self.marks is not None:
            self.marks.map_rows(change)

    def move(self, order: Tensor | None, count: int, pads: Tensor) -> None:
        """Take back `count` columns, the others being moved as `order` `[B, S, held]` says; see `BlockTable.shrink`."""
        table = self.known
        if order is not None:
            self.store.reorder(order)
            if self.marks is not None:
                self.marks.reorder(order)
        table.shrink(order, count, pads)
        self.outlet.move(order, table.held)
        self.store.take_back(table.seen - table.pads)
        self.quota.scores = None
        if self.listener is not None:
            self.listener.observer.move(order, table.seen - table.pads, count)

    def take_out(self, gone: Tensor, pads: Tensor) -> None:
        """The table has emptied these slots, `[B, S, held]` bool: let them be used first, in the sets `[B, S]` that
        have any. `pads` `[B]` columns count for no position from now on."""
        table, sets = self.known, gone.any(-1)
        before = table.seen - table.pads
        order = table.order_of_text(sets)
        self.store.vacate(gone)
        self.store.reorder(order)
        if self.marks is not None:
            self.marks.reorder(order)
        table.put_in_order(order, sets, pads)
        self.outlet.move(order, table.held)
        after = table.seen - table.pads
        self.store.take_back(after)
        self.quota.scores = None
        if self.listener is not None:
            self.listener.observer.take_out(order, before, after)

    def settle(self, table: BlockTable, kept: Tensor | None) -> None:
        """The table has changed: of the held and new tokens `kept` `[B, S, C]` stay; None = all."""
        if self.outlet.takes:
            self.outlet.settle(kept, table.positions, table.capacity)
        if self.listener is not None:
            self.listener.observer.settle(kept, table.capacity)
        if self.marks is not None and kept is None:
            self.marks.resize(table.capacity, table.held)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> PagedSnapshot:
        """What every part holds.

        Raises:
            ValueError: tokens wait for `crop`.
        """
        if self.waiting:
            raise ValueError(
                f"{self.waiting} tokens wait for crop() to say whether they stay: call cache.crop(0), which keeps "
                "them, or cache.crop(-n) first."
            )
        if self.table is None:
            return PagedSnapshot()
        local = self._scorer.local_heads
        return PagedSnapshot(
            tokens=self.quota.budget.tokens,
            processes=local.processes(self.heads),
            first_head=local.first_head(self.heads),
            store=self.store.snapshot(self.table.held),
            table=self.table.snapshot(),
            observer=None if self.listener is None else self.listener.observer.snapshot(),
            outlet=self.outlet.snapshot(),
            scores=self.quota.scores,
            marks=None if self.marks is None else self.marks.snapshot(self.table.held),
        )

    def restore(self, saved: PagedSnapshot, device: torch.device) -> None:
        """Hold what the parts of another layer held. Nothing is checked here, see `recipes.saving.checks`."""
        if saved.table is None or saved.store is None or saved.tokens is None:
            return
        quota, (rows, heads) = self.quota, saved.store.shape[:2]
        quota.check(heads, self._scorer.local_heads)
        quota.resize(saved.tokens)
        self.store.restore(saved.store, device)
        sets = self._scorer.sets(heads)
        self.table = self._new_table(quota.budget, rows, sets, device)
        self.table.restore(saved.table)
        self.seen = self.table.seen
        if self.listener is not None and saved.observer is not None:
            self.listener.observer.restore(saved.observer, heads, device)
        if self.marks is not None and saved.marks is not None:
            self.marks.restore(saved.marks, self.table.capacity, device)
        self.outlet.start(rows, heads, sets, self.table.capacity, device)
        if saved.outlet is not None:
            self.outlet.restore(saved.outlet, device)
        quota.scores = None if saved.scores is None else persistent(saved.scores.to(device))
