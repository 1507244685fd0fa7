"""Marks: a number per token from outside the cache, for policies that need one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.heads import LocalHeads
from .columns import Columns

#: dtype of marks.
MARKS = torch.float32


@dataclass(frozen=True)
class MarkSource:
    """Describes the source of marks: numbers per token and KV head that come from outside the cache.

    Attributes:
        source: name of the source. It must identify the numbers, because the source compares it with its own name.
        remedy: a sentence for the error message if the source is not installed: what to do.
    """

    source: str
    remedy: str


class Marks:
    """The marks of a layer's new tokens, one number for each token and KV head, until the tokens are held.

    The source sets them by `layer.marks.tell`, before the layer's `update`, which takes them. Those of held tokens are
    a column of the store.

    Shapes: `B` rows, `H` KV heads.

    Attributes:
        source: see `MarkSource`.

    Args:
        source: source of the marks.
        layer_idx: index in the model.
        local_heads: the KV heads of the layer that this process holds.
    """

    def __init__(self, source: MarkSource, layer_idx: int, local_heads: LocalHeads) -> None:
        self.source = source.source
        self._remedy, self._layer_idx, self._local_heads = source.remedy, layer_idx, local_heads
        self._told: Tensor | None = None
        self._new: Tensor | None = None  # [B, H, n]

    def tell(self, marks: Tensor) -> None:
        """Set the marks `[B, all KV heads, n]` of the tokens whose keys and values come next."""
        self._told = marks

    def arrived(self, keys: Tensor) -> None:
        """Take the marks for the tokens with these keys `[B, H, n, dim]`, which are the new tokens from now on.

        Raises:
            RuntimeError: nobody has set their marks.
            ValueError: the marks are for other tokens.
        """
        marks, self._told = self._told, None
        if marks is None:
            raise RuntimeError(
                f"The policy scores by what it is told of each token, and nobody has told layer {self._layer_idx} "
                f"anything. {self._remedy}"
            )
        heads = keys.shape[1]
        first = self._local_heads.first_head(heads)
        own = marks[:, first : first + heads]
        if own.shape != keys.shape[:3] or marks.shape[1] != heads * self._local_heads.processes(heads):
            raise ValueError(
                f"Layer {self._layer_idx} was told of {marks.shape[0]} rows, {marks.shape[1]} KV heads and "
                f"{marks.shape[2]} tokens, and keys of {keys.shape[0]} rows, "
                f"{heads * self._local_heads.processes(heads)} KV heads and {keys.shape[2]} tokens came: what tells "
                "was made for another model."
            )
        self._new = own.to(keys.device)

    def of(self, columns: Columns, held: int, count: int = 0) -> Tensor:
        """Marks `[B, H, held + count]` of the first `held` slots of these columns, followed by those of `count` new
        tokens."""
        if held and not count:
            return columns.padded("marks")[:, :, :held]
        if self._new is None:
            raise RuntimeError("No tokens have come.")
        new = self._new[:, :, :count]
        return torch.cat([columns.padded("marks")[:, :, :held], new], dim=-1) if held else new

    def take(self, columns: Columns, held: int, count: int) -> Tensor:
        """Like `of`, to write it to these columns; new tokens are held then."""
        marks = self.of(columns, held, count)
        self._new = None if count else self._new
        return marks

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0."""
        self._new = None if self._new is None else change(self._new)

    def clear(self) -> None:
        """Forget the marks of new tokens."""
        self._told = self._new = None
