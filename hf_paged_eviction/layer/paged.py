"""One paged layer: a fixed storage of keys and values, with eviction block by block."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..allocators.split import LayerBudget
from ..attention.parts import Part, Read
from ..autocast import autocast_on, outside_autocast, without_autocast
from ..disposals import AttentionCall, Disposal, Drop, Site
from ..graphs import outside_graphs
from ..policies.needs import Heads
from ..policies.scorer import Scorer
from ..precision.few_bits import FewBits
from ..queries.observer import Observer, Queries
from ..queries.recorder import QueryRecorder
from ..saved import SavedState, StateDict
from ..static.checks import refusal
from ..static.ring import QueryRing
from ..store.arriving import Arrivals
from ..store.coders import Plain
from ..store.columns import gather_slots
from ..store.pending import Pending
from ..store.store import Store, no_mask
from ..store.tensors import with_new
from ..table.budget import BlockBudget
from ..table.rollback import columns_to_remove
from ..table.shifts import held_shifts
from ..table.spans import Spans
from ..table.table import BlockTable
from ..table.victims import block_scores, blocks
from .gradients import refuse_gradients
from .intake import commit, overflows, take
from .layer_state import LayerState
from .memory_plan import MemoryPlan
from .moves import check_back, take_back
from .overflow import fit
from .parameters import Common, Place
from .plan import Plan
from .scores import refresh
from .stats import LayerStats


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that holds at most `budget` tokens per row after every forward.

    New tokens are appended until the storage is full. After that, each overwrites one token of the block with the
    lowest score. Attention always sees the new tokens together with all held tokens: eviction follows attention.

    The parts of a layer are the keys and values (`store`), the bookkeeping (`table`), the queries and statistics for
    the policy (`recorder`), the budget (`budget`) and the handling of evicted tokens (`action`). `state` holds them,
    with the operations on all of them.

    Attributes:
        record_past: while True, new tokens wait in a buffer until `crop` or the next forward commits them.
        plan: what the layers of the cache decide together; a cache sets it.
        masks_itself: see below.
        memory: turns a budget in bytes into tokens; None if the budget is not in bytes.
        reads, kv_unchanged: see `KeyOwner`.

    Args:
        budget: budget and protected tokens.
        common: what the layers of a cache have in common.
        place: where the layer is in the model.
    """

    is_sliding = False
    supports_early_init = True

    def __init__(self, budget: BlockBudget, common: Common, place: Place) -> None:
        self.is_initialized = False
        self.is_compileable = common.static
        self.kv_unchanged = False
        self.record_past = False
        self.policy = policy = common.policy
        self.needs = needs = policy.needs
        self.heads: Heads = common.heads
        self.layer_idx, self.local_heads, self.rotary = place.layer_idx, place.local_heads, place.rotary
        self.padding = common.padding
        self.memory = common.memory
        layer_budget = LayerBudget(budget, common.split)
        self.store = self._make_store(budget, common, place)
        self.action = common.disposal.action(
            Site(self.store, self.heads, self.local_heads, budget, needs.absolute_noise)
        )
        self._drops = not (self.action.plans or self.action.takes or self.action.reads)
        if not self._drops:
            _check_disposal(common.disposal, self.store.rounds, common.static)
        self.reads = self.action.reads
        self.recorder: QueryRecorder | None = None
        self.masks_itself = common.masks_itself
        if needs.queries or self.masks_itself or self.action.reads:
            self.recorder = QueryRecorder(Observer(policy, budget.block_size, self.local_heads, self.rotary))
        self.state = LayerState(
            self.store,
            layer_budget,
            self.action,
            self.recorder,
            Scorer(policy, self.heads, self.layer_idx, self.local_heads, self.rotary),
            self.padding,
            self.masks_itself,
            common.static,
        )
        self.plan = Plan([self.state], self.padding, common.static)
        self._arrivals = Arrivals(self.layer_idx)

    def _make_store(self, budget: BlockBudget, common: Common, place: Place) -> Store:
        # Rows or heads with different numbers of tokens need no padding, unless keys are rotated again.
        unequal = common.split is not None and common.split.unequal and isinstance(common.disposal, Drop)
        ragged = unequal and place.rerotation is None
        if place.codecs is None:
            return Store(Plain(place.rerotation), common.static, ragged)
        separate = ragged or self.heads == "separate"
        coder = FewBits(place.codecs, budget.block_size, budget.protected, separate)
        return Store(coder, common.static, ragged)

    def __repr__(self) -> str:
        size = self.budget.tokens if self.budget.tokens is not None else self.budget.label
        return f"{type(self).__name__}(budget={size}, held={self.held}, seen={self.get_seq_length()})"

    # ---- what transformers asks -----------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:
        """`[batch, kv_heads, slots, head_dim]`; the first `held` slots are in use, and the number of slots grows up to
        the budget. None before the first forward. Read it only: after a write to it, the next forward raises an
        error."""
        return self._exposed("keys")

    @keys.setter
    def keys(self, _: Tensor) -> None:
        raise _no_assignment("keys")

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self._exposed("values")

    @values.setter
    def values(self, _: Tensor) -> None:
        raise _no_assignment("values")

    @without_autocast
    def _exposed(self, name: str) -> Tensor | None:
        states = self.store.read()[name == "values"] if self.store.columns.tensors else None
        return self.state.exposed.expose(name, states)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of keys and values."""
        return self.store.dtype

    @property
    def device(self) -> torch.device | None:
        """Of keys and values."""
        return self.store.device

    def get_seq_length(self) -> int:
        """Number of tokens seen (not held) per row, pads included. A tensor inside a compiled step of a static
        cache."""
        if not self.plan.static or self.state.table is None:
            return self.state.seen
        if torch.compiler.is_compiling():
            return self.plan.seen_on(self.state.device)  # type: ignore[return-value]
        return self.state.seen + self.plan.uncounted

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """`(kv_length, kv_offset)`: the length of what the next `update` returns, and the column of its first slot.

        If the layer uses its own mask, the length is too short on purpose.
        """
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        state, most = self.state, self.state.budget.now.tokens
        if self.plan.static and state.table is not None:
            columns: int | Tensor = self.get_seq_length()
            if count == 1 and self.masks_itself:
                return 1, columns  # type: ignore[return-value]
            if count == 1 and most is not None:
                beyond = columns + 1 - most
                return most, max(beyond, 0) if isinstance(beyond, int) else beyond.clamp_min(0)  # type: ignore[return-value]
            self.plan.count_step()
        table, seen = state.table, state.seen
        held = 0 if table is None else table.counters.held
        if state.pending is not None:
            held += state.pending.count
        if seen and self.masks_itself:
            return 1, seen
        if most is not None:
            held = min(held, most)
            if count == 1 and held == most and not self.record_past:
                return held, seen + 1 - held
        return held + count, seen - held

    def get_max_length(self) -> int:
        """-1: any number of tokens may be fed."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.13."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Note dtype and device. For tensors without tokens (`early_initialization`), make the storage for the whole
        budget.

        Raises:
            ValueError: the tensors have no tokens, and the budget is a share of the prompt.
        """
        if self.store.dtype is None:
            self.store.dtype = key_states.dtype
        self.store.device = key_states.device
        self.is_initialized = True
        if key_states.shape[2] == 0 and value_states is not None and key_states.shape[0]:
            if self.memory is not None and not self.budget.of_first_forward:
                self._measure(self.memory, key_states, value_states)
            if self.budget.tokens is None:
                raise ValueError("budget= is a share, and needs a prompt before storage can be made: give tokens.")
            self.store.make(key_states, value_states, self.budget.capacity)

    # ---- what is known --------------------------------------------------------------------------------------------

    @property
    def budget(self) -> BlockBudget:
        """The present budget, see `LayerBudget`."""
        return self.state.budget.now

    @property
    def table(self) -> BlockTable:
        """The bookkeeping, as of the last token. It exists from the first forward on.

        A compiled step cannot count its token, because a graph cannot call the host when it ends. This property counts
        it first.
        """
        self.plan.count_step()
        return self.state.known

    @property
    def held(self) -> int:
        """Number of tokens held per row, pads included, without pending ones."""
        if not self.waits:  # the step ends when attention has shown its query
            self.plan.count_step()
        return self.state.held

    @property
    def out_of_order(self) -> bool:
        """Whether some column `n` of the text is not in slot `n`. Reads no tensor."""
        table = self.state.table
        return table is not None and not table.counters.in_arrival_order

    @property
    def all_real(self) -> bool:
        """Whether every slot that the last `update` returned is known to hold a real token. Reads no tensor."""
        if self.plan.static:
            return self.plan.all_real
        table = self.state.table
        return table is not None and self.state.pending is None and table.all_real

    @property
    def waits(self) -> bool:
        """Whether `attended` must come before the next `update`."""
        return self.recorder is not None and self.recorder.expects

    @property
    def all_new(self) -> bool:
        """Whether the last `update` returned only pending tokens without pads. Reads no tensor."""
        pending = self.state.pending
        return pending is not None and pending.real is None and not self.state.held

    # ---- update ---------------------------------------------------------------------------------------------------

    def _check_arriving(self, keys: Tensor, values: Tensor) -> None:
        if self.state.exposed.states:
            self.state.exposed.check()
        # After a disposal has taken tokens, and with a budget in bytes, those that are held keep their dtype.
        may_widen = self._drops and not self.is_compileable and self.memory is None
        dtype = self._arrivals.check(keys, values, may_widen).dtype
        if dtype != self.store.dtype and self.state.table is not None:
            self._widen(dtype)
        self.store.dtype = dtype

    def _widen(self, dtype: torch.dtype) -> None:
        state = self.state
        if state.pending is not None:
            state.pending = state.pending.wider(dtype)
        self.store.widen(dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens and return the keys and values that their queries see.

        If the policy needs queries, `attended` must follow.

        Args:
            key_states, value_states: `[batch, kv_heads, new, dim]`.

        Returns:
            Keys and values `[batch, kv_heads, held + new, dim]`; `[batch, kv_heads, budget, dim]` for a single token
            once the storage is full (of a static cache: always).

        Raises:
            TypeError, ValueError: they differ in kind from the held ones, see `StateKind`, or the number of rows has
                changed.
            RuntimeError: attention has not shown the queries of the last forward; or see `ExposedStates`.
        """
        recorder, fill = self.recorder, self.state.fill
        if fill is not None and not self.record_past and (recorder is None or not recorder.expects):
            attended = fill.write(self.state.table, key_states, value_states)
            if attended is not None:
                self.state.seen += 1
                return attended if recorder is None else self._filled(recorder, key_states, value_states)
        if not torch.compiler.is_compiling():
            self._check_arriving(key_states, value_states)
        if autocast_on(key_states.device):
            with outside_autocast(key_states.device):
                return self._receive(key_states, value_states)
        return self._receive(key_states, value_states)

    def _filled(self, recorder: QueryRecorder, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A single token was written, and attention will show its query."""
        table = self.state.known
        recorder.prepare(table, 1, None)
        return self._expecting(keys, *self._shown(table, keys, values))

    def _receive(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        take_in = self._step if self.plan.static else self._take_in
        if not key_states.requires_grad or torch.compiler.is_compiling():
            return take_in(key_states, value_states)
        single, later = key_states.shape[2] == 1 and self.store.rounds, self.state.came_with_gradients
        attended = take_in(key_states, value_states)
        self.state.came_with_gradients = True
        return refuse_gradients(attended, key_states) if single or later else attended

    def _step(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """As `_take_in`, of a static cache."""
        if key_states.shape[2] != 1 or self.state.table is None:
            return self._interrupt(key_states, value_states)
        if not self.plan.ready:
            self.plan.check_ready()
        attended = self.state.write(key_states, value_states, self.kv_unchanged)
        self.plan.took(self.state)
        return attended

    @outside_graphs
    def _interrupt(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.plan.interrupt()
        return self._take_in(key_states, value_states)

    def _take_in(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.state.check_attended()
        keys, values = self._use_then_evict(key_states, value_states)
        self.state.seen += key_states.shape[2]
        return self._expecting(key_states, keys, values)

    def _expecting(self, new: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens with these `new` keys attend to `keys` and `values`, which are returned; attention has to show
        their queries, if there is a recorder."""
        if self.recorder is None:
            return keys, values
        if new.shape[2]:
            self.recorder.expects = True
        if self.masks_itself and keys is not new and not self.store.copies and keys is self.store.shown()[0]:
            keys = keys[:]  # attention attaches a mask to them, which the storage must not keep
        return keys, values

    def _use_then_evict(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        state, (keys, values) = self.state, self.store.detached(key_states, value_states)
        count = keys.shape[2]
        if count == 0:
            return state.shown_with(state.held, keys, values)
        if state.pending is not None:
            self.commit()
        elif self.recorder is not None:
            self.recorder.queries = None
        table = state.table
        if table is None:
            table = self._start(keys, values)
        else:
            table.check_rows(keys.shape[0])
        seen, held = state.seen, table.counters.held
        real = self.padding.columns(seen, seen + count, keys.shape[0], keys.device)
        if self.record_past or (self.recorder is not None and (count > 1 or overflows(state, count))):
            shown = state.shown_with(held, key_states, value_states, real)
            # They are committed as soon as attention has come; and encoding, or a change of dtype, would change them.
            stays = not (self.record_past or self.store.rounds) and keys is key_states and values is value_states
            state.pending, state.fill = Pending(keys, values, real, shown if stays else None), None
            return shown
        if count == 1 or (seen and not key_states.requires_grad and not self.store.rounds):
            attended = take(state, self.plan, keys, values, real)
            if attended is not None:
                return attended
            return self._shown(table, keys, values, in_place=count == 1 and not key_states.requires_grad)
        # The caller's own tensors carry a gradient and are not rounded, which those of the storage may be.
        attended = state.shown_with(held, key_states, value_states)
        take(state, self.plan, keys, values, real)
        return attended

    def _shown(self, table: BlockTable, keys: Tensor, values: Tensor, in_place: bool = True) -> tuple[Tensor, Tensor]:
        """What tokens attend to that are held now; `in_place`: it is a single one without a gradient."""
        carrier = self._carrier(keys, table) if in_place and self.kv_unchanged else None
        counters = table.counters
        if carrier is not None:
            return carrier, values
        return self.store.shown(None if counters.overwriting else counters.held)

    def _carrier(self, keys: Tensor, table: BlockTable) -> Tensor | None:
        """See `Store.carrier`. None also where observers, or what is attended to beside the keys, need all of them."""
        if self.reads or (self.needs.queries and table.counters.may_fill_block) or torch.compiler.is_compiling():
            return None
        hides = self.masks_itself and not table.all_used
        return self.store.carrier(keys, None if table.full else table.held, self._visible if hides else no_mask)

    def _visible(self) -> Tensor | None:
        """`[B, 1 or H, held]` bool, the slots that the single token of this forward attends to; None = all."""
        mask = self.mask(1)
        return None if mask is None else mask[:, :, 0]

    def _start(self, keys: Tensor, values: Tensor) -> BlockTable:
        """The first tokens are about to come: make the table."""
        budget = self.state.budget
        budget.split.check(budget, keys.shape[1], self.local_heads)
        self.store.dtype, self.store.device = self.store.dtype or keys.dtype, keys.device
        if self.memory is not None:
            self._measure(self.memory, keys, values)
        table = self.state.start(keys, values)
        if keys.shape[0] > 1:
            self.padding.warn_if_unknown()
        return table

    def _measure(self, memory: MemoryPlan, keys: Tensor, values: Tensor) -> None:
        """Make tokens of a budget in bytes, for states like these."""
        store, (beside, passing) = self.store, self.action.most_bytes(keys, values)
        beside += store.fixed_bytes(keys, values)
        token_bytes = self.action.slot_bytes(store.token_bytes(keys, values))
        in_16_bits = 2 * (keys.numel() + values.numel())
        memory.begin(self.layer_idx, token_bytes, keys.shape[0], beside, passing, self.budget.spans, in_16_bits)

    @without_autocast
    def commit(self) -> None:
        """Commit pending tokens, and evict as necessary. Budgets that depend on all layers stay as they are."""
        commit(self.state, self.plan)

    # ---- attention ------------------------------------------------------------------------------------------------

    def mask(self, query_length: int) -> Tensor | None:
        """The mask for the queries of the last `update`, if `masks_itself`; see `KeyOwner.mask`."""
        if query_length == 1 and self.plan.joined:
            return self.state.mask()
        return None if self.recorder is None else self.recorder.mask(self.table, self.state.pending, query_length)

    @without_autocast
    def extra_attention(self, queries: Queries, values: Tensor) -> Iterable[Part | Read] | None:
        """Keys and values that these queries see in addition to those of the last `update`; None = none."""
        if self.recorder is None:
            return None
        pending = self.state.pending
        real = self.recorder.real if pending is None else pending.real
        return self.action.extra_attention(
            AttentionCall(queries, values, self.table, pending is not None, real, self.kv_unchanged)
        )

    @without_autocast
    def logit_bias(self, tokens: int) -> Tensor | None:
        """See `EvictionAction.logit_bias`."""
        return self.action.logit_bias(tokens)

    def attended(self, queries: Queries) -> None:
        """Take the queries of the last forward, and the keys that they were compared with."""
        if self.recorder is not None:
            with outside_autocast(queries.query.device):
                self._attended(self.recorder, queries)

    def _attended(self, recorder: QueryRecorder, queries: Queries) -> None:
        ring = self.state.ring
        if self.plan.joined and queries.query.shape[2] == 1:
            if ring is not None:
                ring.put(self.plan.seen[self.state.device], queries.query)
            recorder.expects = False
        elif ring is None:
            self._observe(recorder, queries)
        else:
            self._several_attended(recorder, ring, queries)

    @outside_graphs
    def _several_attended(self, recorder: QueryRecorder, ring: QueryRing, queries: Queries) -> None:
        ring.note(queries)
        self._observe(recorder, queries)

    def _observe(self, recorder: QueryRecorder, queries: Queries) -> None:
        recorder.expects = False
        if self.state.pending is None:
            recorder.observe_step(self.table, queries)
            return
        recorder.queries = queries
        if not self.record_past:
            self.plan.attended(self.state)

    @property
    def observed(self) -> dict[str, Tensor]:
        """The policy's statistics by name: `[batch, kv_heads, held]` in slot order, or `[batch, ...]`."""
        return {} if self.recorder is None else self.recorder.observer.statistics(self.table.positions)

    def forget_attention(self) -> None:
        """Forget the statistics, as if no query had seen the held tokens."""
        self.commit()
        table = self.state.table
        if self.recorder is not None and table is not None:
            self.recorder.observer.forget(table.seen - table.pads)

    @without_autocast
    def observe_waiting(self) -> None:
        """Observe the queries of pending tokens, whether or not `crop` takes the tokens back.

        Raises:
            RuntimeError: no tokens are pending, or attention has not shown their queries.
        """
        if self.recorder is not None:
            self.recorder.observe_passing(self.table, self.state.pending)

    # ---- another budget, other spans ------------------------------------------------------------------------------

    def shrink(self, budget: BlockBudget) -> None:
        """Lower the budget, evict the excess at once, and make the storage smaller.

        Pending tokens are committed first. Queries of the block that is being filled are observed at the end of the
        next block.
        """
        self.state.exposed.check()
        self.commit()
        self.state.budget.give(budget)
        self.memory = None
        if self.state.table is None:
            self.store.columns.use({})  # room of an earlier prompt
            return
        self.store.prefetch()
        fit(self.state)
        if self.recorder is not None:
            self.recorder.observer.delay()

    def protect(self, spans: tuple[Spans, ...]) -> None:
        """Protect the start and these spans from now on, and no others; `cut_anew` must follow."""
        self.state.budget.protect(spans)
        if self.state.table is not None:
            self.state.table.protect(self.budget)

    def cut_anew(self) -> None:
        """Divide the held tokens into blocks again, and let shares change.

        This is necessary because the block that was being overwritten may hold a token that is protected now.
        """
        if self.state.table is None or not self.state.table.full:
            return
        self.store.prefetch()
        fit(self.state, anew=True)
        if self.recorder is not None:
            self.recorder.observer.delay()

    @property
    def protected_gone(self) -> int:
        """Number of protected tokens that came and are not held, in the row and head with most of them. Reads
        tensors."""
        table = self.state.table
        if table is None or self.action.picks_blocks:  # these blocks come back
            return 0
        came = table.protected(torch.arange(table.seen, device=table.device).expand(table.rows, -1))
        came &= torch.arange(table.seen, device=table.device) < (table.seen - table.pads)[:, None]
        return int((came.sum(-1, keepdim=True) - table.protected(table.positions).sum(-1)).max())

    # ---- taking back ----------------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take back any new token. Recording costs a copy per step, so it is off by default."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """From now on new tokens are pending until `crop` or the next forward.

        Raises:
            ValueError: the cache is static.
        """
        if self.is_compileable:
            raise refusal("take tokens back, which assisted decoding and record_past need")
        self.record_past = True

    @without_autocast
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens.

        Args:
            tokens_to_remove: `-n` or 0 removes `n` tokens; `n > 0` keeps `n` of those seen (as in transformers up to
                5.12).

        Raises:
            ValueError: some of these tokens were evicted and nothing was recorded, or the cache is static.
        """
        self.check_crop(tokens_to_remove)
        count = self.crop_pending(columns_to_remove(tokens_to_remove, self.get_seq_length()))
        self.commit()
        self.crop_held(count)

    def crop_pending(self, count: int) -> int:
        """Take back pending tokens, the newest of `count`. Returns the number of tokens to take back that are held,
        for `crop_held`; the pending ones must be committed before."""
        state = self.state
        state.seen -= count
        if state.pending is None:
            return count
        dropped = min(count, state.waiting)
        state.pending = state.pending.first(state.waiting - dropped)
        return count - dropped

    @without_autocast
    def crop_held(self, count: int) -> None:
        """Take back the newest `count` tokens; none are pending."""
        if self.state.table is not None and not self.state.seen:
            self.reset()
        elif count:
            take_back(self.state, count)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise the `ValueError` that `crop` would raise, if any."""
        self.state.exposed.check()
        if self.is_compileable:
            raise refusal("take tokens back (crop)")
        table = self.state.table
        # Pending tokens can always be dropped.
        count = columns_to_remove(tokens_to_remove, self.get_seq_length()) - self.state.waiting
        if table is not None and 0 < count < table.seen:
            check_back(self.state, count)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state.exposed.check()
        if self.plan.static:
            self.plan.interrupt()
        with torch.inference_mode(False):  # these tensors are written to later, perhaps outside of inference mode
            self.state.map_rows(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row `i` by row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place."""
        self._map_rows(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64 or bool `[rows]`)."""
        if self.state.table is not None:
            indices = indices.to(self.state.table.device)
            self._map_rows(lambda states: states[indices])

    # ---- life -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every token. Keep the storage for the next prompt of the same shape."""
        self.plan.forget()
        self.state.clear()
        self.store.dtype = self._arrivals.kind = None  # the model's dtype may change before the next prompt

    def release(self) -> None:
        """Forget every token and free the storage."""
        self.reset()
        self.store.columns.use({})
        self.is_initialized = False

    def offload(self) -> None:
        """Move keys and values to the CPU; the (small) bookkeeping stays."""
        self.state.exposed.check()
        self.store.columns.move_to("cpu")

    def prefetch(self) -> None:
        """Bring keys and values back."""
        self.store.prefetch()

    def state_dict(self) -> StateDict:
        """The state of the layer.

        Raises:
            ValueError: tokens are pending. RuntimeError: the last forward failed in the middle.
        """
        self.state.exposed.check()
        if self.plan.static:
            self.plan.count_whole_step()
        if self.state.table is not None and not self.state.waiting:
            self.commit()
        state = {**self.state.state_dict(), "kv_unchanged": self.kv_unchanged}
        if not self.plan.static or self.state.table is None:
            return state
        ring = None if self.state.ring is None else self.state.ring.state_dict()
        return {**state, "ring": ring, "all_real": self.plan.all_real if self.plan.joined else None}

    def load_state(self, saved: SavedState, rows: int, seen: int) -> bool | None:
        """Restore the state of a layer with the same options, with so many rows and columns.

        Returns:
            Whether single tokens need no mask in the run of compiled steps of the saved layer; None = it was in no run.

        Raises:
            ValueError: it does not fit.
        """
        self._arrivals.kind = kind = self.state.load_state(saved, rows, seen)
        self.is_initialized, self.kv_unchanged = True, saved.flag("kv_unchanged")
        if not self.plan.static:
            return None
        if self.state.ring is not None:
            self.state.ring.load_state(saved.part("ring"), kind, self.local_heads.latent)
        return saved.flag("all_real") if saved.has("all_real") else None

    @property
    def widths(self) -> tuple[int, int]:
        """Head sizes of keys and of values."""
        kind = self._arrivals.kind
        return (0, 0) if kind is None else (kind.key_width, kind.value_width)

    def stats(self) -> LayerStats:
        """Counts and bytes. Reads tensors."""
        self.plan.count_step()
        stats = self.state.stats(self.layer_idx)
        hidden = self.padding.tokens_hidden if stats.held else 0
        return replace(stats, evicted_tokens=stats.evicted_tokens + hidden) if hidden else stats

    # ---- reading --------------------------------------------------------------------------------------------------

    @without_autocast
    def in_order(self) -> tuple[Tensor, Tensor] | None:
        """A copy of the held keys and values, pending ones included, `[batch, kv_heads, tokens, dim]` in the order of
        the text, without rerotation. None before the first forward.

        Pads keep their columns until something is evicted; after that, the pads that are still held come first.

        Raises:
            ValueError: rows or heads hold different numbers of tokens.
        """
        self.state.exposed.check()
        if self.state.table is None:
            return None
        table, pending = self.table, self.state.pending
        held, order = table.held, table.positions.argsort(dim=-1, stable=True)
        if table.limits is not None:  # some slots belong to no row
            order = order[..., held - self._equal_count(table) :]
        elif table.seen == held and (columns := self.padding.columns(0, held, table.rows, table.device)) is not None:
            places = columns[:, None].expand_as(order).long().argsort(dim=-1, stable=True)
            order = torch.empty_like(order).scatter(-1, places, order)
        keys, values = (gather_slots(states, order) for states in self.store.read(held))
        return (keys, values) if pending is None else with_new((keys, values), pending.keys, pending.values)

    def _equal_count(self, table: BlockTable) -> int:
        counts = table.used.sum(-1)
        if int(counts.min()) < int(counts.max()):
            raise ValueError(
                f"Rows or KV heads of layer {self.layer_idx} hold different numbers of tokens, which no tensor [rows, "
                "kv_heads, tokens, head_dim] holds. Use allocator='uniform', or copy.deepcopy(cache) for a copy of the "
                "cache."
            )
        return int(counts.max())

    @property
    def positions(self) -> Tensor:
        """`[batch, kv_heads, held]` int64: position of the token in each held slot, -1 for a pad."""
        if self.state.table is None:
            return torch.empty(0, 0, 0, dtype=torch.int64, device="cpu")
        return self.table.positions.expand(-1, self.state.heads, -1)

    @property
    def shifts(self) -> Tensor:
        """Like `positions`: the number that attention adds to the position of each key, see `table.gaps`."""
        shifts = None if self.state.table is None else held_shifts(self.table)
        return torch.zeros_like(self.positions) if shifts is None else shifts.expand(self.positions.shape)

    def block_table(self) -> Tensor:
        """`[batch, kv_heads, blocks, block_size]` int64 positions in logical order, -1 for places without a real
        token."""
        return blocks(self.table).expand(-1, self.state.heads, -1, -1)

    @without_autocast
    def block_scores(self) -> Tensor:
        """`[batch, kv_heads, blocks]` float32, the scores that the next eviction compares; nan for blocks that are not
        full."""
        self.plan.count_step()
        refresh(self.state)
        return block_scores(self.table).expand(-1, self.state.heads, -1)


def _no_assignment(name: str) -> AttributeError:
    return AttributeError(
        f"layer.{name} cannot be assigned: which token lies where is kept beside it. To take back the newest tokens "
        "call cache.crop(-n), to choose or repeat rows cache.batch_select_indices or cache.batch_repeat_interleave, to "
        "hold fewer tokens cache.shrink(budget); for tensors of your own use DynamicCache(ddp_cache_data=list(cache))."
    )


def _check_disposal(disposal: Disposal, rounds: bool, static: bool) -> None:
    """Refuse a disposal that handles evicted tokens itself where it cannot."""
    if rounds:
        raise ValueError(
            f"bits= rounds tokens, and the disposal {disposal.label!r} needs unrounded ones: use disposal='drop' with "
            "bits=, or bits=None."
        )
    if static:
        raise ValueError(
            f"static=True compiles steps that see only the slots, and the disposal {disposal.label!r} handles evicted "
            "tokens itself: use disposal='drop' with static=True, or static=False."
        )
