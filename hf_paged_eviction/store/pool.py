"""Storage that requests hand on to each other, for services that make a cache per request."""

from collections import defaultdict
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .tensors import byte_count, make_storage

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class StoragePool:
    """Keeps the tensors of finished requests for later requests of the same shape. Threads may share a pool.

    A cache made with `pool=` takes tensors for its whole budget from the pool at its first forward, and
    `cache.release()` gives them back. The tensors that came back last are handed out first, so a cache that follows
    another gets the same memory in the same layers, and CUDA graphs that were recorded for these addresses stay valid.
    """

    def __init__(self) -> None:
        self._free: defaultdict[_Kind, list[Tensor]] = defaultdict(list)
        # A cache that is forgotten without `release` takes its tensors with it.
        self._out: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._lock = Lock()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor with undefined content: a free one, or a new one."""
        with self._lock:
            waiting = self._free[torch.Size(shape), dtype, device]
            states = waiting.pop() if waiting else make_storage(shape, dtype, device)
            self._out[id(states)] = states
            return states

    def give(self, *tensors: Tensor) -> None:
        """Give tensors back. Neither they nor views of them may be used afterwards.

        Tensors that this pool has not handed out, or has already got back, are ignored.
        """
        with self._lock:
            for states in tensors:
                if self._out.pop(id(states), None) is not None:
                    self._free[states.shape, states.dtype, states.device].append(states)

    def reserve(
        self,
        make_cache: Callable[[], Any],
        requests: int,
        *,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate the tensors of several requests now instead of at their first forward.

        Args:
            make_cache: function that makes the `PagedEvictionCache` of a request, with this pool.
            requests: number of requests that are served at the same time.
            batch_size: rows of a request.
            num_heads, head_dim: number of KV heads and their width.
            dtype, device: of keys and values.

        Raises:
            ValueError: the caches use another pool, or their budget is a share, whose size is not known yet.
        """
        caches = [make_cache() for _ in range(requests)]
        for cache in caches:
            if cache.pool is not self:
                raise ValueError("reserve() was given a function whose caches do not use this pool: pass them pool=.")
            cache.early_initialization(batch_size, num_heads, head_dim, dtype, torch.device(device))
        for cache in reversed(caches):
            cache.release()

    @property
    def taken_bytes(self) -> int:
        """Bytes that caches use."""
        with self._lock:
            return byte_count(*self._out.values())

    @property
    def free_bytes(self) -> int:
        """Bytes of free tensors."""
        with self._lock:
            return byte_count(*(states for waiting in self._free.values() for states in waiting))

    def clear(self) -> None:
        """Drop all free tensors."""
        with self._lock:
            self._free.clear()

    def __reduce__(self) -> tuple[type["StoragePool"], tuple[()]]:
        """Pickle as an empty pool, because the tensors of an unpickled cache do not come from it."""
        return type(self), ()

    def __deepcopy__(self, memo: Any) -> "StoragePool":
        return self  # a copied cache has its own tensors and shares the pool

    def __repr__(self) -> str:
        return f"{type(self).__name__}(taken={self.taken_bytes} bytes, free={self.free_bytes} bytes)"
