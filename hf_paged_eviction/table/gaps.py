"""Where the tokens held stand, for models that see distances: at their place in the text, or one after the other.

Eviction leaves gaps in the text. With `positions="cache"` they are closed: the tokens held stand consecutively, in the
order of the text, right before the next token, so that no distance grows with the text. Queries keep the position that
the model gave them; it is the keys that move forward, by as many positions as were evicted behind them.

Gaps are closed whenever it is decided what goes: for a block when its first token is overwritten, and for all that is
held after a forward of several tokens overflowed, or after `shrink`. In between keys stay as they are, so a distance
may exceed that of consecutive tokens by at most `block_size - 1`: the tokens of one block that were overwritten since.
"""

from typing import Literal

import torch
from torch import Tensor

#: "text": a token held keeps its position in the text. "cache": the tokens held stand consecutively.
Positions = Literal["text", "cache"]


def shifts_without_gaps(positions: Tensor, following: Tensor) -> Tensor:
    """How far forward each token must move so that all stand consecutively.

    Args:
        positions: `[B, S, n]` int64, distinct positions in the text, -1 where no real token is.
        following: `[B]` int64, position of the token that comes next.

    Returns:
        `[B, S, n]` int64, at least 0, and 0 where no real token is.
    """
    positions = positions.contiguous()
    ordered = positions.sort(dim=-1).values
    later = positions.shape[-1] - torch.searchsorted(ordered, positions, right=True)
    shifts = following[:, None, None] - 1 - later - positions
    return shifts.masked_fill(positions < 0, 0)
