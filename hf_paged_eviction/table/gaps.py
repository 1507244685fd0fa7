"""Positions of held tokens for attention: their positions in the text, or consecutive ones.

Eviction leaves gaps in the text. `positions="cache"` closes them: held tokens get consecutive positions, in the order
of the text, right before the next token, so no distance grows with the text. Queries keep the positions that the model
gave them. Keys move forward, each by the number of tokens that were evicted after it.

Gaps are closed at each decision: for a block when its first token is overwritten, and for all held tokens after a
forward of several tokens overflowed, or after `shrink`. In between keys do not move, so a distance may exceed that of
consecutive positions by up to `block_size - 1`, the tokens of one block that were overwritten since.
"""

from typing import Literal

import torch
from torch import Tensor

#: "text": a token held keeps its position in the text. "cache": the tokens held stand consecutively.
Positions = Literal["text", "cache"]


def shifts_without_gaps(positions: Tensor, following: Tensor) -> Tensor:
    """Compute how far each token must move forward so that positions are consecutive.

    Args:
        positions: `[B, S, n]` int64, distinct positions in the text, -1 for places without a real token.
        following: `[B]` int64, position of the next token.

    Returns:
        `[B, S, n]` int64, at least 0; 0 for places without a real token.
    """
    positions = positions.contiguous()
    ordered = positions.sort(dim=-1).values
    later = positions.shape[-1] - torch.searchsorted(ordered, positions, right=True)
    shifts = following[:, None, None] - 1 - later - positions
    return shifts.masked_fill(positions < 0, 0)
