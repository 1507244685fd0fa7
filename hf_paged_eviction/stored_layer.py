"""Where a layer keeps its keys and values."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .storage import byte_count, make_storage, serves, storage_shape
from .storage_pool import StoragePool


class StoredLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values in one tensor each, which is made anew as rarely as possible.

    Attributes:
        keys, values: `[batch, kv_heads, slots, dim]`, used or not; None before the first forward.
        pool: where storage comes from and goes to; None = it is made for this layer.
        dtype, device: of keys and values.
    """

    keys: Tensor | None
    values: Tensor | None
    dtype: torch.dtype
    device: torch.device

    def __init__(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.pool: StoragePool | None = None

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, kv_heads, slots, dim]`, used or not."""
        if self.keys is None or self.values is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        return self.keys, self.values

    @property
    def storage_bytes(self) -> int:
        """Bytes of key and value storage, used or not."""
        return byte_count(self.keys, self.values)

    def _serves(self, keys: Tensor, values: Tensor, least: int, most: int) -> bool:
        """Whether what an earlier prompt left has so many slots and fits these states."""
        return serves(self.keys, keys, least, most) and serves(self.values, values, least, most)

    def _new_storage(self, keys: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Room, with any content, for `slots` tokens of states like these."""
        make = make_storage if self.pool is None else self.pool.take
        return (
            make(storage_shape(keys, slots), keys.dtype, keys.device),
            make(storage_shape(values, slots), values.dtype, values.device),
        )

    def _set_storage(self, keys: Tensor | None, values: Tensor | None) -> None:
        if self.pool is not None:
            old = [states for states in (self.values, self.keys) if states is not None]
            self.pool.give(*(states for states in old if states is not keys and states is not values))
        self.keys, self.values = keys, values

    def _move_storage(self, slots: int, held: int) -> None:
        """To a storage of another size, with the first `held` slots."""
        old = self.storage
        new = self._new_storage(*old, slots)
        for target, states in zip(new, old, strict=True):
            target[:, :, :held] = states[:, :, :held]
        self._set_storage(*new)

    def _map_storage(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of the rows."""
        keys, values = self.storage
        self._set_storage(change(keys), change(values))

    def offload(self) -> None:
        """Move keys and values to the CPU; the (small) bookkeeping stays."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.to("cpu", non_blocking=True)
            self.values = self.values.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Bring keys and values back."""
        if self.keys is not None and self.values is not None and self.keys.device != self.device:
            self.keys = self.keys.to(self.device, non_blocking=True)
            self.values = self.values.to(self.device, non_blocking=True)
