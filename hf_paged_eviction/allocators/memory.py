"""Budgets in bytes: how many tokens they are once rows, widths and precision are known."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ..table.budget import BlockBudget
from ..table.spans import Spans


class Measured(Protocol):
    """Of a layer whose budget waits for its bytes, see `layer.member`."""

    @property
    def seen(self) -> int: ...

    def grant(self, budget: BlockBudget) -> None:
        """Hold so many tokens, which the bytes have turned out to be."""


class MemoryPlan:
    """What the bytes of a cache are in tokens, worked out when the first of its layers meets its first tokens.

    All layers hold equally many tokens on average, and an allocator may share out their total. Later layers may take
    fewer bytes per token than the first, which leaves some unused, but not more.

    Args:
        sizes: with `memory`.
        storage: tokens per row that all layers together may store, from their mean and the number of rows.
    """

    def __init__(self, sizes: BlockBudget, storage: Callable[[BlockBudget, int], int]) -> None:
        self._sizes = sizes
        self._storage = storage
        self._layers: list[Measured] = []
        self._token_bytes = 0

    def add(self, layer: Measured) -> None:
        """One more layer, in the order of the model."""
        self._layers.append(layer)

    def begin(
        self,
        layer_idx: int,
        token_bytes: int,
        rows: int,
        beside: int = 0,
        passing: int = 0,
        spans: tuple[Spans, ...] = (),
    ) -> None:
        """A layer meets its first tokens.

        Args:
            layer_idx: index in the model, for the message.
            token_bytes: what a token of all rows takes in this layer.
            rows: of the batch, for the message.
            beside: what all rows of a layer take besides, however many tokens they hold.
            passing: what they take for a moment, one layer after the other.
            spans: that are protected, see `BlockBudget`.

        Raises:
            ValueError: the memory holds too few tokens, or this layer needs more per token than the first one did.
        """
        if not any(layer.seen for layer in self._layers):
            self._token_bytes = token_bytes
            self._sizes = replace(self._sizes, spans=spans)
            sizes = self._sizes.in_tokens(self._tokens(token_bytes, rows, beside, passing))
            for layer in self._layers:
                layer.grant(sizes)
        elif token_bytes > self._token_bytes:
            raise ValueError(
                f"Layer {layer_idx} takes {token_bytes:,} bytes per token, an earlier one {self._token_bytes:,}: "
                f"budget={self._total:,} bytes were divided for layers of one width and would be exceeded. Give "
                "the budget in tokens for this model."
            )

    @property
    def _total(self) -> int:
        return self._sizes.memory or 0

    def _tokens(self, token_bytes: int, rows: int, beside: int, passing: int) -> int:
        """Mean share of a layer, whole blocks."""
        layers, size, smallest = len(self._layers), self._sizes.block_size, self._sizes.smallest
        taken = layers * beside + passing
        room = max(self._total - taken, 0) // token_bytes
        tokens = room // layers // size * size
        while tokens >= smallest and (stored := self._storage(self._sizes.of(tokens), rows)) > room:
            tokens = min(tokens * room // stored // size * size + size, tokens - size)
        if tokens < smallest:
            least = smallest * layers * token_bytes + taken
            more = f" + {layers} x {beside:,} (beside the slots, such as tokens that are not rounded)" if beside else ""
            more += f" + {passing:,} (for a moment)" if passing else ""
            raise ValueError(
                f"budget={self._total:,} bytes is too small: a token of all {rows} rows takes {token_bytes:,} "
                f"bytes in each of {layers} paged layers, so {tokens} tokens would fit (whole blocks of {size}), "
                f"and at least {smallest} are needed: the protected tokens, the newest block and a block to evict. "
                f"{smallest} x {layers} x {token_bytes:,}{more} = {least:,} bytes, or fewer rows at a time."
            )
        return tokens
