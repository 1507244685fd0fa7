"""The cache is bounded, a table of positions is not: how far it goes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UserError


def table_of_positions(model: Any) -> int | None:
    """Positions that a model has learned one by one, and no others; None where it works them out."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    words = model.get_input_embeddings()
    tables = (each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words)
    # Some models leave the first two entries of their table unused.
    return most if any(each.num_embeddings in range(most, most + 3) for each in tables) else None


def room(most: int | None, length: int) -> int | None:
    """Tokens that an answer may have after `length` others; None for any number.

    Args:
        most: of `table_of_positions`.

    Raises:
        UserError: none at all.
    """
    if most is None:
        return None
    if length > most:
        raise UserError(
            f"with this message the conversation has {length:,} tokens, and the model has positions for {most:,} only, "
            "however few of them the cache holds: /reset begins a new conversation"
        )
    # The last token of an answer is not fed.
    return most - length + 1
