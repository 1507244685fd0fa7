"""One paged layer: a fixed storage of keys and values, with eviction block by block."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..allocators.limits import LayerLimits
from ..attention.parts import Extra
from ..disposals import AttentionCall, Disposal, Drop, EvictionAction, Site
from ..masks.padding import Padding
from ..options.static import refusal
from ..policies import EvictionPolicy
from ..policies.needs import Heads, Needs
from ..policies.scorer import Scorer
from ..precision.few_bits import FewBits
from ..queries.observer import Observer, Queries
from ..queries.recorder import QueryRecorder
from ..store.coders import Plain
from ..store.store import Store
from ..table.budget import BlockBudget
from ..table.rollback import columns_to_remove
from ..table.shifts import held_shifts
from ..table.table import BlockTable
from ..table.victims import block_scores, blocks
from ..tensors.autocast import autocast_on, outside_autocast, without_autocast
from .intake import admit, attended, commit, filled, receive
from .layer_state import LayerState
from .moves import check_crop, crop_held, crop_pending
from .parameters import Common, Place
from .plan import Plan
from .scores import refresh
from .stats import LayerStats


def _of_state(name: str) -> Any:
    """An attribute of the layer's state. Graphs of compiled steps cannot hold it."""
    return property(attrgetter(f"state.{name}"), lambda self, value: setattr(self.state, name, value))


def _storage(name: str) -> property:
    """A property of the layer: its keys, or its values."""

    @without_autocast
    def read(self: "PagedLayer") -> Tensor | None:
        """`[batch, kv_heads, slots, head_dim]`; the first `held` slots are in use, and the number of slots grows up to
        the budget. None before the first forward. Read it only: after a write to it, the next forward raises an
        error."""
        states = self.store.read()[name == "values"] if self.store.columns.tensors else None
        return self.state.exposed.expose(name, states)

    def refuse(self: "PagedLayer", _: Tensor) -> None:
        raise _no_assignment(name)

    return property(read, refuse)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that holds at most `budget` tokens per row after every forward.

    New tokens are appended until the storage is full. After that, each overwrites one token of the block with the
    lowest score. Attention always sees the new tokens together with all held tokens: eviction follows attention.

    This is the door through which transformers and attention come. The parts of a layer are in its `state`: the keys
    and values (`store`), the bookkeeping (`table`), the queries and statistics for the policy (`recorder`), the budget
    (`budget`) and the handling of evicted tokens (`action`).

    Attributes:
        record_past: while True, new tokens wait in a buffer until `crop` or the next forward commits them.
        plan: what the layers of the cache decide together; a cache sets it.
        masks_itself, layer_idx, reads, kv_unchanged: see `KeyOwner`.

    Args:
        budget: budget and protected tokens.
        common: what the layers of a cache have in common.
        place: where the layer is in the model.
    """

    is_sliding = False
    supports_early_init = True
    record_past: bool = _of_state("recording")
    store: Store = _of_state("store")
    action: EvictionAction = _of_state("action")
    padding: Padding = _of_state("padding")
    needs: Needs = _of_state("needs")
    policy: EvictionPolicy = _of_state("scorer.policy")
    heads: Heads = _of_state("scorer.heads")
    keys = _storage("keys")
    values = _storage("values")

    def __init__(self, budget: BlockBudget, common: Common, place: Place) -> None:
        self.is_initialized = False
        self.is_compileable = common.static
        self.kv_unchanged = False
        policy, heads, needs = common.policy, place.local_heads, common.policy.needs
        self._asks = needs.queries
        store = _store(budget, common, place)
        facts = needs.absolute_noise, place.layer_idx, place.previous
        action = common.disposal.action(Site(store, common.heads, heads, budget, *facts))
        if action.acts or action.reads:
            _check_disposal(common.disposal, store.rounds, common.static)
        self.layer_idx, self.masks_itself, self.reads = place.layer_idx, common.masks_itself, action.reads
        self.recorder: QueryRecorder | None = None
        if needs.queries or self.masks_itself or self.reads:
            self.recorder = QueryRecorder(Observer(policy, budget.block_size, heads, place.rotary))
        self.state = LayerState(
            store,
            LayerLimits(budget, common.limits),
            action,
            self.recorder,
            Scorer(policy, common.heads, place.layer_idx, heads, place.rotary),
            common.padding,
            self.masks_itself,
            common.static,
            common.memory,
        )
        self.plan = Plan([self.state], common.padding, common.static)

    def __repr__(self) -> str:
        size = self.budget.tokens if self.budget.tokens is not None else self.budget.label
        return f"{type(self).__name__}(budget={size}, held={self.held}, seen={self.get_seq_length()})"

    # ---- what transformers asks -----------------------------------------------------------------------------------

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
            if count == 1 and held == most and not state.recording:
                return held, seen + 1 - held
        return held + count, seen - held

    def get_max_length(self) -> int:
        """-1: any number of tokens may be fed."""
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
            if self.state.memory is not None and not self.budget.of_first_forward:
                self.state.measure(key_states, value_states)
                self.state.memory.forget()
            if self.budget.tokens is None:
                raise ValueError("budget= is a share, and needs a prompt before storage can be made: give tokens.")
            self.store.make(key_states, value_states, self.budget.capacity)

    # ---- what is known --------------------------------------------------------------------------------------------

    @property
    def budget(self) -> BlockBudget:
        """The present budget, see `LayerLimits`."""
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
        state, recorder = self.state, self.recorder
        if state.fill is not None and not state.recording and (recorder is None or not recorder.expects):
            attended = state.fill.write(state.table, key_states, value_states)
            if attended is not None:
                state.seen += 1
                rounds, observes = state.store.rounds, False
                if recorder is not None:
                    recorder.real, recorder.arriving, recorder.expects = None, 1, True
                    # Where all keys are needed; decoded ones come later.
                    observes = not rounds and self._asks and state.known.counters.may_fill_block
                elif not rounds:
                    return attended
                if rounds and state.store.uncoded >= state.store.due:
                    with outside_autocast(key_states.device):
                        self.plan.encode_blocks()
                if self.kv_unchanged and state.fill.as_it_lies and not observes:
                    return attended
                with outside_autocast(key_states.device):
                    return filled(state, key_states, value_states, self.kv_unchanged)
        if not torch.compiler.is_compiling():
            admit(state, key_states, value_states)
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
        if autocast_on(key_states.device):
            with outside_autocast(key_states.device):
                return receive(state, self.plan, key_states, value_states, self.kv_unchanged)
        return receive(state, self.plan, key_states, value_states, self.kv_unchanged)

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
    def extra_attention(self, queries: Queries, values: Tensor) -> Extra | None:
        """What these queries read in addition to the keys and values of the last `update`; None = nothing."""
        if self.recorder is None:
            return None
        pending = self.state.pending
        real = self.recorder.real if pending is None else pending.real
        return self.action.extra_attention(AttentionCall(queries, values, self.table, pending is not None, real))

    def attended(self, queries: Queries) -> None:
        """Take the queries of the last forward, and the keys that they were compared with."""
        recorder, state = self.recorder, self.state
        if recorder is None:
            return
        single = state.pending is None and state.table is not None and not self.plan.static
        if single and not (self._asks and state.known.counters.may_fill_block):
            recorder.expects = False
            if self._asks:  # they are observed when the block is full
                recorder.observer.keep(queries, recorder.real)
            return
        with outside_autocast(queries.query.device):
            attended(self.state, self.plan, recorder, queries)

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

    # ---- taking back ----------------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take back any new token. Recording costs a copy per step, so it is off by default."""
        return self.state.recording

    def activate_past_recording(self) -> None:
        """From now on new tokens are pending until `crop` or the next forward.

        Raises:
            ValueError: the cache is static.
        """
        if self.is_compileable:
            raise refusal("take tokens back, which assisted decoding and record_past need")
        self.state.recording = True

    @without_autocast
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens.

        Args:
            tokens_to_remove: `-n` or 0 removes `n` tokens; `n > 0` keeps `n` of those seen (as in transformers 5.14).

        Raises:
            ValueError: some of these tokens were evicted and nothing was recorded, or the cache is static.
        """
        if self.is_compileable:
            raise refusal("take tokens back (crop)")
        count = columns_to_remove(tokens_to_remove, self.get_seq_length())
        check_crop(self.state, count)
        held = crop_pending(self.state, count)
        self.commit()
        crop_held(self.state, held)

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

    def stats(self) -> LayerStats:
        """Counts and bytes. Reads tensors."""
        self.plan.count_step()
        return self.state.stats()

    # ---- reading --------------------------------------------------------------------------------------------------

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


def _store(budget: BlockBudget, common: Common, place: Place) -> Store:
    # Rows or heads with different numbers of tokens need no padding, unless keys are rotated again.
    unequal = common.limits is not None and common.limits.unequal and isinstance(common.disposal, Drop)
    ragged = unequal and place.rerotation is None
    if place.codecs is None:
        return Store(Plain(place.rerotation), common.static, ragged)
    separate = ragged or common.heads == "separate"
    coder = FewBits(place.codecs, budget.block_size, budget.protected, separate)
    return Store(coder, common.static, ragged)


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
