"""Budgets in bytes, which become tokens when rows, widths and precision are known."""

from collections.abc import Callable
from dataclasses import replace

from ..allocators.limits import Limits
from ..table.budget import BlockBudget
from ..table.spans import Spans


class MemoryPlan:
    """Turns the bytes of a cache into tokens when its first layer gets its first tokens.

    The mean budget is the same for all layers, and an allocator may divide the total. A later layer may need fewer
    bytes per token than the first one (the rest stays unused), but not more.

    Args:
        limits: of all layers; their mean has a `memory` or a `memory_share`.
        storage: returns the tokens per row that all layers together may store, from their mean and the number of rows.
    """

    def __init__(self, limits: Limits, storage: Callable[[BlockBudget, int], int]) -> None:
        self._limits, self._sizes = limits, limits.mean
        self._storage = storage
        self._token_bytes = 0
        self._begun = False

    def forget(self) -> None:
        """The next layer that begins is the first of a text."""
        self._begun = False

    def begin(
        self,
        layer_idx: int,
        token_bytes: int,
        rows: int,
        beside: int = 0,
        spans: tuple[Spans, ...] = (),
        in_16_bits: int = 0,
        tokens: int = 0,
    ) -> None:
        """A layer is about to get its first tokens.

        Args:
            layer_idx: index in the model, for messages.
            token_bytes: bytes of one token of every row in this layer.
            rows: number of rows, for messages.
            beside: bytes of all rows of the layer that do not depend on the number of tokens.
            spans: protected spans, see `BlockBudget`.
            in_16_bits, tokens: bytes of a token of every row in 16 bits, and the number of first tokens, for a share of
                memory.

        Raises:
            ValueError: the memory holds too few tokens (a share of it: for the protected spans), or this layer needs
                more per token than the first one did.
        """
        if not self._begun:
            self._begun, self._token_bytes = True, token_bytes
            self._sizes = replace(self._sizes, spans=spans).of_prompt(in_16_bits * len(self._limits.layers), tokens)
            self._limits.mean = sizes = self._sizes.in_tokens(self._tokens(token_bytes, rows, beside))
            for budget in self._limits.layers:
                budget.now = sizes
        elif token_bytes > self._token_bytes:
            raise ValueError(
                f"Layer {layer_idx} takes {token_bytes:,} bytes per token, an earlier one {self._token_bytes:,}: "
                f"budget={self._sizes.text!r} was divided for layers of one width and would be exceeded. Give "
                "the budget in tokens for this model."
            )

    @property
    def _total(self) -> int:
        return self._sizes.memory or 0

    def _tokens(self, token_bytes: int, rows: int, beside: int) -> int:
        """Mean share of a layer, whole blocks."""
        layers, size, smallest = len(self._limits.layers), self._sizes.block_size, self._sizes.smallest
        taken = layers * beside
        room = max(self._total - taken, 0) // token_bytes
        tokens = room // layers // size * size
        while tokens >= smallest and (stored := self._storage(self._sizes.of(tokens), rows)) > room:
            tokens = min(tokens * room // stored // size * size + size, tokens - size)
        share = self._sizes.memory_share
        if tokens < smallest and share is not None:
            if not any(self._sizes.spans):
                return smallest  # of a short text, as a share of its tokens
            raise ValueError(
                f"budget={share.text!r} holds {tokens} tokens here, which leaves no room for what protect= names: with "
                f"the newest tokens and a block to evict, {smallest} are needed. Give a larger share, or tokens."
            )
        if tokens < smallest:
            least = smallest * layers * token_bytes + taken
            more = f" + {layers} x {beside:,} (beside the slots, such as tokens that are not rounded)" if beside else ""
            raise ValueError(
                f"budget={self._sizes.text!r} is too small: a token of all {rows} rows takes {token_bytes:,} "
                f"bytes in each of {layers} paged layers, so {tokens} tokens would fit (whole blocks of {size}), "
                f"and at least {smallest} are needed: the protected tokens, the newest block and a block to evict. "
                f"{smallest} x {layers} x {token_bytes:,}{more} = {least:,} bytes, or fewer rows at a time."
            )
        return tokens
