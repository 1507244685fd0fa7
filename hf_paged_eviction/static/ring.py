"""The queries of compiled steps, for the host to read between them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..parts import Snapshot, map_tensors, persistent
from ..queries.observer import Queries
from ..store.room import static_zeros
from ..store.tensors import storage_shape


@dataclass(frozen=True)
class RingSnapshot(Snapshot):
    """What queries are like, see `QueryRing.note`. Those in the ring have been read between the steps."""

    example: Tensor
    logits: Logits


class QueryRing:
    """The last queries of one layer: a compiled step leaves its own at the next place."""

    def __init__(self) -> None:
        self._ring: Tensor | None = None  # [B, query_heads, 2 P, dim]: rows fill their blocks at different times
        self._example: Tensor | None = None  # the last query of a forward outside of any graph
        self._logits: Logits | None = None

    def note(self, queries: Queries) -> None:
        """A forward outside of any graph shows what queries are like."""
        self._example, self._logits = queries.query[:, :, -1:].detach().clone(), queries.logits

    def make(self, rows: int, block_size: int) -> None:
        """Make room for the queries of so many rows.

        Raises:
            RuntimeError: no query was shown yet.
        """
        example = self._example
        if example is None:
            raise RuntimeError("Attention has not told of any query yet.")
        # The rows may have been changed since the last forward of several tokens.
        shape = (rows, *storage_shape(example, 2 * block_size)[1:])
        if self._ring is None or (self._ring.shape, self._ring.dtype) != (shape, example.dtype):
            self._ring = static_zeros(shape, example.device, example.dtype)

    def put(self, seen: Tensor, query: Tensor) -> None:
        """Leave the query `[B, query_heads, 1, dim]` of the token that comes after `seen` columns."""
        if self._ring is not None:
            self._ring.index_copy_(2, (seen % self._ring.shape[2]).view(1), query.detach().to(self._ring.dtype))

    def take(self, seen: int, keys: Tensor) -> Queries:
        """The query of column `seen - 1`, compared with `keys` `[B, kv_heads, held, dim]`."""
        if self._ring is None or self._logits is None:
            raise RuntimeError("The layer has not joined a run.")
        place = (seen - 1) % self._ring.shape[2]
        return Queries(self._ring[:, :, place : place + 1], keys, self._logits)

    def snapshot(self) -> RingSnapshot | None:
        """None before a query was shown."""
        return None if self._example is None or self._logits is None else RingSnapshot(self._example, self._logits)

    def restore(self, saved: RingSnapshot, device: torch.device) -> None:
        """Know what another ring knew."""
        saved = map_tensors(lambda tensor: persistent(tensor.to(device)), saved)
        self._example, self._logits = saved.example, saved.logits
