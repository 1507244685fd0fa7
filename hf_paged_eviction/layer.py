"""One layer of the cache: keys and values in a fixed storage, evicted block by block."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .allocators.quota import Quota
from .disposals import Asked, Disposal, Drop, Held, Site
from .integration.heads import WHOLE, HeadShare
from .integration.padding import Padding
from .parts import Snapshot, persistent
from .policies import EvictionPolicy, QueryCount
from .policies.scorer import Heads, Scorer
from .queries.listener import Listener
from .queries.observer import Observer, ObserverSnapshot, Queries
from .queries.parts import Part, Read
from .queries.ring import QueryRing, RingSnapshot
from .rotary import Rotary
from .store.codec import Codec
from .store.coded import CodedStore, make_store
from .store.pending import Pending
from .store.store import HeldSnapshot
from .store.tensors import with_new
from .store.turning import Turning
from .table.budget import BlockBudget
from .table.cohort import Cohorts
from .table.memory import MemoryPlan
from .table.ranking import KEEP, best_blocks, best_tokens, best_within, not_kept, rank_keys, rank_whole_blocks
from .table.steps import StaticRun, StaticSteps, outside_graphs, refusal
from .table.table import BlockTable, TableSnapshot
from .table.takeback import columns_to_remove, order_without


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
    """

    tokens: int | None
    processes: int
    first_head: int
    store: HeldSnapshot | None
    table: TableSnapshot | None
    observer: ObserverSnapshot | None
    ring: RingSnapshot | None
    outlet: Snapshot | None
    scores: Tensor | None
    all_real: bool | None


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Holds at most `budget` tokens per row after every forward.

    A new token is appended until the storage is full; from then on it overwrites one token of the block with the
    lowest score. Attention always sees the new tokens next to everything held: use, then evict.

    What differs between layers is in their parts: where keys and values lie (`store`), which token is where (`table`),
    what attention says of them (`listener`), how many there may be (`quota`), and what becomes of
    those that leave (`outlet`).

    Attributes:
        record_past: while True, new tokens wait in a buffer until `crop` or the next forward commits them.
        cohorts: of the layers that may choose victims with this one; the layer alone until a cache says otherwise.
        steps: what the layers of a static cache share; None in any other.
        quota: how many tokens each row or head may hold; all as many as `budget` says until a cache says otherwise.
        memory: where the budget of the cache is in bytes, what makes tokens of them; None where it is not.
        outlet: through which every token leaves that is not taken back by `crop`.

    Args:
        budget: sizes in tokens.
        policy: scores tokens.
        heads: "shared" = all KV heads of the layer evict the same tokens, "separate" = each its own.
        layer_idx: index in the model.
        padding: what is known of the batch's pads; shared by the layers of a cache.
        share: which of the layer's KV heads this process holds.
        rotary: how the layer turns keys by position, where the policy asks for it; None = it does not.
        masks_itself: the model's own mask does not fit this layer, whose number of tokens is not that of the others.
        static: take single tokens without a branch or a counter, see `StaticSteps`. A single token then gets the whole
            storage back, slots that are not in use yet included: the mask hides them.
        disposal: what becomes of tokens that leave.
        turning: closes the gaps that eviction leaves, see `table.gaps`; None = keys stay at their place in the text.
        codecs: of keys and of values, where they are kept in few bits.
    """

    is_sliding = False
    # Rolling back without a trace needs recording, which costs a copy per step: not worth it for a stop check.
    is_croppable = False
    supports_early_init = True

    def __init__(
        self,
        budget: BlockBudget,
        policy: EvictionPolicy,
        heads: Heads = "shared",
        layer_idx: int = 0,
        padding: Padding | None = None,
        share: HeadShare = WHOLE,
        rotary: Rotary | None = None,
        *,
        masks_itself: bool = False,
        static: bool = False,
        disposal: Disposal | None = None,
        turning: Turning | None = None,
        codecs: tuple[Codec, Codec] | None = None,
    ) -> None:
        self.is_initialized = False
        self.is_compileable = static
        self.record_past = False
        self._asked = self.budget = budget
        self.policy = policy
        self.needs = needs = policy.needs
        self.heads: Heads = heads
        self.layer_idx = layer_idx
        self._scorer = Scorer(policy, heads, layer_idx, share, rotary)
        self.padding = padding if padding is not None else Padding()
        self.store = make_store(budget, static, turning, codecs, heads == "separate")
        self.quota = Quota()
        self.memory: MemoryPlan | None = None
        self.listener: Listener | None = None
        site = Site(self.store, heads, share, budget, needs.absolute_noise)
        self.outlet = (disposal or Drop()).outlet(site)
        if self.store.rounds and (self.outlet.plans or self.outlet.reads or self.outlet.ranks):
            raise ValueError(
                f"bits= keeps tokens in few bits, and the disposal {(disposal or Drop()).label!r} moves or reads them "
                "as they came: use disposal='drop' with bits=, or bits=None."
            )
        if needs.queries or masks_itself or self.outlet.reads:
            self.listener = Listener(Observer(policy, budget.block_size, share, rotary), masks_itself)
        self._ring = QueryRing() if static and needs.queries else None
        self._table: BlockTable | None = None
        self._pending: Pending | None = None
        self.cohorts: Cohorts[PagedLayer] = Cohorts([self])
        self.steps: StaticSteps | None = None
        self._run: StaticRun | None = None
        self._first_row = 0

    def __repr__(self) -> str:
        size = self.budget.tokens if self.budget.tokens is not None else self.budget.label
        return f"{type(self).__name__}(budget={size}, held={self.held}, seen={self.get_seq_length()})"

    # ---- what transformers asks -----------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:
        """`[batch, kv_heads, slots, head_dim]`, of which the first `held` slots are in use; the slots become more until
        there are as many as the budget. None before the first forward."""
        return self.store.keys

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self.store.values

    @property
    def dtype(self) -> torch.dtype | None:
        """Of keys and values."""
        return self.store.dtype

    @property
    def device(self) -> torch.device | None:
        """Of keys and values."""
        return self.store.device

    def get_seq_length(self) -> int:
        """Tokens seen per row, pads included: what positions continue from, never what is held. Within a compiled step
        of a static cache a tensor."""
        if self.steps is not None and torch.compiler.is_compiling() and self._table is not None:
            return self.steps.seen_on(self.table_device)  # type: ignore[return-value]
        seen = 0 if self._table is None else self.table.seen
        return seen + self._waiting

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length of what the next `update` returns, and the column of its first slot: `(kv_length, kv_offset)`.

        Where the model's mask is not used, one that is too narrow is asked for.
        """
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        if count == 1 and self.steps is not None and self._table is not None:
            return self._static_mask_sizes(self.steps)
        held, seen = self.held + self._waiting, self.get_seq_length()
        if seen and self.masks_itself:
            return 1, seen
        if self.budget.tokens is not None:
            held = min(held, self.budget.tokens)
            if count == 1 and held == self.budget.tokens and not self.record_past:
                return held, seen + 1 - held
        return held + count, seen - held

    def _static_mask_sizes(self, steps: StaticSteps) -> tuple[int, int]:
        capacity = self.budget.capacity
        if torch.compiler.is_compiling():
            return capacity, steps.seen_on(self.table_device).add(1 - capacity).clamp_min(0)  # type: ignore[return-value]
        return capacity, max(self.get_seq_length() + 1 - capacity, 0)

    def get_max_length(self) -> int:
        """-1: any number of tokens may be fed."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.13."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Note dtype and device. Tensors without tokens (`early_initialization`) make the storage of the whole budget.

        Raises:
            ValueError: for tensors without tokens where a `keep_ratio` waits for its prompt.
        """
        self.store.dtype, self.store.device = key_states.dtype, key_states.device
        self.is_initialized = True
        if key_states.shape[2] == 0 and value_states is not None and key_states.shape[0]:
            self._measure(key_states, value_states)
            if self.budget.tokens is None:
                raise ValueError("keep_ratio= needs a prompt before its storage can be made: give budget= instead.")
            self.store.make(key_states, value_states, self.budget.capacity)

    # ---- what is known --------------------------------------------------------------------------------------------

    @property
    def table(self) -> BlockTable:
        """The bookkeeping, as of the last token. Exists from the first forward on."""
        if self.steps is not None:
            self.steps.settle()
        if self._table is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._table

    @property
    def table_device(self) -> torch.device:
        """Where the tokens lie."""
        return self.storage[0].device

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """What the store keeps, `[batch, kv_heads, slots, ...]` each, used or not."""
        return self.store.tensors

    @property
    def storage_bytes(self) -> int:
        """Bytes of key and value storage, used or not."""
        return self.store.bytes

    @property
    def held(self) -> int:
        """Tokens held per row, pads included, without those still waiting for `crop`."""
        return 0 if self._table is None else self.table.held

    @property
    def _waiting(self) -> int:
        return 0 if self._pending is None else self._pending.count

    @property
    def share(self) -> HeadShare:
        """Which of the layer's KV heads this process holds."""
        return self._scorer.share

    @property
    def rotary(self) -> Rotary | None:
        """How the layer turns keys by position, where the policy asks for it."""
        return self._scorer.rotary

    @property
    def all_real(self) -> bool:
        """Whether every slot that the last `update` returned is known to hold a real token. Reads no tensor."""
        if self.steps is not None:
            return self.steps.all_real
        return self._table is not None and self._pending is None and self.table.all_real

    # ---- update ---------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens and return what their queries may attend to.

        Where attention is listened to, `attended` must follow.

        Args:
            key_states, value_states: `[batch, kv_heads, new, dim]`.

        Returns:
            Keys and values `[batch, kv_heads, held + new, dim]`; `[batch, kv_heads, budget, dim]` for a single token
            once the storage is full (of a static cache: always).

        Raises:
            ValueError: another number of rows than the cache holds.
            RuntimeError: attention did not tell of the last forward.
        """
        if self.steps is None:
            return self._take_in(key_states, value_states)
        if key_states.shape[2] != 1 or self._table is None:
            return self._several(self.steps, key_states, value_states)
        self.steps.check_ready()
        return self._write(self.steps, key_states, value_states)

    def _take_in(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.listener is None:
            return self._use_then_evict(key_states, value_states)
        self.listener.check_told(self.layer_idx)
        keys, values = self._use_then_evict(key_states, value_states)
        if key_states.shape[2]:
            self.listener.expect()
        if self.masks_itself and not self.store.rounds and keys is self.store.shown()[0]:
            keys = keys[:]  # attention notes on them what may be seen, which the storage must not keep
        return keys, values

    def _use_then_evict(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.store.detached(key_states, value_states)
        count = keys.shape[2]
        if count == 0:
            return self._read_with(self.held, keys, values)
        self.commit()
        self._start(keys, values)
        table = self.table
        real = self.padding.columns(table.seen, table.seen + count, keys.shape[0], keys.device)
        if self._holds_back(count):
            self._pending = Pending(keys, values, real)
            return self._read_with(table.held, key_states, value_states, real)
        if count == 1 or (table.seen and not key_states.requires_grad and not self.store.rounds):
            every_slot = table.held == table.capacity
            attended = self._take(keys, values, real)
            return self._read(None if every_slot else table.held) if attended is None else attended
        # The caller's own tensors carry a gradient and are not rounded, which those of the storage may be.
        attended = self._read_with(table.held, key_states, value_states)
        self._take(keys, values, real)
        return attended

    def _start(self, keys: Tensor, values: Tensor) -> None:
        """Make store and table, if this is the first forward."""
        if self._table is not None:
            self._check_rows(keys.shape[0])
            return
        rows, heads, count, _ = keys.shape
        self.quota.check(heads, self.share)
        self._measure(keys, values)
        self.budget = self.budget.resolve(count)
        capacity = self.budget.capacity
        least = self.store.slots_to_begin_with(count, self.budget.block_size, capacity)
        self.store.start(keys, values, least, capacity)
        self._table = self._new_table(rows, heads, keys.device)
        if rows > 1:
            self.padding.warn_if_unknown()
        self.outlet.start(rows, heads, self._scorer.sets(heads), capacity, keys.device)
        if self.listener is not None:
            self.listener.observer.start(rows, heads, capacity, keys.device)

    def _new_table(self, rows: int, heads: int, device: torch.device) -> BlockTable:
        needs, ranks = self.needs, self.outlet.ranks
        sets, interval = self._scorer.sets(heads), 1 if ranks else needs.decision_interval
        return BlockTable(
            *(self.budget, rows, sets, device, needs.token_local and not ranks, interval, needs.absolute_noise),
            shifting=self.store.turning is not None,
        )

    def _measure(self, keys: Tensor, values: Tensor) -> None:
        """Make tokens of a budget in bytes, for states like these."""
        if self.memory is not None:
            store, token_bytes = self.store, self.outlet.slot_bytes(self.store.token_bytes(keys, values))
            self.memory.begin(self, token_bytes, keys.shape[0], store.fixed_bytes(keys, values))

    def _check_rows(self, rows: int) -> None:
        held = self.table.rows
        if rows != held:
            raise ValueError(
                f"The cache holds {held} rows but got {rows}. Use a new cache or `cache.reset()` for another batch, "
                "`batch_repeat_interleave` or `batch_select_indices` to change the rows of this one."
            )

    def _holds_back(self, count: int) -> bool:
        """Whether `count` new tokens wait outside the storage for now."""
        return self.record_past or (self.listener is not None and (count > 1 or self._overflows(count)))

    def commit(self) -> None:
        """Take in the tokens that wait for `crop` or for attention, evicting as needed."""
        if self.listener is not None:
            self.listener.check_told(self.layer_idx)
        pending, self._pending = self._pending, None
        if pending is not None and pending.count:
            self._take(pending.keys, pending.values, pending.real)
        if self.listener is not None:
            self.listener.queries = None

    def _read(self, held: int | None = None) -> tuple[Tensor, Tensor]:
        """The first `held` slots, or all, as attention gets them. Held tokens reach it on no other way."""
        return self.store.shown(held)

    def _read_with(self, held: int, keys: Tensor, values: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `_read`, with new states behind them; `real` `[B, n]` says which of these are no pads, None = all."""
        if held == 0:
            return keys, values
        # A single token sees what it would see if it were taken in at once.
        single = self.store.rounds and keys.shape[2] == 1
        return with_new(self.store.shown_before(held, real) if single else self._read(held), keys, values)

    # ---- append, overwrite, overflow ------------------------------------------------------------------------------

    def _take(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Hold new tokens. Returns all that they may attend to, where that was put together; else `_read` gives it."""
        table, count, listener = self.table, keys.shape[2], self.listener
        if count > 1 and self.store.rounds:
            self.store.meet(keys, real)
        self.quota.scores = None
        waited = None if listener is None else listener.queries
        if listener is not None:
            listener.prepare(table, count, real)
        if count > 1 and self.quota.unequal and listener is not None:
            if listener.queries is not None:
                positions = table.positions_with(listener.positions).expand(-1, keys.shape[1], -1)
                self.quota.decide(self, listener.queries, positions, listener.positions)
            return self._overflow(keys, values, real)
        if self._overflows(count):
            return self._overflow(keys, values, real)
        if count == 1 and table.held == table.capacity:
            self._overwrite(keys, values, real)
        else:
            self._append(keys, values, real)
        if waited is not None and listener is not None and count == 1:
            listener.observe_waiting_step(table, waited)
        return None

    def _overflows(self, count: int) -> bool:
        """Whether `count` new tokens make the layer choose anew all that it holds."""
        table = self.table
        room = table.capacity - table.held - count
        if count == 1 and room < 0:
            return False
        # Pads in the middle have to move to the lowest slots before the first slot is overwritten.
        return room < 0 or (room == 0 and self.padding.irregular)

    def _append(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        table, count, held = self.table, keys.shape[2], self.held
        self.store.grow(held, held + count, self.budget.block_size, self.budget.capacity)
        if self.store.rounds:
            self._append_to_encode(held, keys, values, real)
        else:
            self.store.append(held, keys, values)
            table.append(count, real)
        if self.listener is not None:
            self.listener.observe_appended(table, held, count)

    def _append_to_encode(self, held: int, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """A single token waits for others, until a block is encoded; several are encoded at once."""
        table, count = self.table, keys.shape[2]
        if count == 1 and held:
            slot = torch.full((table.rows, 1, 1), held, dtype=torch.int64, device=self.table_device)
            self.store.overwrite(slot, keys, values, real)
            table.append(count, real)
            self._encode_block()
        else:
            self._encode()
            table.append(count, real)
            self.store.append(held, keys, values, table.positions)
            self._note_scores(keys, values)

    def _overwrite(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        table = self.table
        if table.victims_due:
            self.cohorts.of(self).choose_victims(real)
        slot = table.next_slot()
        if self.outlet.takes:
            self._let_go(slot, table.positions_in(slot, real))
        self.store.overwrite(slot, keys, values, real)  # a pad evicts nothing
        table.overwritten(real)
        self._encode_block()

    def turn_keys(self) -> None:
        """Turn the keys held to where they stand now, for attention; see `table.gaps`."""
        if self.table.shifts is not None:
            self.store.turn(self.table.shifts)

    def _overflow(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        self._encode()
        table, count = self.table, keys.shape[2]
        positions = table.positions_with(table.new_positions(count, real)[:, 0])
        attended = full_k, full_v = self._read_with(table.held, keys, values, real)
        if self.store.turns and table.held:
            full_k, full_v = with_new(self.store.read(table.held), keys, values)
        scores = self._score_overflow(full_k, full_v, positions, count)
        self._keep_best(full_k, full_v, positions, scores, count, real)
        return attended

    def _keep_best(
        self, full_k: Tensor, full_v: Tensor, positions: Tensor, scores: Tensor, count: int, real: Tensor | None
    ) -> None:
        """Of the `held + count` tokens in these states, keep the best."""
        limits = self._limits(scores, positions)
        if limits is None:
            kept = self._best(scores, positions, self.table.seen + count)
            kept_positions = positions.gather(-1, kept)
        else:
            self.budget = self.budget.of(int(limits.max()))
            kept, kept_positions = best_within(self._rank(scores, positions), positions, limits, self.budget.capacity)
        shifts = self.table.moved_shifts(kept, kept_positions, positions, count)
        if self.outlet.takes or self.outlet.plans:
            leaves = not_kept(positions, kept, kept_positions)
            staying = self.outlet.overflow(Held(full_k, full_v, positions.expand_as(leaves), scores), leaves)
            full_k, full_v = staying.keys, staying.values
        # Without new tokens, these states are views of the storage.
        anew = count == 0 or self.store.slots != self.budget.capacity
        self.store.keep(full_k, full_v, kept, self.table.held, kept_positions, anew)
        scores = scores.gather(-1, kept)
        self.quota.scores = scores if limits is not None else None
        scored = scores if self.needs.token_local and not self.outlet.ranks else None
        self.table.replace(kept_positions, scored, count, real, limits, shifts)
        if self.outlet.ranks:
            self.table.align()
        self.turn_keys()
        self._settle(kept)

    def _let_go(self, slots: Tensor, positions: Tensor) -> None:
        """What stands in these slots `[B, S, 1]`, tokens at `positions` `[B, S, 1]`, is about to be overwritten."""
        self.outlet.let_go(Held(*self.store.at(slots), positions), slots)

    def plan(self, begins: Tensor) -> None:
        """A victim was chosen where `begins` `[B, S]` says so."""
        table = self.table
        self.outlet.plan(table.choice.slots, begins, Held(*self.store.read(), table.positions, table.scores))

    def _settle(self, kept: Tensor | None) -> None:
        """Of the held and new tokens `kept` `[B, S, C]` stay; None = all."""
        if self.outlet.takes:
            self.outlet.settle(kept, self.table.positions, self.table.capacity)
        if self.listener is not None:
            self.listener.observer.settle(kept, self.table.capacity)

    def _best(self, scores: Tensor, positions: Tensor, seen: int) -> Tensor:
        """Indices `[B, S, C]` of the tokens that stay, in slot order; `seen` columns by then."""
        capacity, size = self.budget.capacity, self.budget.block_size
        if not self.outlet.ranks:
            return best_tokens(self._rank(scores, positions), positions, capacity)
        rank = rank_whole_blocks(scores, positions, seen // size + 1, size, self.needs.absolute_noise)
        return best_blocks(rank, positions.expand_as(scores), self.budget)

    def _rank(self, scores: Tensor, positions: Tensor) -> Tensor:
        """`[B, S, tokens]` int64: the order in which tokens go, the protected ones last."""
        rank = rank_keys(scores, positions, positions >= 0, self.needs.absolute_noise)
        return rank.masked_fill(self._protected(positions), KEEP)

    def _protected(self, positions: Tensor) -> Tensor:
        """The row's first real tokens and its newest."""
        newest = positions.amax(-1, keepdim=True) - self.budget.recent
        return (positions >= 0) & ((positions < self.budget.protected) | (positions > newest))

    def _limits(self, scores: Tensor, positions: Tensor) -> Tensor | None:
        if not self.quota.unequal:
            return None
        pinned = scores.masked_fill(self._protected(positions), float("inf"))
        return self.quota.limits(self._asked, pinned.masked_fill(positions < 0, float("-inf")), positions)

    # ---- attention ------------------------------------------------------------------------------------------------

    @property
    def masks_itself(self) -> bool:
        """Whether the model's own mask does not fit this layer."""
        return self.listener is not None and self.listener.masks_itself

    def mask(self, query_length: int) -> Tensor | None:
        """What the queries of the last `update` may attend to, see `QueryListener.mask`; where `masks_itself`."""
        return None if self.listener is None else self.listener.mask(self.table, self._pending, query_length)

    def beside(self, queries: Queries, values: Tensor) -> Iterable[Part | Read] | None:
        """What these queries attend to beside the tokens that the last `update` returned; None = nothing."""
        if not self.outlet.reads or self.listener is None:
            return None
        pending = self._pending
        real = self.listener.real if pending is None else pending.real
        return self.outlet.beside(Asked(queries, values, self.table, pending is not None, real))

    def logit_bias(self, tokens: int) -> Tensor | None:
        """See `Outlet.logit_bias`."""
        return self.outlet.logit_bias(tokens) if self.outlet.reads else None

    def attended(self, queries: Queries) -> None:
        """The queries of the last forward, and what they were compared with."""
        listener = self.listener
        if listener is None:
            return
        if self._ring is not None and self.steps is not None:
            if queries.query.shape[2] == 1 and self._run is not None:
                listener.told(None)
                self._ring.put(self.steps.seen[self.table_device], queries.query)
                return
            self._several_attended(listener, self._ring, queries)
            return
        self._observe(listener, queries)

    def _observe(self, listener: Listener, queries: Queries) -> None:
        if self._pending is None:
            listener.told(None)
            listener.observe_step(self.table, queries)
            return
        listener.told(queries)
        if not self.record_past:
            self.commit()

    @property
    def observer_bytes(self) -> int:
        """Bytes of statistics and of kept queries."""
        return 0 if self.listener is None else self.listener.bytes

    @property
    def observed(self) -> dict[str, Tensor]:
        """The policy's statistics by name: `[batch, kv_heads, held]` in slot order, or `[batch, ...]`."""
        return self._statistics(None)

    @property
    def queries_observed(self) -> QueryCount | None:
        """How many queries the policy has observed."""
        return None if self.listener is None else self.listener.count

    def _statistics(self, slots: Tensor | None) -> dict[str, Tensor]:
        """What the policy knows of the tokens in these slots `[B, S, n]`, or in all that are held."""
        return {} if self.listener is None else self.listener.statistics(self.table, slots)

    def forget_attention(self) -> None:
        """Forget what has been observed, as if the tokens held had met no query yet."""
        self.commit()
        self.quota.scores = None
        if self.listener is not None and self._table is not None:
            self.listener.observer.forget(self.table.seen - self.table.pads)

    def observe_waiting(self) -> None:
        """Let the queries of the tokens that wait count for those held, whether or not `crop` takes them back.

        Raises:
            RuntimeError: no tokens wait, or attention has not told of their queries.
        """
        self.quota.scores = None
        if self.listener is not None:
            self.listener.observe_passing(self.table, self._pending)

    # ---- scores ---------------------------------------------------------------------------------------------------

    def alike(self, other: "PagedLayer") -> bool:
        """Whether victims of both can be chosen together now. Reads no tensor."""
        if other is self:
            return True
        if other._table is None or self.outlet.ranks or not self.table.alike(other.table):
            return False
        mine, theirs = self.storage, other.storage
        return (mine[0].shape, mine[1].shape, mine[0].device, self.share) == (
            *(theirs[0].shape, theirs[1].shape, theirs[0].device),
            other.share,
        )

    def score_alike(self, keys: Tensor, values: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Scores of tokens of this layer and of layers like it, see `Scorer`; for policies that know no layers."""
        return self._scorer(keys, values, positions, seen, budget=self._room)

    def score_slots(self, slots: Tensor | None) -> Tensor:
        """Scores `[B, S, n]` of the tokens in the slots `[B, S, n]`, or of all that are held."""
        table = self.table
        if self.outlet.ranks and table.full:
            return self._frame_ranks(slots)
        if self.scores_early:
            self._score_waiting()
            return table.scores if slots is None else table.scores.gather(-1, slots)
        if slots is None:
            positions, keys, values = table.positions, *self.store.read(table.held)
        else:
            positions, keys, values = table.positions.gather(-1, slots), *self.store.at(slots)
        known, seen = self._statistics(slots), table.seen - table.pads
        return self._scorer(keys, values, positions, seen, known, self.queries_observed, self._room)

    def _frame_ranks(self, slots: Tensor | None) -> Tensor:
        """As `score_slots`, of an outlet that says itself which block goes next."""
        table = self.table
        logical = self.outlet.frame_ranks(table).repeat_interleave(self.budget.block_size, dim=-1)
        order = table.phase.order
        ranks = logical if order is None else torch.empty_like(logical).scatter(-1, order, logical)
        return ranks if slots is None else ranks.gather(-1, slots)

    @property
    def _room(self) -> int | Tensor:
        return self.quota.room(self._asked, self.budget)

    def _score_overflow(self, keys: Tensor, values: Tensor, positions: Tensor, count: int) -> Tensor:
        table, listener = self.table, self.listener
        seen = positions[:, 0].amax(-1) + 1
        if listener is not None:
            listener.observe_overflow(positions, table.held)
            if not self.scores_early:
                known = listener.observer.statistics(positions)
                return self._scorer(keys, values, positions, seen, known, listener.count, self._room)
        if not self.needs.token_local or table.held == 0:
            return self.score_alike(keys, values, positions, seen)
        table.refresh_scores(self.score_slots)
        new = self.score_alike(keys[:, :, -count:], values[:, :, -count:], positions[..., -count:], seen)
        return torch.cat([table.scores, new], dim=-1)

    # ---- precision ------------------------------------------------------------------------------------------------

    @property
    def scores_early(self) -> bool:
        """Whether tokens are scored when they come, since they will be rounded, and no more after that."""
        return self.store.rounds and self.needs.token_local

    def _encode_block(self) -> None:
        """Encode the newest block, if it is full."""
        if self.store.waiting == self.budget.block_size:
            self._encode()

    def _encode(self) -> None:
        """Score and encode the single tokens that still wait for both."""
        if self.store.waiting:
            self._score_waiting()
            self.store.encode()

    def _score_waiting(self) -> None:
        if not self.scores_early or not isinstance(self.store, CodedStore) or not self.store.waiting:
            return
        table, scores = self.table, self.table.tokens.scores
        slots, keys, values, new = self.store.newest()
        slots = slots[:, : scores.shape[1]]
        found = self.score_alike(keys, values, table.positions.gather(-1, slots), table.seen - table.pads)
        scores.scatter_(-1, slots, torch.where(new, found, scores.gather(-1, slots)))

    def _note_scores(self, keys: Tensor, values: Tensor) -> None:
        """Several tokens were appended."""
        if self.scores_early:
            table, count = self.table, keys.shape[2]
            found = self.score_alike(keys, values, table.positions[..., -count:], table.seen - table.pads)
            table.tokens.scores[:, :, table.held - count : table.held] = found

    # ---- another budget -------------------------------------------------------------------------------------------

    def shrink(self, budget: BlockBudget) -> None:
        """Hold at most `budget` tokens from now on: evict at once what is too much, and give up the storage for it.

        Tokens that wait for `crop` are taken in first. Queries of the block that is being filled count at the end of
        the next one.
        """
        self.commit()
        self._asked = self.budget = budget
        self.memory = None
        if self._table is None:
            self.store.give_up()  # room that an earlier prompt left
            return
        self.store.prefetch()
        self._fit()
        if self.listener is not None:
            self.listener.observer.delay()

    def resize(self) -> None:
        """Give up, or get room for, tokens: the quota has changed. Tokens that wait for `crop` are decided on later."""
        if self._table is not None and self._pending is None:
            self._fit()

    def _fit(self) -> None:
        """Bring tokens and storage in line with the budget, or the quota, which has changed."""
        self._encode()
        table = self.table
        if self.quota.unequal:
            self._fit_quota(table)
        elif table.capacity == self.budget.capacity:
            return
        elif table.held >= self.budget.capacity:
            table.refresh_scores(self.score_slots)
            self._keep_best(*self.store.read(table.held), table.positions, table.scores, 0, None)
        else:
            if self.store.slots > self.budget.capacity:
                self.store.move(self.budget.capacity, table.held)
            table.resize(self.budget.capacity)
            self._settle(None)

    def _fit_quota(self, table: BlockTable) -> None:
        positions = table.positions
        scores = None if self.needs.reads_budget else self.quota.scores
        scores = self.score_slots(None) if scores is None else scores
        limits = self._limits(scores, positions)
        if limits is not None and (table.limits is None or not torch.equal(limits, table.limits)):
            self._keep_best(*self.store.read(table.held), positions, scores, 0, None)
        self.budget = self.budget.of(table.capacity)

    # ---- taking back ----------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """From now on new tokens wait until `crop` (or the next forward) commits them.

        Raises:
            ValueError: the cache is static.
        """
        if self.is_compileable:
            raise refusal("take tokens back, which assisted decoding and record_past need")
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens.

        Args:
            tokens_to_remove: `-n` or 0 removes `n` tokens; `n > 0` keeps `n` tokens of those seen (transformers up
                to 5.12 calls it so).

        Raises:
            ValueError: some of these tokens have been evicted already and nothing was recorded, or the cache is static.
        """
        self.check_crop(tokens_to_remove)
        count = columns_to_remove(tokens_to_remove, self.get_seq_length())
        if self._pending is not None:
            dropped = min(count, self._waiting)
            self._pending = self._pending.first(self._waiting - dropped)
            count -= dropped
        self.commit()
        if count:
            self._remove(count)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise the `ValueError` of `crop`, if it would, before anything is changed."""
        if self.is_compileable:
            raise refusal("take tokens back (crop)")
        count = (
            columns_to_remove(tokens_to_remove, self.get_seq_length()) - self._waiting
        )  # what waits can always be dropped
        if self._table is not None and 0 < count < self.table.seen:
            self.outlet.check_crop(count)
            order_without(self.table, count, self._pads_without(count))

    def _remove(self, count: int) -> None:
        table = self.table
        if count == table.seen:
            self._clear()
            return
        pads = self._pads_without(count)
        self._move(order_without(table, count, pads), count, pads)

    def _move(self, order: Tensor | None, count: int, pads: Tensor) -> None:
        """Take back `count` columns, the others being moved as `order` `[B, S, held]` says; see `BlockTable.shrink`."""
        self._encode()
        table, held = self.table, self.held
        if order is not None:
            self.store.reorder(order)
        table.shrink(order, count, pads)
        self.outlet.move(order, table.held)
        self.store.take_back(table.seen - table.pads)
        self.quota.scores = None
        if self.listener is not None:
            self.listener.observer.move(order, held, table.seen - table.pads, count)

    def _pads_without(self, count: int) -> Tensor:
        """`[B]` pads among all but the last `count` columns."""
        table = self.table
        later = self.padding.columns(table.seen - count, table.seen, table.rows, table.device)
        return table.pads if later is None else table.pads - (~later).sum(-1)

    # ---- compiled steps -------------------------------------------------------------------------------------------

    @outside_graphs
    def _several(self, steps: StaticSteps, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        steps.interrupt()
        return self._take_in(key_states, value_states)

    @outside_graphs
    def _several_attended(self, listener: Listener, ring: QueryRing, queries: Queries) -> None:
        ring.note(queries)
        self._observe(listener, queries)

    def _write(self, steps: StaticSteps, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a single token, within a graph."""
        if self.listener is not None:
            self.listener.check_told(self.layer_idx)
            self.listener.expect()
        rows = self.storage[0].shape[0]
        if self._run is None or key_states.shape[0] != rows:
            self._check_rows(key_states.shape[0])
            raise RuntimeError(f"Layer {self.layer_idx} was left out of the forward before this one.")
        slots = self._run.slots[self._first_row : self._first_row + rows]
        if self.outlet.takes:
            self._let_go(slots, self._run.leaving[self._first_row : self._first_row + rows])
        self.store.write(slots[:, :, 0], key_states, value_states)
        steps.took(self)
        return self._read()

    def join(self, run: StaticRun, index: int) -> None:
        """Take single tokens as layer `index` of this run."""
        rows = self.storage[0].shape[0]
        self._run, self._first_row = run, index * rows
        if self._ring is not None:
            self._ring.make(rows, self.budget.block_size)

    def written(self) -> None:
        """The host has counted a token that a graph has written."""
        if self.listener is not None and self._ring is not None:
            table = self.table
            self.listener.prepare(table, 1, None)
            held = table.held if table.may_fill_block or not self.store.rounds else 0  # to read is to decode
            self.listener.observe_step(table, self._ring.take(table.seen, self._read(held)[0]))
        self.store.wrote()
        self._encode_block()

    def sort_pads(self) -> bool:
        """Bring pads in the middle of the text to the lowest slots, if the next token takes the last free slot.

        Returns:
            Whether anything was moved.
        """
        if not self.padding.irregular or self.table.held + 1 != self.table.capacity:
            return False
        self._move(self.table.positions.argsort(stable=True, dim=-1), 0, self.table.pads)
        return True

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.steps is not None:
            self.steps.interrupt()
        if self._table is None:
            return
        self.store.map_rows(change)
        self._table.map_rows(change)
        self.quota.scores = None
        self.outlet.map_rows(change)
        if self._pending is not None:
            self._pending = self._pending.map_rows(change)
        if self.listener is not None:
            self.listener.map_rows(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place."""
        self._map_rows(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64 or bool `[rows]`)."""
        if self._table is not None:
            indices = indices.to(self._table.device)
            self._map_rows(lambda states: states[indices])

    # ---- life -----------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        if self.steps is not None:
            self.steps.interrupt()
        self.budget = self._asked
        self._table = self._pending = self._run = None
        self.quota.scores = None
        self.store.clear()
        self.outlet.clear()
        if self.listener is not None:
            self.listener.clear()

    def reset(self) -> None:
        """Forget every token. The storage stays and serves the next prompt of the same shape."""
        self._clear()

    def release(self) -> None:
        """Forget every token and give the storage up, to the pool if there is one."""
        self.reset()
        self.store.give_up()
        self.is_initialized = False

    def offload(self) -> None:
        """Move keys and values to the CPU; the (small) bookkeeping stays."""
        self.store.offload()

    def prefetch(self) -> None:
        """Bring keys and values back."""
        self.store.prefetch()

    # ---- saving ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> PagedSnapshot:
        """All that the layer holds.

        Raises:
            ValueError: tokens wait for `crop`. RuntimeError: attention did not tell of the last forward.
        """
        if self._waiting:
            raise ValueError(
                f"{self._waiting} tokens wait for crop() to say whether they stay: call cache.crop(0), which keeps "
                "them, or cache.crop(-n) first."
            )
        if self._table is None:
            return PagedSnapshot(None, 1, 0, None, None, None, None, None, None, None)
        self.commit()
        heads = self.storage[0].shape[1]
        return PagedSnapshot(
            tokens=self.budget.tokens,
            processes=self.share.processes(heads),
            first_head=self.share.first_head(heads),
            store=self.store.snapshot(self.held),
            table=self.table.snapshot(),
            observer=None if self.listener is None else self.listener.observer.snapshot(),
            ring=None if self._ring is None else self._ring.snapshot(),
            outlet=self.outlet.snapshot(),
            scores=self.quota.scores,
            all_real=self._run.all_real if self._run is not None and self.steps and self.steps.joined else None,
        )

    def restore(self, saved: PagedSnapshot, device: torch.device) -> None:
        """Hold what another layer made in the same way held. Nothing is checked here, see `saving.checks`."""
        if saved.table is None or saved.store is None or saved.tokens is None:
            return
        self.budget = self._asked.of(saved.tokens)
        rows, heads = saved.store.shape[:2]
        self.store.restore(saved.store, device)
        self.is_initialized = True
        self._table = self._new_table(rows, heads, device)
        self._table.restore(saved.table)
        if self.listener is not None and saved.observer is not None:
            self.listener.observer.restore(saved.observer, heads, device)
        if self._ring is not None and saved.ring is not None:
            self._ring.restore(saved.ring, device)
        self.outlet.start(rows, heads, self._scorer.sets(heads), self.table.capacity, device)
        if saved.outlet is not None:
            self.outlet.restore(saved.outlet, device)
        self.quota.scores = None if saved.scores is None else persistent(saved.scores.to(device))

    # ---- reading --------------------------------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        """`[batch, kv_heads, held]` int64: position of the token in each held slot, -1 for a pad."""
        if self._table is None:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.table.positions.expand(-1, self.storage[0].shape[1], -1)

    @property
    def shifts(self) -> Tensor:
        """As `positions`: how far forward attention sees the token of each slot, see `table.gaps`."""
        shifts = None if self._table is None else self.table.held_shifts
        return torch.zeros_like(self.positions) if shifts is None else shifts.expand(self.positions.shape)

    def block_table(self) -> Tensor:
        """`[batch, kv_heads, blocks, block_size]` int64 positions in logical order, -1 where no real token is."""
        table = self.table.blocks()
        return table.expand(-1, self.storage[0].shape[1], -1, -1)

    def block_scores(self) -> Tensor:
        """`[batch, kv_heads, blocks]` float32, what the next eviction ranks; nan for blocks not yet filled."""
        self.table.refresh_scores(self.score_slots)
        return self.table.block_scores().expand(-1, self.storage[0].shape[1], -1)

    def visible_next(self, query_length: int) -> Tensor:
        """Which of the slots that the next `update` returns are real, the new tokens left out.

        Returns:
            `[batch, n]` bool, where `n` is the held part of `get_mask_sizes(query_length)`; for a single token that
            will overwrite a slot, `n` counts that slot too. Slots of a static cache that are not in use yet are left to
            causality.
        """
        visible = self.table.positions[:, 0] >= 0
        if query_length == 1 and self.steps is not None and not self.table.full:
            return visible
        kv_length, _ = self.get_mask_sizes(query_length)
        if kv_length == self.held + self._waiting + query_length:
            return visible
        # Full: the pads are the lowest slots, and the new token takes the highest of them.
        pads = (~visible).sum(-1, keepdim=True)
        return torch.arange(self.held, device=visible.device) >= pads - 1
