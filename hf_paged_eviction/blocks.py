"""The bookkeeping of one layer: which token sits in which slot, which block is overwritten next.

Two orders. *Slots* are where keys and values lie. *Logical* order is the arrival order of a row's real tokens; blocks,
scores and victims live there. They are the same unless the row still holds `p` pads when the storage is full:
logical `l` then lies in slot `l + p`, and the last `p` logical places in slots `p - 1 .. 0`. New tokens therefore take
the pads' slots from right to left, and the pads that remain are the lowest slots, which transformers' own mask hides.

All rows of a layer hold equally many slots; each row has its own phase inside its current block. A row's phase
follows from one number, `full_at`: the count of columns seen at which the row holds `budget` real tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .budget import BlockBudget
from .ranking import KEEP, rank_keys

ScoreSlots = Callable[[Tensor | None], Tensor]

#: Tensors of a table that are written in place.
WRITTEN = ("_positions", "_scores")
#: Tensors that follow from a choice of victims.
CHOSEN = ("evicted_blocks", "_current", "_slots", "_chosen", "_left", "_taken")
#: All tensors whose dimension 0 is the row; None where a table does without.
BY_ROW = ("pads", "full_at", "limits", "_order", *WRITTEN, *CHOSEN)
#: Counters and flags, which are equal in all rows.
COUNTERS = (
    *("held", "seen", "in_arrival_order", "_written_until", "_scored", "_turned_at", "_overwriting"),
    *("_full_at_values", "_residues"),
)


def persistent(tensor: Tensor) -> Tensor:
    """A copy that may be written to in and out of `torch.inference_mode`."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class BlockTable:
    """Positions, scores and victims of one layer.

    Shapes: `B` rows, `S` sets of victims (1 where all KV heads share theirs, else the number of KV heads),
    `C` budget, `P` block size.

    Attributes:
        held: slots in use, equal in all rows.
        seen: columns seen, pads included.
        pads: `[B]` int64, pads among the columns seen.
        full_at: `[B, S]` int64, value of `seen` at which the set holds as many real tokens as it may.
        evicted_blocks: `[B]` int64, blocks whose overwriting has begun.
        in_arrival_order: whether column `n` of the batch lies in slot `n`.
        limits: `[B, S]` int64, multiples of `P`: slots that a set may use, the others are dead; None = all of them.
    """

    def __init__(
        self,
        budget: BlockBudget,
        rows: int,
        sets: int,
        device: torch.device,
        token_local: bool,
        interval: int = 1,
        absolute_noise: bool = False,
    ) -> None:
        self.capacity = budget.capacity
        self.block_size = budget.block_size
        self.device = device
        self._protected_blocks = budget.protected_blocks
        self._token_local = token_local
        self._absolute_noise = absolute_noise
        self.held = 0
        self.seen = 0
        self.pads = torch.zeros(rows, dtype=torch.int64, device=device)
        self.full_at = torch.full((rows, sets), self.capacity, dtype=torch.int64, device=device)
        self.limits: Tensor | None = None
        self.evicted_blocks = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = persistent(torch.full((rows, sets, self.capacity), -1, device=device))
        self._scores = persistent(torch.full((rows, sets, self.capacity), float("nan"), device=device))
        self.in_arrival_order = True
        # Positions and scores are brought up to date once per block, not once per token.
        self._written_until = 0
        self._scored = False
        self._turned_at = -1  # value of `seen` for which victims have been chosen
        # Host-side knowledge, so that decode reads no tensor. A superset: stays true when rows are permuted.
        self._know({self.capacity})
        # From here on meaningful only while overwriting, that is once every slot is in use.
        self._overwriting = False
        self._order: Tensor | None = None  # [B, S, C] slot of each logical place, None where they are the same
        self._current = torch.zeros_like(self.full_at)  # [B, S] logical block being overwritten = the newest block
        self._slots = self._current[..., None].expand(-1, -1, self.block_size)  # [B, S, P] its slots
        # Victims chosen together: [B, S, ahead] blocks, [B, S] how many of them are left, and how many were taken.
        self._ahead = max(1, interval // self.block_size)
        self._left = self._taken = self._current
        self._chosen = self._current[..., None]

    # ---- growing -------------------------------------------------------------------------------------------------

    def append(self, count: int, real: Tensor | None) -> None:
        """`count` columns were written to the next free slots. `real` `[B, count]` bool, None = all of them."""
        if real is not None:
            self.write_back()
            stop = self.held + count
            self._positions[:, :, self.held : stop] = self.new_positions(count, real)
        self._count(count, real)
        self.held += count
        if real is not None:
            self._written_until = self.seen
        if self.held == self.capacity:
            self._start_overwriting()

    def new_positions(self, count: int, real: Tensor | None) -> Tensor:
        """Positions of the next `count` columns, `[B, 1, count]`."""
        first = (self.seen - self.pads)[:, None]
        if real is None:
            return (first + torch.arange(count, device=self.device))[:, None]
        return (first + real.cumsum(-1) - 1).masked_fill(~real, -1)[:, None]

    def _count(self, count: int, real: Tensor | None) -> None:
        self.seen += count
        if real is None:
            return
        pads = (~real).sum(-1)
        self.pads = self.pads + pads
        self.full_at = self.full_at + pads[:, None]
        self._know(set(self.full_at.flatten().tolist()))

    def _know(self, full_at_values: set[int]) -> None:
        self._full_at_values = full_at_values
        # `full_at` modulo `P`: when victims are due
        self._residues = frozenset(value % self.block_size for value in full_at_values)

    @property
    def in_step(self) -> bool:
        """Whether the blocks of all rows are known to be full at the same time. Reads no tensor."""
        return len(self._residues) == 1

    def block_filled(self) -> Tensor | None:
        """`[B]` bool, rows in which some newest block is full; None where it is known that there is none."""
        if self.seen % self.block_size not in self._residues:
            return None
        return ((self.seen - self.full_at) % self.block_size == 0).any(-1)

    # ---- overwriting, one token at a time -----------------------------------------------------------------------

    def _start_overwriting(self) -> None:
        """All slots are in use. The row's newest block is its last one."""
        self.write_back()
        self.full_at = self.full_at.clamp_min(self.seen)
        self._know({max(value, self.seen) for value in self._full_at_values})
        held_pads = (self.full_at - self.seen).minimum(self._usable)
        self._order = self._logical_order(held_pads) if max(self._full_at_values) > self.seen else None
        self._overwriting = True
        self._turned_at = -1
        self._left = self._taken = torch.zeros_like(self.full_at)
        blocks = min(self._ahead, self.capacity // self.block_size)
        self._chosen = self._left[..., None].expand(-1, -1, blocks)
        self._point_at((self._usable - held_pads - 1).clamp_min(0) // self.block_size)

    @property
    def _usable(self) -> Tensor:
        """`[B, S]` slots that are not dead."""
        return torch.full_like(self.full_at, self.capacity) if self.limits is None else self.limits

    def _logical_order(self, held_pads: Tensor) -> Tensor:
        logical, usable = torch.arange(self.capacity, device=self.device), self._usable[..., None]
        shifted = logical + held_pads[..., None]
        order = torch.where(shifted < usable, shifted, usable - 1 - logical)
        return torch.where(logical < usable, order, logical)

    def _point_at(self, block: Tensor) -> None:
        self._current = block
        places = block[..., None] * self.block_size + torch.arange(self.block_size, device=self.device)
        if self._order is None:
            self._slots = places
        else:
            self._slots = self._order.gather(-1, places)

    @property
    def full(self) -> bool:
        """Whether all slots are in use, so that the next single token overwrites one."""
        return self._overwriting

    @property
    def turn_due(self) -> bool:
        """Whether `choose_victims` must come before the next token is written. Reads no tensor."""
        return self._overwriting and self.seen % self.block_size in self._residues and self._turned_at != self.seen

    def alike(self, other: "BlockTable") -> bool:
        """Whether both are as far and as large, so that their victims can be chosen together. Reads no tensor."""
        return (
            (self.seen, self.held, self._overwriting, self.device)
            == (other.seen, other.held, other._overwriting, other.device)
            and (self.limits is None and other.limits is None)
            and (self._order is None) == (other._order is None)
            and (self._scored, self._written_until, self._turned_at)
            == (other._scored, other._written_until, other._turned_at)
            and self._full_at_values == other._full_at_values
            and self._positions.shape == other._positions.shape
        )

    def next_slot(self) -> Tensor:
        """Slot the next token goes to, `[B, S, 1]`."""
        self.in_arrival_order = False
        if len(self._residues) == 1:
            (residue,) = self._residues
            return self._slots.narrow(2, (self.seen - residue) % self.block_size, 1)
        phase = (self.seen - self.full_at) % self.block_size
        return self._slots.gather(2, phase[..., None])

    def choose_victims(self, score_slots: ScoreSlots, real: Tensor | None = None) -> None:
        """Choose the next block to be overwritten where one is used up.

        Args:
            score_slots: scores `[B, S, n]` of the tokens in the slots `[B, S, n]`, or of all slots for None.
            real: `[B, 1]` bool, rows whose next token is no pad; None = all rows.
        """
        self._turned_at = self.seen
        self.refresh_scores(score_slots)
        full = self.full_at <= self.seen
        used_up = (self.seen - self.full_at) % self.block_size == 0
        if real is not None:
            used_up = used_up & real
        victim = self._next_victim(used_up & full)
        if self._order is not None:
            # A row that still holds pads goes on to its next logical block, which lies in the pads' slots.
            filled = (self._usable - (self.full_at - self.seen)).clamp_min(0) // self.block_size
            victim = torch.where(full, victim, filled)
        self.evicted_blocks = self.evicted_blocks + (used_up & full).any(-1)
        self._point_at(torch.where(used_up, victim, self._current))

    def _next_victim(self, moving: Tensor) -> Tensor:
        """`[B, S]` the next block to be overwritten, where `moving` `[B, S]` says that one is due."""
        ranks = self._rank_of_blocks()
        if self._ahead == 1:
            return ranks.argmin(-1)
        renewed = moving & (self._left == 0)
        lowest = ranks.topk(min(self._ahead, ranks.shape[-1]), dim=-1, largest=False).indices
        # Half of what may go at most, so that a choice always leaves something to choose from.
        count = ((ranks < KEEP).sum(-1) // 2).clamp(1, lowest.shape[-1])
        self._chosen = torch.where(renewed[..., None], lowest, self._chosen)
        self._left = torch.where(renewed, count, self._left)
        self._taken = torch.where(renewed, 0, self._taken)
        victim = self._chosen.gather(-1, self._taken[..., None])[..., 0]
        self._left = self._left - moving.long()
        self._taken = (self._taken + moving.long()).clamp_max(lowest.shape[-1] - 1)
        return victim

    def _rank_of_blocks(self) -> Tensor:
        """`[B, S, C / P]` int64: the lowest goes first, `KEEP` for blocks that may not go."""
        scores, positions = self.block_scores(), self.table()
        keys = rank_keys(scores, positions[..., 0], scores.isnan().logical_not(), self._absolute_noise)
        blocks = torch.arange(keys.shape[-1], device=self.device)
        safe = (blocks < self._protected_blocks) | (blocks == self._current[..., None])
        if self.limits is not None:
            safe |= blocks >= self.limits[..., None] // self.block_size
        return keys.masked_fill(safe, KEEP)

    def overwritten(self, real: Tensor | None) -> None:
        """The slot given by `next_slot` was written."""
        if real is not None:
            self.write_back()
        self._count(1, real)
        if real is not None:
            # A row whose token was a pad kept what it held: only the others moved on.
            self._write_positions(1, real[:, :1])
            self._written_until = self.seen

    # ---- replacing everything at once ---------------------------------------------------------------------------

    def replace(
        self,
        positions: Tensor,
        scores: Tensor | None,
        count: int,
        real: Tensor | None,
        limits: Tensor | None = None,
    ) -> None:
        """`count` columns arrived and every slot was rewritten.

        Args:
            positions: `[B, S, C]` in slot order: pads, then real tokens by position, then dead slots (-1). The number
                of slots may change.
            scores: `[B, S, C]`, or None where they are worked out afresh at each eviction.
            limits: `[B, S]`, see the attribute.
        """
        self.in_arrival_order = False
        self._count(count, real)
        self.limits = limits
        if limits is not None or positions.shape[-1] != self.capacity:
            self._make_room(positions.shape[-1])
            self._work_out_full_at((positions >= 0).sum(-1))
        self._positions.copy_(positions)
        if scores is not None:
            self._scores.copy_(scores)
        self._scored = scores is not None
        self._written_until = self.seen
        self.held = self.capacity
        self._start_overwriting()

    def _make_room(self, capacity: int) -> None:
        if capacity != self.capacity:
            self.capacity = capacity
            shape = (*self._positions.shape[:2], capacity)
            self._positions = persistent(self._positions.new_full(shape, -1))
            self._scores = persistent(self._scores.new_full(shape, float("nan")))

    def _work_out_full_at(self, real: Tensor) -> None:
        """From the real tokens held, `[B, S]`."""
        self.full_at = self.seen + self._usable - real
        self._know(set(self.full_at.flatten().tolist()))

    def resize(self, capacity: int) -> None:
        """Another number of slots, more than are in use; the tokens stay in theirs."""
        self.write_back()
        positions = self._positions[:, :, : self.held]
        self._make_room(capacity)
        self._positions[:, :, : self.held] = positions
        self._work_out_full_at((positions >= 0).sum(-1))
        self._scored = self._overwriting = False
        self._order = None
        self._turned_at = -1

    def shrink(self, order: Tensor | None, count: int, pads: Tensor) -> None:
        """The last `count` columns were taken back.

        Args:
            order: `[B, S, held]`, slot each remaining token moved from (the removed ones last); None = none moved.
            pads: `[B]` pads among the remaining columns.
        """
        self.write_back()
        if order is not None:
            self._positions[:, :, : self.held] = self._positions[:, :, : self.held].gather(-1, order)
        self.held -= count
        self.seen -= count
        self._written_until = self.seen
        self.pads = pads
        self._work_out_full_at((self._positions[:, :, : self.held] >= 0).sum(-1))
        self._scored = self._overwriting = False
        self._order = None
        self._turned_at = -1

    # ---- rows ---------------------------------------------------------------------------------------------------

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all that belongs to a row."""
        for name in BY_ROW:
            states = getattr(self, name)
            if states is not None:
                changed = change(states)
                setattr(self, name, persistent(changed) if name in WRITTEN else changed)

    # ---- reading ------------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Bring `positions` up to date with the tokens written since the last time (all of them real)."""
        count = self.seen - self._written_until
        if count == 0:
            return
        if not self._overwriting:
            start = self.held - count
            columns = torch.arange(self._written_until, self.seen, device=self.device)
            self._positions[:, :, start : self.held] = (columns - self.pads[:, None])[:, None]
        else:
            self._write_positions(count, None)
        self._written_until = self.seen

    def _write_positions(self, count: int, real: Tensor | None) -> None:
        """Write the positions of the last `count` columns, which all lie in the current blocks."""
        filled = (self.seen - 1 - self.full_at) % self.block_size + 1  # [B, S] new tokens of the current block
        place = torch.arange(self.block_size, device=self.device)
        behind = filled[..., None] - 1 - place  # how many columns ago the token at this place came
        fresh = (behind >= 0) & (behind < count)
        if real is not None:
            fresh &= real[..., None]
        position = (self.seen - self.pads)[:, None, None] - 1 - behind
        old = self._positions.gather(-1, self._slots)
        self._positions.scatter_(-1, self._slots, torch.where(fresh, position, old))

    def refresh_scores(self, score_slots: ScoreSlots) -> None:
        """Score what came since the last eviction: the current block, or everything where that is not enough."""
        self.write_back()
        if self._scored:
            self._scores.scatter_(-1, self._slots, score_slots(self._slots))
        else:
            self._scores[:, :, : self.held] = score_slots(None)
        self._scored = self._overwriting and self._token_local

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.pads.shape[0]

    @property
    def positions(self) -> Tensor:
        """`[B, S, held]` in slot order."""
        self.write_back()
        return self._positions[:, :, : self.held]

    def positions_with(self, new: Tensor) -> Tensor:
        """`[B, S, held + n]` in slot order, and behind them those of new tokens `[B, n]`, the same for all sets."""
        held = self.positions
        return torch.cat([held, new[:, None].expand(-1, held.shape[1], -1)], dim=-1)

    @property
    def scores(self) -> Tensor:
        """`[B, S, held]` in slot order, as of the last `refresh_scores`."""
        return self._scores[:, :, : self.held]

    @property
    def all_real(self) -> bool:
        """Whether every slot is known to hold a real token. Reads no tensor."""
        return self.limits is None and max(self._full_at_values) <= max(self.seen, self.capacity)

    @property
    def evicted_tokens(self) -> Tensor:
        """`[B]` int64, real tokens seen and no longer held; a mean where sets hold different numbers."""
        kept = (self.positions >= 0).sum((1, 2))
        return self.seen - self.pads - kept // self._positions.shape[1]

    def table(self) -> Tensor:
        """`[B, S, C / P, P]` positions in logical order; -1 where no real token is."""
        self.write_back()
        return self._in_blocks(self._positions, -1)

    def block_scores(self) -> Tensor:
        """`[B, S, C / P]` means over each block's tokens as of `refresh_scores`; nan for blocks not yet filled."""
        scores = self._scores
        if not (self._overwriting and self.all_real):
            scores = scores.masked_fill(self._positions < 0, float("nan"))
        return self._in_blocks(scores, float("nan")).mean(-1)

    def _in_blocks(self, slots: Tensor, missing: float) -> Tensor:
        if not self._overwriting:
            used = torch.arange(self.capacity, device=self.device) < self.held
            positions = self._positions.masked_fill(~used | (self._positions < 0), KEEP)
            slots = slots.masked_fill(~used, missing).gather(-1, positions.argsort(stable=True, dim=-1))
        elif self._order is not None:
            slots = slots.gather(-1, self._order)
        return slots.view(*slots.shape[:-1], -1, self.block_size)
