"""Which tokens a query sees: those of its row that are no pads and no later than itself."""

import torch
from torch import Tensor

_LATER = torch.iinfo(torch.int64).max


def visible(key_positions: Tensor, query_positions: Tensor) -> Tensor:
    """`[batch, sets, q, tokens]` bool.

    Args:
        key_positions: `[batch, sets, tokens]` int64, -1 for a pad or an unused slot.
        query_positions: `[batch, q]` int64, -1 for a pad, which sees nothing.
    """
    # One comparison of every query with every token: a pad is later than any query.
    keys = key_positions.masked_fill(key_positions < 0, _LATER)
    return keys[:, :, None, :] <= query_positions[:, None, :, None]


def mask_by_position(key_positions: Tensor, query_positions: Tensor) -> Tensor:
    """As `visible`, for attention: a pad sees everything, because a softmax over nothing would be nan. Its output is
    not used."""
    return visible(key_positions, query_positions) | (query_positions < 0)[:, None, :, None]


def visible_one_behind_the_other(ends: tuple[Tensor, Tensor], queries: int, tokens: int, window: int | None) -> Tensor:
    """`[queries, tokens]` bool, for rows that lie one behind the other, the queries being the last tokens of each.

    Args:
        ends: of the queries and the tokens of each row, after a zero.
        window: number of tokens that a query sees at most; None = all.
    """
    of_queries, of_tokens = (end.long() for end in ends)
    query_places = torch.arange(queries, device=of_queries.device)
    held = torch.arange(tokens, device=of_queries.device)
    asks = torch.searchsorted(of_queries, query_places, right=True) - 1
    holds = torch.searchsorted(of_tokens, held, right=True) - 1
    # Places counted from the end of each row.
    behind = (of_queries[asks + 1] - query_places)[:, None], (of_tokens[holds + 1] - held)[None]
    seen = (asks[:, None] == holds) & (behind[1] >= behind[0])
    return seen if window is None else seen & (behind[1] - behind[0] < window)
