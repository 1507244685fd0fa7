"""The cache is bounded, the positions of a model are not: how far they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UserError


@dataclass(frozen=True)
class Positions:
    """Where a model's knowledge of positions ends.

    Attributes:
        most: tokens that it was made for; None where the configuration does not say.
        table: whether positions are looked up in a table, which has no more entries.
    """

    most: int | None
    table: bool

    @classmethod
    def of(cls, model: Any) -> Positions:
        """Read from the configuration and the modules."""
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if not isinstance(most, int):
            return cls(None, False)
        words = model.get_input_embeddings()
        tables = (each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words)
        # Some models leave the first two entries of their table unused.
        return cls(most, any(each.num_embeddings in range(most, most + 3) for each in tables))

    def room(self, length: int) -> int | None:
        """Tokens that an answer may have after `length` others; None for any number.

        Raises:
            UserError: none at all.
        """
        if not self.table or self.most is None:
            return None
        if length > self.most:
            raise UserError(
                f"with this message the conversation has {length:,} tokens, and the model has positions for "
                f"{self.most:,} only, however few of them the cache holds: /reset begins a new conversation"
            )
        # The last token of an answer is not fed.
        return self.most - length + 1

    def warning(self, before: int, after: int) -> str | None:
        """What to say when a conversation grows from `before` to `after` tokens."""
        if self.most is None or self.table or not before <= self.most < after:
            return None
        return (
            f"{after:,} tokens seen, and the model was trained on positions up to {self.most:,}: the cache stays "
            "bounded, but answers may get worse; /reset begins a new conversation"
        )
