"""Single tokens: the block with the lowest score goes next."""

from dataclasses import replace

import torch
from torch import Tensor

from ..ranking import KEEP, rank_keys
from .shifts import close_gaps
from .table import BlockTable


def asks(table: BlockTable, always: bool) -> bool:
    """Whether `choose` needs scores. If all rows have room in the slots of pads, there is nothing to choose; `always`:
    otherwise scores are worked out even if no row decides by them. Reads no tensor."""
    return min(table.counters.full_at_values) <= table.counters.seen and (always or decides(table))


def choose(table: BlockTable, scores: Tensor | None, real: Tensor | None) -> Tensor:
    """Choose the next block to overwrite, for every set whose block is used up. All positions have been stored.

    Args:
        scores: of the tokens that are `BlockTable.unscored`; None if `choose` does not ask for any.
        real: `[B, 1]` bool, rows whose next token is not a pad; None = all rows.

    Returns:
        `[B, S]` bool: where a victim was chosen.
    """
    counters, phase = table.counters, table.phase
    counters.chosen_at = counters.seen
    full = phase.full_at <= counters.seen
    used_up = (counters.seen - phase.full_at) % table.block_size == 0
    if real is not None:
        used_up = used_up & real
    moving = used_up & full
    if scores is not None:
        table.take_scores(scores)
        victim = _next_victim(table, moving)
    elif min(counters.full_at_values) > counters.seen:
        counters.scored, victim = False, table.choice.block
    else:
        victim = _victim_ahead(table, moving)
    if phase.order is not None:
        # A row that still holds pads goes on to its next logical block, which lies in the pads' slots.
        of_pads = phase.block_at(table.capacity, table.block_size, phase.full_at - counters.seen)
        victim = torch.where(full, victim, of_pads)
    evicted_blocks = table.choice.evicted_blocks + moving.any(-1)
    table.choice = replace(table.choice, evicted_blocks=evicted_blocks)
    table.begin(torch.where(used_up, victim, table.choice.block))
    if table.tokens.shifts is not None:
        close_gaps(table, table.tokens.shifts, moving)
    return moving


def decides(table: BlockTable) -> bool:
    """Whether some row chooses its next victim by score now, instead of taking one that was chosen before.

    Reads no tensor: the sizes tell how many victims are chosen together, unless rows or heads have different budgets,
    or more than the start and the newest block is protected. The result is True then.
    """
    sizes, seen, blocks = table.sizes, table.counters.seen, table.capacity // table.block_size
    more = sizes.recent > table.block_size or sizes.spans
    if table.blocks_ahead == 1 or table.limits is not None or more:
        return True
    free = blocks - sizes.protected_blocks - 1
    together = max(1, min(free // 2, table.blocks_ahead, blocks)) * table.block_size
    return any(seen >= full_at and (seen - full_at) % together == 0 for full_at in table.counters.full_at_values)


def _victim_ahead(table: BlockTable, moving: Tensor) -> Tensor:
    """`[B, S]` the next of the blocks that were chosen together."""
    choice = table.choice
    victim = choice.ahead.gather(-1, choice.taken[..., None])[..., 0]
    taken = (choice.taken + moving.long()).clamp_max(choice.ahead.shape[-1] - 1)
    table.choice = replace(choice, left=choice.left - moving.long(), taken=taken)
    return victim


def _next_victim(table: BlockTable, moving: Tensor) -> Tensor:
    """`[B, S]` the next block to be overwritten, where `moving` `[B, S]` says that one is due."""
    ranks = _ranks(table)
    if table.blocks_ahead == 1:
        return ranks.argmin(-1)
    choice = table.choice
    renewed = moving & (choice.left == 0)
    lowest = ranks.topk(min(table.blocks_ahead, ranks.shape[-1]), dim=-1, largest=False).indices
    # Half of what may go at most, so that a choice always leaves something to choose from.
    count = ((ranks < KEEP).sum(-1) // 2).clamp(1, lowest.shape[-1])
    ahead = torch.where(renewed[..., None], lowest, choice.ahead)
    left = torch.where(renewed, count, choice.left)
    taken = torch.where(renewed, 0, choice.taken)
    table.choice = replace(choice, ahead=ahead, left=left, taken=taken)
    return _victim_ahead(table, moving)


def _ranks(table: BlockTable) -> Tensor:
    """`[B, S, C / P]` int64: the block with the lowest rank goes first; `KEEP` for protected blocks."""
    positions, size = blocks(table), table.block_size
    starts = torch.arange(0, table.capacity, size, device=table.device)
    missing = table.phase.missing(size)
    safe = table.protected(positions).any(-1) | (starts < (missing if isinstance(missing, int) else missing[..., None]))
    if table.limits is not None:
        safe |= starts >= table.limits[..., None]
    # The newest block holds the newest tokens, if they are no more than that.
    recent = table.next_positions - table.sizes.recent if table.sizes.recent > size else None
    return ranks_of_blocks(block_scores(table), positions, safe, table.choice.block, recent, table.absolute_noise)


def ranks_of_blocks(
    scores: Tensor, positions: Tensor, safe: Tensor, newest: Tensor, recent: Tensor | None, absolute_noise: bool
) -> Tensor:
    """The order in which blocks go, `[B, S, blocks]` int64: the lowest first; `KEEP` for those that stay.

    Args:
        scores: `[B, S, blocks]` float32, their mean scores; nan for blocks that are not full.
        positions: `[B, S, blocks, P]` int64, in logical order.
        safe: `[B, S, blocks]` bool, blocks that stay.
        newest: `[B, S]` int64, the newest block, which stays.
        recent: `[B]` int64, position from which tokens stay; None = those of the newest block only.
        absolute_noise: of the policy's scores, see `rank_keys`.
    """
    keys = rank_keys(scores, positions[..., 0], scores.isnan().logical_not(), absolute_noise)
    safe = safe | (torch.arange(keys.shape[-1], device=keys.device) == newest[..., None])
    if recent is not None:
        safe |= positions[..., -1] >= recent[:, None, None]  # the newest token of a block is its last
    return keys.masked_fill(safe, KEEP)


# ---- blocks ---------------------------------------------------------------------------------------------------------


def blocks(table: BlockTable) -> Tensor:
    """`[B, S, C / P, P]` positions in logical order; -1 for places without a real token."""
    return _in_blocks(table, table.all_positions(), -1)


def block_scores(table: BlockTable) -> Tensor:
    """`[B, S, C / P]` mean scores of the blocks, as of `take_scores`; nan for blocks that are not full."""
    scores = table.tokens.scores
    if not (table.full and table.all_real):
        scores = scores.masked_fill(table.all_positions() < 0, float("nan"))
    return _in_blocks(table, scores, float("nan")).mean(-1)


def _in_blocks(table: BlockTable, slots: Tensor, missing: float) -> Tensor:
    if not table.full:
        used = torch.arange(table.capacity, device=table.device) < table.held
        positions = table.all_positions()
        positions = positions.masked_fill(~used | (positions < 0), KEEP)
        slots = slots.masked_fill(~used, missing).gather(-1, positions.argsort(stable=True, dim=-1))
    elif table.phase.order is not None:
        slots = slots.gather(-1, table.phase.order)
    return slots.view(*slots.shape[:-1], -1, table.block_size)
