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
    """Keeps the tensors of finished requests for the next ones of the same shape. Threads may share it.

    A cache made with `pool=` takes its tensors from here at its first forward, those of the whole budget at once, and
    `cache.release()` brings them back. What came back last is handed out first: a cache that follows another gets the
    same memory in the same layers, so what has been recorded for these addresses (CUDA graphs) stays valid.
    """

    def __init__(self) -> None:
        self._free: defaultdict[_Kind, list[Tensor]] = defaultdict(list)
        # A cache that is forgotten without `release` takes its tensors with it.
        self._out: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._lock = Lock()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor with any content: one that waits, or a new one."""
        with self._lock:
            waiting = self._free[torch.Size(shape), dtype, device]
            states = waiting.pop() if waiting else make_storage(shape, dtype, device)
            self._out[id(states)] = states
            return states

    def give(self, *tensors: Tensor) -> None:
        """Bring tensors back; neither they nor views of them may be used any more.

        What this pool has not given out, or has got back already, is left alone.
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
        """Make the tensors of some requests now rather than at their first forward.

        Args:
            make_cache: makes the `PagedEvictionCache` of a request, with this pool.
            requests: how many will be served at the same time.
            batch_size: rows of a request.
            num_heads, head_dim: KV heads and their width.
            dtype, device: of keys and values.

        Raises:
            ValueError: the caches were made with another pool, or with a share as budget, whose size is not known yet.
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
        """Bytes in use by caches."""
        with self._lock:
            return byte_count(*self._out.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that wait for a request."""
        with self._lock:
            return byte_count(*(states for waiting in self._free.values() for states in waiting))

    def clear(self) -> None:
        """Give up what waits."""
        with self._lock:
            self._free.clear()

    def __reduce__(self) -> tuple[type["StoragePool"], tuple[()]]:
        """What was pickled with a cache has tensors of its own, which no pool gave out: an empty one comes back."""
        return type(self), ()

    def __deepcopy__(self, memo: Any) -> "StoragePool":
        return self  # a copied cache has tensors of its own and takes further ones from the same pool

    def __repr__(self) -> str:
        return f"{type(self).__name__}(taken={self.taken_bytes} bytes, free={self.free_bytes} bytes)"
