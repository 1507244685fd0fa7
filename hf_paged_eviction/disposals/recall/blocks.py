"""Blocks of the text, and their slots."""

import torch
from torch import Tensor

from ...ranking import KEEP, rank_keys
from ...table.budget import BlockBudget
from ...table.table import BlockTable


def last_places(table: BlockTable) -> Tensor:
    """`[B, S, C / P]` positions of the tokens in the last slot of each frame, as of the last update of the table."""
    positions = table.tokens.positions
    if table.phase.order is not None:
        positions = positions.gather(-1, table.phase.order)
    return positions[..., table.block_size - 1 :: table.block_size]


def slots_of(table: BlockTable, frames: Tensor) -> Tensor:
    """Slots `[B, S, n, P]` of the frames `[B, S, n]`."""
    slots = frames[..., None] * table.block_size + torch.arange(table.block_size, device=table.device)
    return slots if table.phase.order is None else table.phase.order.gather(-1, slots.flatten(2)).view_as(slots)


def scores_in_slots(table: BlockTable, ranks: Tensor) -> Tensor:
    """Give each token the rank of its frame: `ranks` `[B, S, C / P]` -> `[B, S, C]` in slot order."""
    logical, order = ranks.repeat_interleave(table.block_size, dim=-1), table.phase.order
    return logical if order is None else torch.empty_like(logical).scatter(-1, order, logical)


def protected_blocks(table: BlockTable, blocks: Tensor) -> Tensor:
    """Bool, which blocks of the text `[B, ...]` have protected tokens."""
    return reach_into(table.phase.bounds, blocks, table.block_size)


def reach_into(bounds: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Bool, which blocks hold a protected token, where block `n` is the tokens from `n * size` on.

    Args:
        bounds: `[rows, n]`.
        blocks: `[rows, ...]` int64, at least 0.
    """
    flat = blocks.flatten(1).contiguous() * size
    before, within = (torch.searchsorted(bounds, flat + last, right=True) for last in (0, size - 1))
    return ((before % 2 == 1) | (before != within)).view(blocks.shape)


def rank_whole_blocks(scores: Tensor, positions: Tensor, blocks: int, size: int, absolute_noise: bool) -> Tensor:
    """`rank_keys` of blocks, by the mean score of their tokens: `[batch, heads, blocks]`; `DROP` for incomplete blocks.

    Args:
        scores: `[batch, heads, candidates]`.
        positions: `[batch, 1 or heads, candidates]`, -1 for pads; block `n` is the tokens at `n * size` and after.
    """
    real = positions.expand_as(scores) >= 0
    block = positions.expand_as(scores).clamp_min(0) // size
    none = scores.new_zeros(*scores.shape[:2], blocks)
    means = none.scatter_add(-1, block, scores.masked_fill(~real, 0.0)) / size
    count = none.scatter_add(-1, block, real.to(none.dtype))
    firsts = torch.arange(blocks, device=scores.device) * size
    return rank_keys(means, firsts.expand_as(means), count == size, absolute_noise)


def best_blocks(keys: Tensor, positions: Tensor, protected: Tensor, budget: BlockBudget) -> Tensor:
    """Like `ranking.best_tokens`, for whole blocks: block `n` is the tokens at positions `n * size` and after.

    The result is what single tokens would have left: whole blocks, and a last block with the newest tokens, followed by
    the end of an older block that they have not overwritten yet.

    Args:
        keys: `[batch, heads, blocks]` int64, distinct, the lowest goes first; `DROP` for incomplete blocks.
        positions: `[batch, heads, candidates]`, -1 for pads.
        protected: `[batch, 1, blocks]` bool.
        budget: sizes; `count` is its capacity, `size` its block size.

    Returns:
        Indices `[batch, heads, count]`, a multiple of `size`: pads, whole blocks by position, then the newest tokens
        and, behind them, the end of a block.
    """
    count, size = budget.capacity, budget.block_size
    seen = positions.amax(-1, keepdim=True) + 1
    blocks = torch.arange(keys.shape[-1], device=keys.device)
    newest = seen // size  # the block that is being filled
    keys = keys.masked_fill(protected | (blocks >= newest - budget.recent_blocks), KEEP)
    order = keys.argsort(dim=-1, stable=True).argsort(dim=-1)
    order = order.masked_fill(blocks >= newest, 2 * keys.shape[-1])
    block, place = positions.clamp_min(0) // size, positions.clamp_min(0) % size
    # Of the last block, only the end stays.
    rank = (order.gather(-1, block) * size + place).masked_fill(positions < 0, -1)
    kept_indices = rank.topk(count, dim=-1).indices
    block, place, held = (
        block.gather(-1, kept_indices),
        place.gather(-1, kept_indices),
        positions.gather(-1, kept_indices),
    )
    tokens_left = torch.zeros_like(keys).scatter_add(-1, block, (held >= 0).long()).gather(-1, block)
    # An incomplete block is the newest one, or the end of an older one.
    return kept_indices.gather(
        -1, torch.where(tokens_left < size, KEEP - size + place, held).masked_fill(held < 0, -1).argsort(-1)
    )
