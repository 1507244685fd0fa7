"""Pending tokens, which may still be taken back."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..tensors.parts import map_tensors


@dataclass(frozen=True)
class Pending:
    """Tokens that wait to be committed.

    Attributes:
        keys, values: `[batch, kv_heads, n, dim]`.
        real: `[batch, n]` bool, False for pads; None = all real.
        shown: what attention gets, keys and values `[batch, kv_heads, held + n, dim]`; None if it has to be put
            together again when the tokens are committed.
    """

    keys: Tensor
    values: Tensor
    real: Tensor | None
    shown: tuple[Tensor, Tensor] | None = None

    @property
    def count(self) -> int:
        """Number of tokens per row."""
        return self.keys.shape[2]

    def first(self, count: int) -> "Pending":
        """The first `count` tokens."""
        real = None if self.real is None else self.real[:, :count]
        return Pending(self.keys[:, :, :count], self.values[:, :, :count], real)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "Pending":
        """The same tokens with the rows indexed."""
        return map_tensors(change, Pending(self.keys, self.values, self.real))


@dataclass(frozen=True)
class Offered:
    """What a layer told the others of its held and pending tokens, within one forward.

    Attributes:
        real: `[batch]` real tokens that each row has seen with them.
        scores: `[batch, sets, held + n]` float32; None if they depend on the budget, which is not known yet.
    """

    real: Tensor
    scores: Tensor | None
