"""Paged layers whose decode step compiles into one graph (`PagedEvictionCache(static=True)`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention_rows import Logits
from .layer import PagedLayer
from .observed_layer import ObservedLayer
from .observer import Queries
from .static_steps import StaticRun, StaticSteps, outside_graphs, static, static_zeros
from .storage import gather_slots, storage_shape
from .table.table import BlockTable


def refusal(what: str) -> ValueError:
    """The error for what a static cache cannot do."""
    return ValueError(f"A static cache cannot {what}: its tensors stay where they are. Use static=False.")


class StaticLayer(PagedLayer):
    """A `PagedLayer` that takes single tokens without a branch or a counter; see `StaticSteps`.

    A single token gets the whole storage back, slots that are not in use yet included: the mask hides them. Forwards
    of several tokens are those of `PagedLayer`, outside of any graph.

    Attributes:
        steps: of the cache; set by it.
    """

    is_compileable = True
    steps: StaticSteps

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run: StaticRun | None = None
        self._first_row = 0

    # ---- between the steps ----------------------------------------------------------------------------------------

    def join(self, run: StaticRun, index: int) -> None:
        """Take single tokens as layer `index` of this run."""
        self._run, self._first_row = run, index * self.storage[0].shape[0]

    def written(self) -> None:
        """The host has counted a token."""

    def sort_pads(self) -> bool:
        """Bring pads in the middle of the text to the lowest slots, if the next token takes the last free slot.

        Returns:
            Whether anything was moved.
        """
        if not self.padding.irregular:
            return False
        table = self.table
        if table.held + 1 != table.capacity:
            return False
        order = table.positions.argsort(stable=True, dim=-1)
        for states in self.storage:
            states[:, :, : table.held] = gather_slots(states, order)
        table.shrink(order, 0, table.pads)
        self._moved(order, 0)
        return True

    @property
    def table(self) -> BlockTable:
        """The bookkeeping, as of the last token. Exists from the first forward on."""
        self.steps.settle()
        return super().table

    @property
    def all_real(self) -> bool:
        """Whether a single token needs no mask."""
        return self.steps.all_real

    def visible_next(self, query_length: int) -> Tensor:
        """See `PagedLayer.visible_next`; slots that are not in use yet are left to causality."""
        if query_length == 1 and not self.table.full:
            return self.table.positions[:, 0] >= 0
        return super().visible_next(query_length)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """See `PagedLayer.get_mask_sizes`; a single token gets the whole storage."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        if count != 1 or self._table is None:
            return super().get_mask_sizes(query_length)
        capacity = self.budget.capacity
        if torch.compiler.is_compiling():
            return capacity, self.steps.seen_on(self.device).add(1 - capacity).clamp_min(0)  # type: ignore[return-value]
        return capacity, max(self.get_seq_length() + 1 - capacity, 0)

    def get_seq_length(self) -> int:
        """Tokens seen per row; within a compiled step a tensor."""
        if torch.compiler.is_compiling() and self._table is not None:
            return self.steps.seen_on(self.device)  # type: ignore[return-value]
        return super().get_seq_length()

    # ---- update ---------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `PagedLayer.update`.

        Returns:
            For a single token after the first forward keys and values `[batch, kv_heads, budget, dim]`.
        """
        if key_states.shape[2] != 1 or self._table is None:
            return self._several(key_states, value_states)
        self.steps.check_ready()
        return self._write(key_states, value_states)

    @outside_graphs
    def _several(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.interrupt()
        return super().update(key_states, value_states)

    def _write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.storage
        rows = keys.shape[0]
        if self._run is None or key_states.shape[0] != rows:
            self._check_rows(key_states.shape[0])
            raise RuntimeError(f"Layer {self.layer_idx} was left out of the forward before this one.")
        row, head = torch.arange(rows, device=keys.device)[:, None], torch.arange(keys.shape[1], device=keys.device)
        slot = self._run.slots[self._first_row : self._first_row + rows, :, 0]
        # Not scatter_, for which inductor copies the whole storage.
        keys.index_put_((row, head, slot), key_states.detach().to(keys.dtype)[:, :, 0])
        values.index_put_((row, head, slot), value_states.detach().to(values.dtype)[:, :, 0])
        self.steps.took(self)
        return keys, values

    # ---- storage --------------------------------------------------------------------------------------------------

    def _slots_for(self, tokens: int) -> int:
        return self.budget.capacity

    def _new_storage(self, keys: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        new_keys, new_values = super()._new_storage(keys, values, slots)
        # A slot that is hidden by the mask still takes part in 0 x value: it must hold a number.
        return static(new_keys.zero_()), static(new_values.zero_())

    def _clear(self) -> None:
        self.steps.interrupt()
        super()._clear()
        self._run = None
        if self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.steps.interrupt()
        super()._map_rows(change)

    def _map_storage(self, change: Callable[[Tensor], Tensor]) -> None:
        old = self.storage
        new = change(old[0]), change(old[1])
        if new[0].shape == old[0].shape:  # beams: stay at the same address
            old[0].copy_(new[0])
            old[1].copy_(new[1])
        else:
            self._set_storage(static(new[0]), static(new[1]))

    # ---- what it cannot do ----------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise refusal("take tokens back, which assisted decoding and record_past need")

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise refusal("take tokens back (crop)")

    def crop(self, tokens_to_remove: int) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise refusal("take tokens back (crop)")


class StaticObservedLayer(StaticLayer, ObservedLayer):
    """A `StaticLayer` whose policy decides by queries: a step leaves its query in a ring, the host reads it there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ring: Tensor | None = None  # [B, query_heads, 2 P, dim]: rows fill their blocks at different times
        self._query: Tensor | None = None  # the last one of a forward outside of any graph
        self._logits: Logits | None = None

    def join(self, run: StaticRun, index: int) -> None:
        """See `StaticLayer.join`."""
        super().join(run, index)
        query = self._query
        if query is None:
            raise RuntimeError("Attention has not told of any query yet.")
        # The rows may have been changed since the last forward of several tokens.
        shape = (self.table.rows, *storage_shape(query, 2 * self.budget.block_size)[1:])
        if self._ring is None or (self._ring.shape, self._ring.dtype) != (shape, query.dtype):
            self._ring = static_zeros(shape, query.device, query.dtype)

    def _write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self._check_told()
        self._expected = True
        return super()._write(key_states, value_states)

    def attended(self, queries: Queries) -> None:
        """See `ObservedLayer.attended`."""
        if queries.query.shape[2] != 1 or self._run is None:
            self._several_attended(queries)
            return
        self._expected = False
        if self._ring is not None:
            place = self.steps.seen[self.device] % self._ring.shape[2]
            self._ring.index_copy_(2, place.view(1), queries.query.detach())

    @outside_graphs
    def _several_attended(self, queries: Queries) -> None:
        self._query, self._logits = queries.query[:, :, -1:].detach().clone(), queries.logits
        super().attended(queries)

    def written(self) -> None:
        """The host has counted a token: its query counts too."""
        if self._ring is None or self._logits is None:
            raise RuntimeError("The layer has not joined a run.")
        table, keys = self.table, self.storage[0]
        place = (table.seen - 1) % self._ring.shape[2]
        self._step_real = None
        self._observe_step(Queries(self._ring[:, :, place : place + 1], keys[:, :, : table.held], self._logits))
