"""The parts of one layer, and operations on all of them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..allocators.limits import LayerLimits
from ..disposals import EvictionAction, Held
from ..masks.padding import Padding
from ..policies.scorer import Scorer
from ..queries.recorder import QueryRecorder
from ..queries.ring import QueryRing
from ..store.arriving import Arrivals
from ..store.pending import Offered, Pending
from ..store.store import Store
from ..store.tensors import with_new
from ..table import moves
from ..table.budget import BlockBudget
from ..table.table import BlockTable
from .exposed import ExposedStates
from .memory_plan import MemoryPlan
from .single import BlockFill, NextSlots
from .stats import LayerStats

#: Keys and values for attention; None where they are read from the store.
Shown = tuple[Tensor, Tensor] | None


class LayerState:
    """One layer as the layers of a cache see each other: its parts, and what is done to all of them.

    Other modules of this folder work on it: `intake` takes in tokens, `scores` asks the policy, `overflow` chooses what
    stays, `moves` takes tokens back or out. A layer holds its plan, and the plan holds these states. If it held layers,
    or states held the plan, the reference cycle would keep the storage of an unused cache until Python's garbage
    collector runs.

    Attributes:
        store: keys and values.
        budget: budget of the layer.
        action: handles evicted tokens.
        recorder: records queries for the policy; None if the policy needs no queries.
        scorer: calls the policy, and knows which KV heads evict together.
        padding: the pads of the batch.
        exposed: checks the tensors that the user has.
        needs: needs of the policy.
        own_mask: whether the model's mask does not fit the layer.
        may_fill: whether single tokens need no work beside writing, until a block is full.
        early: whether each token is scored once, before it is rounded: tokens of a prompt when they come, single tokens
            just before their block is encoded.
        ring: stores the queries of compiled steps; None if there are none.
        memory: turns a budget in bytes into tokens; None if the budget is not in bytes.
        arrivals: checks the kind of new keys and values.
        recording: whether new tokens wait until `crop` or the next forward commits them.
        table: positions, scores and victims; None before the first forward.
        seen: number of columns seen, pads and pending tokens included.
        pending: tokens that wait for `crop` or for attention, in addition to those in the table; None = none.
        offered: what the others were told of these tokens; None between forwards.
        came_with_gradients: whether some forward needed gradients.
        fill: writes the single tokens of the present block; None where the next one needs checks.
        unobserved_at: columns seen when a block was full whose queries are not observed yet; -1 = there is none.
        divided_at: columns seen when budgets of rows were divided that single tokens had filled, see `Limits.foresee`.
        next_slots: slots of the next token in compiled steps; None before the first.

    Args:
        store, budget, action, recorder, scorer, padding, own_mask: see above.
        static: whether single tokens are taken in compiled steps.
        memory: see above.
    """

    def __init__(
        self,
        store: Store,
        budget: LayerLimits,
        action: EvictionAction,
        recorder: QueryRecorder | None,
        scorer: Scorer,
        padding: Padding,
        own_mask: bool,
        static: bool,
        memory: MemoryPlan | None,
    ) -> None:
        self.store, self.budget, self.action, self.recorder = store, budget, action, recorder
        self.scorer, self.padding, self.own_mask = scorer, padding, own_mask
        needs = scorer.policy.needs
        if action.scores:  # other scores decide between two prompts, and none of them lasts
            needs = replace(needs, token_local=False, decision_interval=1)
        self.needs = needs
        self.exposed = ExposedStates(scorer.layer_idx)
        self.arrivals = Arrivals(scorer.layer_idx)
        self.memory, self.recording = memory, False
        self.may_fill = not (action.acts or action.reads or static)
        self.early = store.rounds and needs.token_local
        self.ring = QueryRing() if static and needs.queries else None
        self.next_slots: NextSlots | None = None
        self._places = 0, 0, 0  # of its rows among those of `next_slots`, and its slots
        self._hides = self._fills = False  # whether steps need a mask, and one that changes
        self._forget()

    def _forget(self) -> None:
        self.table: BlockTable | None = None
        self.seen = 0
        self.pending: Pending | None = None
        self.offered: Offered | None = None
        self.came_with_gradients = False
        self.fill: BlockFill | None = None
        self.divided_at = self.unobserved_at = -1

    # ---- what there is --------------------------------------------------------------------------------------------

    @property
    def known(self) -> BlockTable:
        """The table, which must exist.

        Raises:
            RuntimeError: the layer has seen no token.
        """
        if self.table is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.table

    @property
    def waiting(self) -> int:
        """Number of tokens per row in `pending`."""
        return 0 if self.pending is None else self.pending.count

    @property
    def held(self) -> int:
        """Number of slots in use, equal in all rows."""
        return 0 if self.table is None else self.table.counters.held

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.store.tensors[0].device

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return self.store.columns.shape[0]

    @property
    def heads(self) -> int:
        """Number of KV heads that this process holds."""
        return self.store.columns.shape[1]

    @property
    def to_divide(self) -> bool:
        """Whether single tokens may have filled rows whose budgets are not divided yet."""
        limits, counters = self.budget.table, self.known.counters
        waits = limits.foreseen is not None and self.divided_at != counters.seen
        return waits and counters.seen in counters.full_at_values and limits.foresees(counters.seen)

    @property
    def alike(self) -> tuple[object, ...] | None:
        """What is equal in layers that choose their victims together now; None = this one does not. Reads no tensor."""
        table, columns, scorer = self.table, self.store.columns, self.scorer
        if table is None or self.action.scores or self.to_divide:
            return None
        counters, sizes, positions = table.counters, table.sizes, table.tokens.positions
        ragged, rounds = columns.layout.lengths is not None, self.store.rounds
        states = [(column.shape[1 if ragged else 3 :], column.device) for column in columns.tensors.values()]
        # Layers that are full may have different sizes; until then, they become full together.
        grows = None if counters.overwriting else (table.capacity, *vars(counters).values())
        chosen, shifts = counters.chosen_at == counters.seen, table.tokens.shifts is not None
        protected = sizes.recent, sizes.spans
        return (
            counters.seen,
            chosen,
            grows,
            positions.shape[:2],
            shifts,
            protected,
            table.device,
            ragged,
            rounds,
            *states,
            scorer.local_heads,
        )

    @property
    def exact_kind(self) -> tuple[object, ...]:
        """Of the tokens that are not rounded, see `Exact.alike`."""
        return self.store.exact.alike if self.store.rounds else ()

    def stats(self) -> LayerStats:
        """Counts and bytes. Reads tensors."""
        table = self.table
        held, budget = 0 if table is None else table.held, self.budget.now.tokens
        evicted_tokens = evicted_blocks = 0
        if table is not None and self.seen:
            if held and table.limits is not None:
                held = budget = round(table.limits.double().mean().item())
            evicted_tokens = int(table.evicted_tokens.sum()) + self.padding.tokens_hidden
            evicted_blocks = int(table.choice.evicted_blocks.sum())
        return LayerStats(
            layer_idx=self.scorer.layer_idx,
            seen=self.seen,
            held=held,
            budget=budget,
            evicted_tokens=evicted_tokens,
            evicted_blocks=evicted_blocks,
            storage_bytes=self.store.columns.bytes,
            storage_parts=self.store.bytes_by_part,
            summary_bytes=self.action.summary_bytes,
        )

    # ---- what attention reads -------------------------------------------------------------------------------------

    def shown_with(self, held: int, keys: Tensor, values: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first `held` slots as attention gets them, see `Store.shown`, with new states behind them.

        Args:
            real: `[B, n]` bool, False for pads among the new tokens; None = all are real.
        """
        if held == 0:
            return keys, values
        # A pending single token sees the same as one that is taken in at once.
        single = self.store.rounds and keys.shape[2] == 1
        return with_new(self.store.shown_before(held, real) if single else self.store.shown(held), keys, values)

    # ---- compiled steps -------------------------------------------------------------------------------------------

    def join(self, next_slots: NextSlots, index: int) -> None:
        """Take compiled steps as layer `index` of a group."""
        rows, table = self.rows, self.known
        self.next_slots, self._places = next_slots, (index * rows, (index + 1) * rows, table.capacity)
        self._hides = self.own_mask and not (table.full and table.all_real)
        self._fills = self._hides and not table.all_used
        if self.ring is not None:
            self.ring.make(rows, self.budget.now.block_size)

    def write(self, keys: Tensor, values: Tensor, kv_unchanged: bool) -> tuple[Tensor, Tensor]:
        """Take in a single token, `[B, H, 1, dim]`, in a compiled step, whose graph this is part of; returns keys and
        values for attention.

        Args:
            kv_unchanged: see `KeyOwner`.

        Raises:
            RuntimeError: the step was not prepared. ValueError: the number of rows has changed.
        """
        next_slots, (first, end, _), store = self.next_slots, self._places, self.store
        if self.recorder is not None:
            self.check_attended()
            self.recorder.expects = True
        if next_slots is None or keys.shape[0] != end - first:
            self.known.check_rows(keys.shape[0])
            raise RuntimeError(f"Layer {self.scorer.layer_idx} was left out of the forward before this one.")
        store.write(next_slots.slots[first:end, :, 0], keys, values)
        filling = self._visible() if self._fills else None
        carrier = store.carrier(keys, None, lambda: filling) if kv_unchanged and not keys.requires_grad else None
        return store.shown() if carrier is None else (carrier, values)

    def mask(self) -> Tensor | None:
        """The slots that the token of this compiled step sees, `[B, 1 or kv_heads, 1, slots]` bool; None = all."""
        visible = self._visible() if self._hides else None
        return None if visible is None else visible[:, :, None]

    def _visible(self) -> Tensor | None:
        """`[B, S, slots]` bool, the slots with real tokens."""
        visible = None if self.next_slots is None else self.next_slots.visible
        first, end, slots = self._places
        return None if visible is None else visible[first:end, :, :slots]

    def written(self) -> None:
        """Called after the host has counted a token that a compiled step has written."""
        store, recorder, table = self.store, self.recorder, self.known
        self.seen += 1
        if recorder is not None and self.ring is not None:
            recorder.prepare(table, 1, None)
            reads = table.counters.may_fill_block or not store.rounds  # where tokens are rounded, all are decoded
            held = table.held if reads else 0
            recorder.observe_step(table, self.ring.take(table.seen, store.shown(held)[0]))
        if store.rounds:
            store.wrote()

    def check_attended(self) -> None:
        """Raise RuntimeError if attention has not shown the queries of the last forward."""
        if self.recorder is not None and self.recorder.expects:
            raise self.recorder.untold(self.scorer.layer_idx)

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self, keys: Tensor, values: Tensor) -> BlockTable:
        """Make the storage and the table for the first tokens, `[batch, kv_heads, new, dim]`."""
        rows, heads, count, _ = keys.shape
        self.budget.check(heads, self.scorer.local_heads)
        self.store.dtype, self.store.device = self.store.dtype or keys.dtype, keys.device
        self.measure(keys, values)
        budget = self.budget.begin(count)
        capacity, device = budget.capacity, keys.device
        least = self.store.slots_to_begin_with(count, budget.block_size, capacity)
        self.store.start(keys, values, least, capacity)
        sets = self.scorer.sets(heads)
        self.table = table = self.new_table(budget, rows, sets, device)
        self.action.start(table)
        if self.recorder is not None:
            self.recorder.observer.start(rows, heads, capacity, device)
        return table

    def measure(self, keys: Tensor, values: Tensor) -> None:
        """Make tokens of a budget in bytes, for states like these."""
        if self.memory is not None:
            store = self.store
            token_bytes, beside = self.action.bytes_for(keys, values, store.token_bytes(keys, values))
            beside += store.fixed_bytes(keys, values)
            rows, _, tokens, _ = keys.shape
            in_16_bits = 2 * sum(rows * states.shape[1] * states.shape[3] for states in (keys, values))
            place, spans = self.scorer.layer_idx, self.budget.now.spans
            self.memory.begin(place, token_bytes, rows, beside, spans, in_16_bits, tokens)

    def new_table(self, budget: BlockBudget, rows: int, sets: int, device: torch.device) -> BlockTable:
        """An empty table for so many rows and sets."""
        needs = self.needs
        return BlockTable(
            budget,
            rows,
            sets,
            device,
            token_local=needs.token_local,
            interval=needs.decision_interval,
            absolute_noise=needs.absolute_noise,
            shifting=self.store.rerotation is not None,
        )

    def clear(self) -> None:
        """Forget every token. Keep the storage."""
        self._forget()
        self.next_slots = None
        self.exposed.forget()
        self.budget.clear()
        self.store.clear()
        if self.memory is not None:
            self.memory.forget()
        self.store.dtype = self.arrivals.kind = None  # the model's dtype may change before the next prompt
        self.action.start(None)
        if self.recorder is not None:
            self.recorder.clear()

    # ---- what happens to all --------------------------------------------------------------------------------------

    def evict_token(self, slots: Tensor, positions: Tensor) -> None:
        """Tell the action that the tokens in `slots` `[B, S, 1]`, at `positions` `[B, S, 1]`, will be overwritten."""
        self.action.evict_token(Held(*self.store.at(slots), positions), slots)

    def plan(self, begins: Tensor) -> None:
        """Tell the action that a victim was chosen where `begins` `[B, S]` is true."""
        table, store = self.known, self.store
        self.action.plan(table.choice.slots, begins, Held(*store.read(), table.positions, table.scores))

    def rerotate_keys(self) -> None:
        """Rotate the held keys to their present positions, for attention; see `table.gaps`."""
        shifts = self.known.tokens.shifts
        if shifts is not None:
            self.store.turn(shifts)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all parts."""
        if self.table is None:
            return
        self.store.columns.map_rows(change)
        self.table.map_rows(change)
        self.action.map_rows(change)
        if self.pending is not None:
            self.pending = self.pending.map_rows(change)
        if self.recorder is not None:
            self.recorder.map_rows(change)

    def move(self, order: Tensor | None, count: int, pads: Tensor) -> None:
        """Take back `count` columns, and move the others by `order` `[B, S, held]`; see `table.moves.take_back`."""
        table = self.known
        if order is not None:
            self.store.reorder(order)
        moves.take_back(table, order, count, pads)
        self.store.take_back(table.seen - table.pads)
        self._settle_action(order)
        if self.recorder is not None:
            self.recorder.observer.move(order, table.seen - table.pads, count)

    def take_out(self, gone: Tensor, pads: Tensor) -> None:
        """Use the emptied slots `gone` `[B, S, held]` bool first. From now on, `pads` `[B]` columns have no
        position."""
        table, sets = self.known, gone.any(-1)
        before = table.seen - table.pads
        order = moves.order_of_text(table, sets)
        self.store.vacate(gone)
        self.store.reorder(order)
        moves.put_in_order(table, order, sets, pads)
        self._settle_action(order)
        after = table.seen - table.pads
        self.store.take_back(after)
        if self.recorder is not None:
            self.recorder.observer.take_out(order, before, after)

    def settle(self, table: BlockTable, kept_indices: Tensor | None) -> None:
        """Tell the parts that the table has changed: of the held and new tokens, those at `kept_indices` `[B, S, C]`
        stay; None = all."""
        self._settle_action(kept_indices)
        if self.recorder is not None:
            self.recorder.observer.settle(kept_indices, table.capacity)

    def _settle_action(self, kept_indices: Tensor | None) -> None:
        table = self.known
        if self.action.acts:
            self.action.settle(kept_indices, table.positions, table.capacity)
