"""A buffer for the queries of compiled steps, which the host reads between the steps."""

from torch import Tensor

from ..attention.weights import Logits
from ..tensors.graphs import static_zeros
from .observer import Queries


class QueryRing:
    """A ring buffer of the last queries of one layer. A compiled step writes its query to the next place."""

    STATE = "_example", "_logits"  # queries in the ring have been read

    def __init__(self) -> None:
        self._ring: Tensor | None = None  # [B, query_heads, 2 P, dim]: rows fill their blocks at different times
        self._example: Tensor | None = None  # [1, query_heads, 1, dim], a query of a forward outside of any graph
        self._logits = Logits(1.0)

    def note(self, queries: Queries) -> None:
        """Note the shape and dtype of queries, from a forward outside of compiled code."""
        self._example, self._logits = queries.query[:1, :, -1:].detach().clone(), queries.logits

    def make(self, rows: int, block_size: int) -> None:
        """Allocate the buffer for so many rows.

        Raises:
            RuntimeError: `note` was not called yet.
        """
        example = self._example
        if example is None:
            raise RuntimeError("Attention has not told of any query yet.")
        # The rows may have been changed since the last forward of several tokens.
        shape = (rows, example.shape[1], 2 * block_size, example.shape[3])
        if self._ring is None or (self._ring.shape, self._ring.dtype) != (shape, example.dtype):
            self._ring = static_zeros(shape, example.device, example.dtype)

    def put(self, seen: Tensor, query: Tensor) -> None:
        """Write the query `[B, query_heads, 1, dim]` of the token after `seen` columns."""
        if self._ring is not None:
            self._ring.index_copy_(2, (seen % self._ring.shape[2]).view(1), query.detach().to(self._ring.dtype))

    def take(self, seen: int, keys: Tensor) -> Queries:
        """Return the query of column `seen - 1`, with the `keys` `[B, kv_heads, held, dim]` that it was compared
        with."""
        if self._ring is None:
            raise RuntimeError("The layer has not joined a run.")
        place = (seen - 1) % self._ring.shape[2]
        return Queries(self._ring[:, :, place : place + 1], keys, self._logits)
