"""A sliding-window layer for static caches, whose decode step compiles into one graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..graphs import outside_graphs, static
from ..saved import SavedState, StateDict
from ..static.checks import refusal
from ..store.arriving import Arrivals
from ..store.room import static_zeros
from ..store.tensors import serves, storage_shape
from .static_steps import SlidingCount, StaticSteps


class StaticSlidingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Holds the last `window` tokens in the order of the text, so that transformers' own sliding masks fit.

    transformers' static layer counts in Python, so it compiles again as the count grows. Here compiled code reads the
    count from `StaticSteps`.

    Args:
        window: number of tokens that a query sees, its own included.
        layer_idx: index in the model.
    """

    is_compileable = True
    is_sliding = True
    is_croppable = False
    supports_early_init = False
    steps: StaticSteps

    def __init__(self, window: int, layer_idx: int = 0) -> None:
        self.window = window
        self._arrivals = Arrivals(layer_idx)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False
        self.member = SlidingCount()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the storage, `[batch, kv_heads, window, dim]` each, unless the storage of an earlier prompt fits."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.member.device = key_states.device
        self.keys, self.values = (
            held.zero_()
            if held is not None and serves(held, states, self.window, self.window)
            else static_zeros(storage_shape(states, self.window), states.device, states.dtype)
            for held, states in ((self.keys, key_states), (self.values, value_states))
        )
        self.is_initialized = True

    def enter(self, steps: StaticSteps) -> None:
        """Take single tokens in these compiled steps."""
        self.steps = steps

    def _storage(self) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.keys, self.values

    def in_order(self) -> tuple[Tensor | None, Tensor | None]:
        """A copy of the held keys and values; None before the first forward."""
        if not self.is_initialized:
            return None, None
        held = min(self.get_seq_length(), self.window)
        keys, values = (states[:, :, :held].clone() for states in self._storage())
        return keys, values

    # ---- what transformers asks -----------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Number of tokens seen per row; a tensor inside a compiled step."""
        if torch.compiler.is_compiling() and self.is_initialized:
            return self.steps.seen_on(self.device)  # type: ignore[return-value]
        return self.member.seen + self.steps.uncounted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of what the next `update` returns."""
        if torch.compiler.is_compiling() and query_length == 1 and self.is_initialized:
            offset = (self.steps.seen_on(self.device) + 1 - self.window).clamp_min(0)
            return self.window, offset  # type: ignore[return-value]
        seen = self.get_seq_length()
        if query_length == 1 and seen:
            return self.window, max(seen + 1 - self.window, 0)
        return min(seen, self.window - 1) + query_length, max(seen + 1 - self.window, 0)

    def get_max_length(self) -> int:
        """The window."""
        return self.window

    # ---- update ---------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens, `[batch, kv_heads, new, dim]`. For a single token after others, return the whole
        storage.

        Raises:
            TypeError, ValueError: they differ in kind from the held ones, see `StateKind`.
        """
        if not torch.compiler.is_compiling():
            self._arrivals.check(key_states, value_states)
        if key_states.shape[2] != 1 or not self.is_initialized:
            return self._several(key_states, value_states)
        if not self.steps.ready:
            self.steps.check_ready()
        seen = self.steps.seen[self.device]
        place = seen.clamp_max(self.window - 1).view(1)
        storage = self._storage()
        for states, new in zip(storage, (key_states, value_states), strict=True):
            moved = torch.where(seen < self.window, states, states.roll(-1, 2))
            states.copy_(moved.index_copy(2, place, new.detach().to(states.dtype)))
        self.steps.took(self.member)
        return storage

    @outside_graphs
    def _several(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.interrupt()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, count = min(self.member.seen, self.window), key_states.shape[2]
        first = max(held - self.window + 1, 0)
        self.member.seen += count
        returned = []
        for states, new in zip(self._storage(), (key_states, value_states), strict=True):
            full = torch.cat([states[:, :, first:held], new], dim=2)
            held_now = min(self.member.seen, self.window)
            before = torch.cat([states[:, :, :held], new.detach().to(states.dtype)], dim=2)
            states[:, :, :held_now] = before[:, :, -held_now:]
            returned.append(full)
        return returned[0], returned[1]

    # ---- rows and life --------------------------------------------------------------------------------------------

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.steps.interrupt()
        if not self.is_initialized:
            return
        old = self._storage()
        new = [change(states) for states in old]
        if new[0].shape == old[0].shape:  # beams keep the address
            for states, changed in zip(old, new, strict=True):
                states.copy_(changed)
        else:
            self.keys, self.values = static(new[0]), static(new[1])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row `i` by row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place."""
        self._map_rows(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64 or bool `[rows]`)."""
        self._map_rows(lambda states: states[indices.to(states.device)])

    def reset(self) -> None:
        """Forget every token. Keep the storage, unless the next prompt has another shape."""
        self.steps.forget()
        self.member.seen = 0
        self.is_initialized = False
        self._arrivals.kind = None

    def state_dict(self) -> StateDict | None:
        """The state of the layer; None before the first forward."""
        if not self.is_initialized:
            return None
        keys, values = self._storage()
        return {"keys": keys, "values": values, "seen": self.get_seq_length()}

    def load_state(self, saved: SavedState, rows: int, seen: int) -> None:
        """Restore the state of another layer with the same window.

        Raises:
            ValueError: the state does not fit.
        """
        self.member.seen = saved.number("seen", seen, seen)
        # Under autocast keys and values may differ in dtype.
        keys = saved.tensor("keys", (rows, None, self.window, None), None)
        values = saved.tensor("values", (*keys.shape[:3], None), None)
        self.lazy_initialization(keys, values)
        for states, new in zip(self._storage(), (keys, values), strict=True):
            states.copy_(new)

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise refusal("take tokens back (crop)")
