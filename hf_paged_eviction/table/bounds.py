"""Protected spans as a tensor of alternating begins and ends in each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .budget import BlockBudget
from .spans import Spans, merged, of_rows

#: A position that no token has.
NOWHERE = torch.iinfo(torch.int64).max


def bounds_of(spans: Sequence[Spans], first: int, rows: int, device: torch.device) -> Tensor:
    """Make bounds `[rows, n]` int64, rising: begin and end of each span of a row, then padding that matches no token.

    Args:
        spans: by row, or one entry for all rows.
        first: number of tokens at the start that are also protected.

    Raises:
        ValueError: the number of entries in `spans` does not fit the number of rows.
    """
    if not spans:
        start = (0, first) if first else ()
        return torch.tensor([start] * rows, dtype=torch.int64, device=device)
    flat = [[at for span in merged([(0, first), *row]) for at in span] for row in of_rows(spans, rows)]
    most = max(map(len, flat), default=0)
    padded = [row + [NOWHERE] * (most - len(row)) for row in flat]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(rows, most)


def spans_in(bounds: Tensor) -> list[Spans]:
    """The spans by row. Reads the tensor on the host."""
    rows = [[at for at in row if at < NOWHERE] for row in bounds.tolist()]
    return [tuple(zip(row[::2], row[1::2], strict=True)) for row in rows]


def blocks_in(bounds: Tensor, size: int) -> Tensor:
    """`[rows]` int64, largest number of blocks of `size` tokens that the spans of a row can touch, see
    `spans.blocks_of`."""
    begins = bounds[:, ::2]
    lengths, later = bounds[:, 1::2] - begins, (begins > 0) & (begins < NOWHERE)
    blocks = (lengths + torch.where(later, 2 * size - 2, size - 1)).div(size, rounding_mode="floor")
    return blocks.sum(-1) + (later & (lengths > 2) & (size > 1)).any(-1)


def smallest_budget(bounds: Tensor, sizes: BlockBudget) -> Tensor:
    """`[rows]` smallest budget of a set in tokens: room for protected and newest tokens, and for one block to evict.

    Args:
        sizes: present sizes of the layer.
    """
    size = sizes.block_size
    return (blocks_in(bounds, size) + sizes.recent_blocks + 1) * size


def inside(bounds: Tensor, positions: Tensor) -> Tensor:
    """Bool: which of these positions are protected; -1 never is.

    Args:
        bounds: `[rows, n]`.
        positions: `[rows, ...]` int64.
    """
    flat = positions.flatten(1).contiguous()
    if bounds.shape[1] == 2:  # one span needs no search
        is_inside = (flat >= bounds[:, :1]) & (flat < bounds[:, 1:])
        return is_inside.view(positions.shape)
    return (torch.searchsorted(bounds, flat, right=True) % 2 == 1).view(positions.shape)
