"""One layer of the cache: keys and values in a fixed storage, evicted block by block."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .padding import Padding
from .parallel import WHOLE, HeadShare
from .pending import Pending
from .policies import EvictionPolicy, QueryCount
from .rotary import Rotary
from .scoring import Heads, Scorer
from .storage import gather_slots, slot_index
from .stored_layer import StoredLayer
from .table.budget import BlockBudget
from .table.cohort import Cohorts
from .table.ranking import KEEP, best_tokens, rank_keys
from .table.table import BlockTable
from .table.takeback import order_without


class PagedLayer(StoredLayer):
    """Holds at most `budget` tokens per row after every forward.

    A new token is appended until the storage is full; from then on it overwrites one token of the block with the
    lowest score. Attention always sees the new tokens next to everything held: use, then evict.

    Attributes:
        keys, values: storage `[batch, kv_heads, slots, head_dim]`, of which the first `held` slots are in use; it grows
            until there are as many slots as the budget. None before the first forward.
        record_past: while True, new tokens wait in a buffer until `crop` or the next forward commits them.
        cohorts: of the layers that may choose victims with this one; the layer alone until a cache says otherwise.

    Args:
        budget: sizes in tokens.
        policy: scores tokens.
        heads: "shared" = all KV heads of the layer evict the same tokens, "separate" = each its own.
        layer_idx: index in the model.
        padding: what is known of the batch's pads; shared by the layers of a cache.
        share: which of the layer's KV heads this process holds.
        rotary: how the layer turns keys by position, where the policy asks for it; None = it does not.
    """

    is_compileable = False
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
    ) -> None:
        super().__init__()
        self.record_past = False
        self._asked = self.budget = budget
        self.policy = policy
        self.heads: Heads = heads
        self.layer_idx = layer_idx
        self._scorer = Scorer(policy, heads, layer_idx, share, rotary)
        self.padding = padding if padding is not None else Padding()
        self._table: BlockTable | None = None
        self._pending: Pending | None = None
        self.cohorts: Cohorts[PagedLayer] = Cohorts([self])

    def __repr__(self) -> str:
        size = self.budget.tokens if self.budget.tokens is not None else f"{self.budget.keep_ratio:.0%} of the prompt"
        return f"{type(self).__name__}(budget={size}, held={self.held}, seen={self.get_seq_length()})"

    # ---- what transformers asks -----------------------------------------------------------------------------------

    @property
    def table(self) -> BlockTable:
        """The bookkeeping. Exists from the first forward on."""
        if self._table is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self._table

    @property
    def held(self) -> int:
        """Tokens held per row, pads included, without those still waiting for `crop`."""
        return 0 if self._table is None else self.table.held

    def get_seq_length(self) -> int:
        """Tokens seen per row, pads included: what positions continue from, never what is held."""
        seen = 0 if self._table is None else self.table.seen
        return seen + self._waiting

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
        return self._table is not None and self._pending is None and self.table.all_real

    @property
    def _waiting(self) -> int:
        return 0 if self._pending is None else self._pending.count

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length of what the next `update` returns, and the column of its first slot: `(kv_length, kv_offset)`."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        held, seen = self.held + self._waiting, self.get_seq_length()
        if self.budget.tokens is not None:
            held = min(held, self.budget.tokens)
            if count == 1 and held == self.budget.tokens and not self.record_past:
                return held, seen + 1 - held
        return held + count, seen - held

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
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        if key_states.shape[2] == 0 and value_states is not None and key_states.shape[0]:
            if self.budget.tokens is None:
                raise ValueError("keep_ratio= needs a prompt before its storage can be made: give budget= instead.")
            self._set_storage(*self._new_storage(key_states, value_states, self.budget.capacity))

    # ---- update ---------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens and return what their queries may attend to.

        Args:
            key_states, value_states: `[batch, kv_heads, new, dim]`.

        Returns:
            Keys and values `[batch, kv_heads, held + new, dim]`; `[batch, kv_heads, budget, dim]` for a single token
            once the storage is full.

        Raises:
            ValueError: another number of rows than the cache holds.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._detached(key_states, value_states)
        count = keys.shape[2]
        if count == 0:
            return self._with_held(keys, values)
        self.commit()
        self._make_storage(keys, values)
        table = self.table
        real = self.padding.columns(table.seen, table.seen + count, keys.shape[0], keys.device)
        if self._holds_back(count):
            self._pending = Pending(keys, values, real)
            return self._with_held(key_states, value_states)
        if count == 1 or (table.seen and not key_states.requires_grad):
            return self._take(keys, values, real)
        # The caller's own tensors carry a gradient, the storage does not.
        attended = self._with_held(key_states, value_states)
        self._take(keys, values, real)
        return attended

    def _holds_back(self, count: int) -> bool:
        """Whether `count` new tokens wait outside the storage for now."""
        return self.record_past

    def _take(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        table, count = self.table, keys.shape[2]
        if count == 1 and table.held == table.capacity:
            return self._overwrite(keys, values, real)
        if self._overflows(count):
            return self._overflow(keys, values, real)
        return self._append(keys, values, real)

    def _overflows(self, count: int) -> bool:
        """Whether `count` new tokens make the layer choose anew all that it holds."""
        table = self.table
        room = table.capacity - table.held - count
        if count == 1 and room < 0:
            return False
        # Pads in the middle have to move to the lowest slots before the first slot is overwritten.
        return room < 0 or (room == 0 and self.padding.irregular)

    def _append(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        table, count = self.table, keys.shape[2]
        storage_k, storage_v = self._storage_for(table.held + count)
        storage_k.narrow(2, table.held, count).copy_(keys)
        storage_v.narrow(2, table.held, count).copy_(values)
        table.append(count, real)
        return storage_k[:, :, : table.held], storage_v[:, :, : table.held]

    def _overwrite(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        table = self.table
        storage_k, storage_v = self.storage
        if table.victims_due:
            self.cohorts.of(self).choose_victims(real)
        slot = table.next_slot()
        index_k = slot_index(slot, storage_k)
        index_v = index_k if storage_v.shape == storage_k.shape else slot_index(slot, storage_v)
        if real is not None:  # a pad evicts nothing
            written = real[:, None, :, None]
            keys = torch.where(written, keys, storage_k.gather(2, index_k))
            values = torch.where(written, values, storage_v.gather(2, index_v))
        storage_k.scatter_(2, index_k, keys)
        storage_v.scatter_(2, index_v, values)
        table.overwritten(real)
        return storage_k, storage_v

    def _overflow(self, keys: Tensor, values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        table, count = self.table, keys.shape[2]
        positions = table.positions_with(table.new_positions(count, real)[:, 0])
        full_k, full_v = self._with_held(keys, values)
        scores = self._score_overflow(full_k, full_v, positions, count)
        self._keep_best(full_k, full_v, positions, scores, count, real)
        return full_k, full_v

    def _keep_best(
        self, full_k: Tensor, full_v: Tensor, positions: Tensor, scores: Tensor, count: int, real: Tensor | None
    ) -> None:
        table = self.table
        kept = best_tokens(self._rank(scores, positions), positions, self.budget.capacity)
        storage_k, storage_v = keys, values = self.storage
        if count == 0 or keys.shape[2] != self.budget.capacity:  # without new tokens, these are views of the storage
            storage_k, storage_v = self._new_storage(keys, values, self.budget.capacity)
        torch.gather(full_k, 2, slot_index(kept, full_k), out=storage_k)
        torch.gather(full_v, 2, slot_index(kept, full_v), out=storage_v)
        self._set_storage(storage_k, storage_v)
        local_scores = scores.gather(-1, kept) if self.policy.token_local else None
        table.replace(positions.gather(-1, kept), local_scores, count, real)
        self._kept(kept)

    def _kept(self, kept: Tensor | None) -> None:
        """For layers that remember more of a token: `kept` `[B, S, C]` of the held and new tokens stay; None = all."""

    # ---- shrinking ------------------------------------------------------------------------------------------------

    def shrink(self, budget: BlockBudget) -> None:
        """Hold at most `budget` tokens from now on: evict at once what is too much, and give up the storage for it.

        Tokens that wait for `crop` are taken in first.
        """
        self.commit()
        self._asked = self.budget = budget
        if self._table is None:
            self._set_storage(None, None)  # room that an earlier prompt left
        else:
            self.prefetch()
            self._fit()

    def _fit(self) -> None:
        """Bring tokens and storage in line with the budget, which has changed."""
        table = self.table
        if table.capacity == self.budget.capacity:
            return
        if table.held >= self.budget.capacity:
            table.refresh_scores(self.score_slots)
            keys, values = (states[:, :, : table.held] for states in self.storage)
            self._keep_best(keys, values, table.positions, table.scores, 0, None)
            return
        if self.storage[0].shape[2] > self.budget.capacity:
            self._move_storage(self.budget.capacity, table.held)
        table.resize(self.budget.capacity)
        self._kept(None)

    def _rank(self, scores: Tensor, positions: Tensor) -> Tensor:
        """`[B, S, tokens]` int64: the order in which tokens go, the protected ones last."""
        rank = rank_keys(scores, positions, positions >= 0, self.policy.absolute_noise)
        return rank.masked_fill(self._protected(positions), KEEP)

    def _protected(self, positions: Tensor) -> Tensor:
        """The row's first real tokens and its newest block."""
        newest = positions.amax(-1, keepdim=True) - self.budget.block_size
        return (positions >= 0) & ((positions < self.budget.protected) | (positions > newest))

    def _with_held(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.held == 0:
            return keys, values
        storage_k, storage_v = self.storage
        held_k, held_v = storage_k[:, :, : self.held], storage_v[:, :, : self.held]
        return torch.cat([held_k, keys], dim=2), torch.cat([held_v, values], dim=2)

    def _detached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        # Asking is cheaper than a call that changes nothing, and this happens for every token and layer.
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if keys.dtype != self.dtype or values.dtype != self.dtype:
            keys, values = keys.to(self.dtype), values.to(self.dtype)
        return keys, values

    # ---- storage --------------------------------------------------------------------------------------------------

    def _make_storage(self, keys: Tensor, values: Tensor) -> None:
        if self._table is not None:
            self._check_rows(keys.shape[0])
            return
        self.budget = self.budget.resolve(keys.shape[2])
        capacity = self.budget.capacity
        least = self._slots_for(keys.shape[2])
        if not self._serves(keys, values, least, capacity):
            self._set_storage(*self._new_storage(keys, values, least))
        sets = self._scorer.sets(keys.shape[1])
        policy = self.policy
        self._table = BlockTable(
            self.budget,
            keys.shape[0],
            sets,
            keys.device,
            policy.token_local,
            policy.decision_interval,
            policy.absolute_noise,
        )
        if keys.shape[0] > 1:
            self.padding.warn_if_unknown()

    def _slots_for(self, tokens: int) -> int:
        """Slots to begin with: what the prompt needs, so that a large budget and a short prompt waste nothing."""
        if self.pool is not None:
            return self.budget.capacity
        blocks = -(-(tokens + 1) // self.budget.block_size)
        return min(blocks * self.budget.block_size, self.budget.capacity)

    def _storage_for(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Storage with room for so many tokens; where there is less, it at least doubles."""
        slots = self.storage[0].shape[2]
        if tokens > slots:
            self._move_storage(min(max(2 * slots, self._slots_for(tokens)), self.budget.capacity), self.held)
        return self.storage

    def _check_rows(self, rows: int) -> None:
        held = self.table.rows
        if rows != held:
            raise ValueError(
                f"The cache holds {held} rows but got {rows}. Use a new cache or `cache.reset()` for another batch, "
                "`batch_repeat_interleave` or `batch_select_indices` to change the rows of this one."
            )

    # ---- scores ---------------------------------------------------------------------------------------------------

    def alike(self, other: "PagedLayer") -> bool:
        """Whether victims of both can be chosen together now. Reads no tensor."""
        if other is self:
            return True
        if other._table is None or type(other) is not type(self) or not self.table.alike(other.table):
            return False
        mine, theirs = self.storage, other.storage
        return (mine[0].shape, mine[1].shape, mine[0].device, self.share) == (
            *(theirs[0].shape, theirs[1].shape, theirs[0].device),
            other.share,
        )

    @property
    def _room(self) -> int | Tensor:
        """Tokens that the layer may hold, as policies are told: see `ScoreContext.budget`."""
        return self._asked.tokens or self.budget.capacity

    def _scores(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        seen: Tensor,
        statistics: Mapping[str, Tensor] = MappingProxyType({}),
        observed: QueryCount | None = None,
    ) -> Tensor:
        return self._scorer(keys, values, positions, seen, statistics, observed, self._room)

    def score_alike(self, keys: Tensor, values: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Scores of tokens of this layer and of layers like it, see `Scorer`; for policies that know no layers."""
        return self._scores(keys, values, positions, seen)

    def score_slots(self, slots: Tensor | None) -> Tensor:
        """Scores `[B, S, n]` of the tokens in the slots `[B, S, n]`, or of all that are held."""
        keys, values = self.storage
        table, positions = self.table, self.table.positions
        seen, known, observed = table.seen - table.pads, self._statistics(slots), self.queries_observed
        if slots is None:
            return self._scores(keys[:, :, : table.held], values[:, :, : table.held], positions, seen, known, observed)
        keys, values = gather_slots(keys, slots), gather_slots(values, slots)
        return self._scores(keys, values, positions.gather(-1, slots), seen, known, observed)

    @property
    def queries_observed(self) -> QueryCount | None:
        """How many queries the policy has observed."""
        return None

    def _statistics(self, slots: Tensor | None) -> dict[str, Tensor]:
        """What the policy knows of the tokens in these slots `[B, S, n]`, or in all that are held."""
        return {}

    def _score_overflow(self, keys: Tensor, values: Tensor, positions: Tensor, count: int) -> Tensor:
        table = self.table
        seen = positions[:, 0].amax(-1) + 1
        if not self.policy.token_local or table.held == 0:
            return self._scores(keys, values, positions, seen)
        table.refresh_scores(self.score_slots)
        new = self._scores(keys[:, :, -count:], values[:, :, -count:], positions[..., -count:], seen)
        return torch.cat([table.scores, new], dim=-1)

    # ---- taking back ----------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """From now on new tokens wait until `crop` (or the next forward) commits them."""
        self.record_past = True

    def commit(self) -> None:
        """Take in the tokens that wait for `crop`, evicting as needed."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.count:
            self._take(pending.keys, pending.values, pending.real)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens.

        Args:
            tokens_to_remove: `-n` or 0 removes `n` tokens; `n > 0` keeps `n` tokens of those seen (transformers up
                to 5.12 calls it so).

        Raises:
            ValueError: some of these tokens have been evicted already and nothing was recorded.
        """
        count = self._columns_to_remove(tokens_to_remove)
        if self._pending is not None:
            dropped = min(count, self._waiting)
            self._pending = self._pending.first(self._waiting - dropped)
            count -= dropped
        self.commit()
        if count:
            self._remove(count)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise the `ValueError` of `crop`, if it would, before anything is changed."""
        count = self._columns_to_remove(tokens_to_remove) - self._waiting  # what waits can always be dropped
        if self._table is not None and 0 < count < self.table.seen:
            order_without(self.table, count, self._pads_without(count))

    def _columns_to_remove(self, tokens_to_remove: int) -> int:
        seen = self.get_seq_length()
        return max(seen - tokens_to_remove, 0) if tokens_to_remove > 0 else min(-tokens_to_remove, seen)

    def _remove(self, count: int) -> None:
        table = self.table
        if count == table.seen:
            self._clear()
            return
        pads = self._pads_without(count)
        order = order_without(table, count, pads)
        if order is not None:
            for states in self.storage:
                states[:, :, : table.held] = gather_slots(states, order)
        table.shrink(order, count, pads)
        self._moved(order, count)

    def _moved(self, order: Tensor | None, count: int) -> None:
        """For layers that remember more of a token: `count` were taken back, the others moved as `order` says."""

    def _pads_without(self, count: int) -> Tensor:
        """`[B]` pads among all but the last `count` columns."""
        table = self.table
        later = self.padding.columns(table.seen - count, table.seen, table.rows, table.device)
        return table.pads if later is None else table.pads - (~later).sum(-1)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._table is None:
            return
        self._map_storage(change)
        self._table.map_rows(change)
        if self._pending is not None:
            self._pending = self._pending.map_rows(change)

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
        self.budget = self._asked
        self._table = None
        self._pending = None

    def reset(self) -> None:
        """Forget every token. The storage stays and serves the next prompt of the same shape."""
        self._clear()

    def release(self) -> None:
        """Forget every token and give the storage up, to the pool if there is one."""
        self.reset()
        self._set_storage(None, None)
        self.is_initialized = False

    # ---- reading --------------------------------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        """`[batch, kv_heads, held]` int64: position of the token in each held slot, -1 for a pad."""
        if self._table is None or self.keys is None:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        return self.table.positions.expand(-1, self.keys.shape[1], -1)

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
            will overwrite a slot, `n` counts that slot too.
        """
        visible = self.table.positions[:, 0] >= 0
        kv_length, _ = self.get_mask_sizes(query_length)
        if kv_length == self.held + self._waiting + query_length:
            return visible
        # Full: the pads are the lowest slots, and the new token takes the highest of them.
        pads = (~visible).sum(-1, keepdim=True)
        return torch.arange(self.held, device=visible.device) >= pads - 1
