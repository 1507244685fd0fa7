"""The bookkeeping of one layer: the token in each slot, and the block that is overwritten next.

There are two orders. *Slots* index keys and values. The *logical* order is the arrival order of a row's real tokens;
blocks, scores and victims refer to it. Both are the same, unless the row still holds `p` pads when the storage is full:
logical place `l` then is slot `l + p`, and the last `p` logical places are the slots `p - 1 .. 0`. So new tokens take
the slots of the pads from right to left, and the remaining pads are the lowest slots, which transformers' own mask
hides.

All rows of a layer hold equally many slots; each row has its own phase inside its current block. A row's phase
follows from one number, `full_at`: the count of columns seen at which the row holds `budget` real tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .bounds import bounds_of, inside
from .budget import BlockBudget
from .gaps import shifts_without_gaps
from .state import Choice, Counters, Phase, TableState, Tokens, empty_tokens


class BlockTable:
    """Positions, scores and victims of one layer, or of several alike layers whose rows follow each other.

    Shapes: `B` rows, `S` sets of victims (1 where all KV heads share theirs, else the number of KV heads), `C` budget,
    `P` block size.

    Attributes:
        blocks_ahead: number of victims that are chosen together.
        tokens, phase, choice: its tensors, see `state`.
        counters: counters that are equal in all rows, which save reading tensors.

    Args:
        budget: sizes in tokens.
        rows, sets: `B`, `S`.
        device: device of all tensors.
        token_local: whether the score of a token is computed once.
        interval: number of tokens between two choices of victims; if it is several blocks, as many victims are chosen
            together.
        absolute_noise: of the policy's scores, see `rank_keys`.
        shifting: whether the gaps of evicted tokens are closed, see `gaps`.
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
        shifting: bool = False,
    ) -> None:
        self.capacity = budget.capacity
        self.block_size = budget.block_size
        self.device = device
        self.sizes = budget
        self._token_local = token_local
        self.absolute_noise = absolute_noise
        self.blocks_ahead = max(1, interval // self.block_size)
        self.counters = Counters(self.block_size)
        self.counters.know([[self.capacity]] * rows)
        bounds = bounds_of(budget.spans, budget.protected, rows, device)
        self.give(TableState.empty(bounds, sets, self.capacity, self.block_size, self.blocks_ahead, shifting))

    @property
    def state(self) -> TableState:
        """All tensors."""
        return TableState(self.tokens, self.phase, self.choice)

    def give(self, state: TableState) -> None:
        """Replace all tensors by these."""
        self.tokens: Tokens = state.tokens
        self.phase: Phase = state.phase
        self.choice: Choice = state.choice

    @property
    def held(self) -> int:
        """Number of slots in use, equal in all rows."""
        return self.counters.held

    @property
    def seen(self) -> int:
        """Number of columns seen, pads included."""
        return self.counters.seen

    @property
    def pads(self) -> Tensor:
        """`[B]` int64, number of pads among the columns seen."""
        return self.phase.pads

    @property
    def limits(self) -> Tensor | None:
        """`[B, S]` int64, number of slots that a set may use, the others are dead; None = all slots."""
        return self.phase.limits

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.phase.pads.shape[0]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0. Which row is in which phase is not known then without reading a tensor."""
        self.give(self.state.map_rows(change))
        self.counters.know([self.counters.full_at_values] * self.rows)

    def check_rows(self, rows: int) -> None:
        """Raise ValueError unless the table has so many rows."""
        if rows != self.phase.pads.shape[0]:
            raise ValueError(
                f"The cache holds {self.rows} rows but got {rows}. Use a new cache or `cache.reset()` for another "
                "batch, `batch_repeat_interleave` or `batch_select_indices` to change the rows of this one."
            )

    # ---- protection ----------------------------------------------------------------------------------------------

    def protect(self, budget: BlockBudget) -> None:
        """Protect these spans from now on, and no others. Tokens must be divided into blocks again afterwards, see
        `replace`."""
        self.sizes = budget
        bounds = bounds_of(budget.spans, budget.protected, self.rows, self.device)
        self.phase = replace(self.phase, bounds=bounds)

    def protected(self, positions: Tensor) -> Tensor:
        """Bool: which of these positions `[B, ...]` are in a protected span or the protected start."""
        return inside(self.phase.bounds, positions)

    # ---- growing -------------------------------------------------------------------------------------------------

    def append(self, count: int, real: Tensor | None) -> None:
        """Count `count` columns that were written to the next free slots. `real` `[B, count]` bool, False for pads;
        None = all are real."""
        counters = self.counters
        if real is None:
            counters.seen += count
        else:
            self.write_back()
            new = self.tokens.positions[:, :, counters.held : counters.held + count]
            new.copy_(self.new_positions(count, real))
            counters.seen += count
            counters.positions_until = counters.seen
            self._count_pads(real)
        counters.held += count
        if counters.held == self.capacity:
            self._start_overwriting()

    def new_positions(self, count: int, real: Tensor | None) -> Tensor:
        """The positions of the next `count` columns, `[B, 1, count]`."""
        first = (self.counters.seen - self.phase.pads)[:, None]
        if real is None:
            return (first + torch.arange(count, device=self.device))[:, None]
        return (first + real.cumsum(-1) - 1).masked_fill(~real, -1)[:, None]

    def _count_pads(self, real: Tensor) -> None:
        """Of columns that have been counted; reads a tensor."""
        phase, pads = self.phase, (~real).sum(-1)
        self.enter(replace(phase, full_at=phase.full_at + pads[:, None], pads=phase.pads + pads))

    def enter(self, phase: Phase) -> None:
        """Rows are in another phase from now on. Reads a tensor."""
        self.phase = phase
        self.counters.know(phase.full_at.tolist())

    # ---- overwriting, one token at a time -----------------------------------------------------------------------

    def _start_overwriting(self) -> None:
        """All slots are in use. The row's newest block is its last one."""
        self.write_back()
        counters = self.counters
        full_at = self.phase.full_at.clamp_min(counters.seen)
        if min(counters.full_at_values) < counters.seen:
            counters.know([map(partial(max, counters.seen), row) for row in counters.by_row])
        sizes, phase, order = (self.capacity, self.block_size), self.phase, None
        if self.limits is None and max(counters.full_at_values) == counters.seen:  # neither pads nor dead slots
            newest = torch.full_like(full_at, (self.capacity - 1) // self.block_size)
        else:
            held_pads, missing = (full_at - counters.seen).minimum(phase.usable(self.capacity)), phase.missing(sizes[1])
            shorter = isinstance(missing, Tensor) and bool(missing.any())
            if shorter or max(counters.full_at_values) > counters.seen:
                order = phase.logical_order(*sizes, held_pads)
            newest = phase.block_at(*sizes, held_pads + 1)
        self.phase = replace(phase, full_at=full_at, order=order)
        counters.overwriting = True
        counters.chosen_at = -1
        none = torch.zeros_like(full_at)
        blocks = min(self.blocks_ahead, self.capacity // self.block_size)
        self.choice = replace(self.choice, left=none, taken=none, ahead=none[..., None].expand(-1, -1, blocks))
        self.begin(newest)

    def begin(self, block: Tensor) -> None:
        """Let the next tokens overwrite this logical block, `[B, S]`."""
        slots = block[..., None] * self.block_size + torch.arange(self.block_size, device=self.device)
        if self.phase.order is not None:
            slots = self.phase.order.gather(-1, slots)
        self.choice = replace(self.choice, block=block, slots=slots)

    @property
    def full(self) -> bool:
        """Whether all slots are in use, so that the next single token overwrites one."""
        return self.counters.overwriting

    def next_slots(self, count: int = 1) -> Tensor:
        """The slots of the next `count` tokens, at most `tokens_until_due`: `[B, S, count]`."""
        counters = self.counters
        if len(counters.residues) == 1:
            (residue,) = counters.residues
            return self.choice.slots.narrow(2, (counters.seen - residue) % self.block_size, count)
        place = (counters.seen - self.phase.full_at) % self.block_size
        return self.choice.slots.gather(2, place[..., None] + torch.arange(count, device=self.device))

    def overwritten(self, real: Tensor | None) -> None:
        """Count a token that was written to `next_slots`; `real` `[B, 1]` bool, rows whose token is real; None = all
        rows."""
        self.counters.in_arrival_order = False
        if real is None:
            self.counters.seen += 1
        else:
            self.write_back()
            self.counters.seen += 1
            self._count_pads(real)
            # A row whose token was a pad has not changed.
            self._write_newest(self.tokens.positions, 1, real[:, :1])
            self._forget_shifts(1, real[:, :1])
            self.counters.positions_until = self.counters.seen

    # ---- replacing everything at once ---------------------------------------------------------------------------

    def replace(
        self,
        positions: Tensor,
        scores: Tensor | None,
        count: int,
        real: Tensor | None,
        limits: Tensor | None = None,
        shifts: Tensor | None = None,
    ) -> None:
        """Store a new table after `count` columns arrived and every slot was rewritten.

        Args:
            positions: `[B, S, C]` in slot order: pads, then real tokens by position, then dead slots (-1). The number
                of slots may change.
            scores: `[B, S, C]`; None if they are computed at each eviction.
            limits: `[B, S]`, see the property.
            shifts: `[B, S, C]`, see `shifts.moved_shifts`; None if the table has no shifts.
        """
        counters = self.counters
        counters.seen += count
        if real is not None:
            self._count_pads(real)
        self.phase = replace(self.phase, limits=limits)
        if limits is not None or positions.shape[-1] != self.capacity:
            self.make_room(positions.shape[-1])
            self.enter(replace(self.phase, full_at=self.full_at_of(positions)))
        self.write_all(positions, scores, shifts)
        counters.positions_until = counters.seen
        counters.held = self.capacity
        self._start_overwriting()

    def write_all(self, positions: Tensor, scores: Tensor | None, shifts: Tensor | None) -> None:
        """What all slots hold, see `replace`."""
        self.tokens.positions.copy_(positions)
        if self.tokens.shifts is not None and shifts is not None:
            closed = shifts_without_gaps(positions, self.next_positions)
            self.tokens.shifts.copy_(torch.where(shifts < 0, closed, shifts))
        if scores is not None:
            self.tokens.scores.copy_(scores)
        self.counters.scored, self.counters.in_arrival_order = scores is not None, False

    def make_room(self, capacity: int) -> None:
        """Have so many slots, which are empty if their number changes."""
        if capacity != self.capacity:
            self.capacity = capacity
            rows, sets, _ = self.tokens.positions.shape
            self.tokens = empty_tokens(rows, sets, capacity, self.device, self.tokens.shifts is not None)

    def full_at_of(self, positions: Tensor) -> Tensor:
        """`Phase.full_at` from the positions held, `[B, S, held]`."""
        return self.counters.seen + self.phase.usable(self.capacity) - (positions >= 0).sum(-1)

    @property
    def next_positions(self) -> Tensor:
        """`[B]` of the next real token."""
        return self.counters.seen - self.phase.pads

    # ---- positions and scores -----------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Store the positions of the tokens that came since the last call, all of which must be real."""
        count = self.counters.seen - self.counters.positions_until
        if count:
            self._write_since(self.tokens.positions, count)
            self._forget_shifts(count, None)
            self.counters.positions_until = self.counters.seen

    def _write_since(self, positions: Tensor, count: int) -> None:
        """Write the positions of the last `count` columns, which are not written down yet."""
        counters = self.counters
        if counters.overwriting:
            self._write_newest(positions, count, None)
        else:
            columns = torch.arange(counters.positions_until, counters.seen, device=self.device)
            new = (columns - self.phase.pads[:, None])[:, None]
            positions[:, :, counters.held - count : counters.held] = new

    def _write_newest(self, positions: Tensor, count: int, real: Tensor | None) -> None:
        """Write the positions of the last `count` columns, which all lie in the current blocks."""
        slots, (fresh, behind) = self.choice.slots, self._newest(count, real)
        newest = self.next_positions[:, None, None] - 1 - behind
        positions.scatter_(-1, slots, torch.where(fresh, newest, positions.gather(-1, slots)))

    def _newest(self, count: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """`[B, S, P]` for the current blocks: which places hold one of the last `count` columns, and how many columns
        ago the token at a place came."""
        filled = (self.counters.seen - 1 - self.phase.full_at) % self.block_size + 1  # [B, S] new tokens of the block
        behind = filled[..., None] - 1 - torch.arange(self.block_size, device=self.device)
        fresh = (behind >= 0) & (behind < count)
        return (fresh if real is None else fresh & real[..., None]), behind

    def _forget_shifts(self, count: int, real: Tensor | None) -> None:
        """The last `count` columns came to slots whose tokens had been turned."""
        shifts = self.tokens.shifts
        if shifts is not None and count and self.counters.overwriting:
            shifts.copy_(self.without_newest(shifts, count, real))

    def without_newest(self, shifts: Tensor, count: int, real: Tensor | None) -> Tensor:
        """The shifts, 0 where the last `count` columns are."""
        slots, (fresh, _) = self.choice.slots, self._newest(count, real)
        return shifts.scatter(-1, slots, shifts.gather(-1, slots).masked_fill(fresh, 0))

    def all_positions(self) -> Tensor:
        """`[B, S, C]` in slot order, with those that are not written down yet."""
        count = self.counters.seen - self.counters.positions_until
        if count == 0:
            return self.tokens.positions
        positions = self.tokens.positions.clone()
        self._write_since(positions, count)
        return positions

    @property
    def positions(self) -> Tensor:
        """Positions `[B, S, held]` in slot order."""
        return self.all_positions()[:, :, : self.counters.held]

    def positions_with(self, new: Tensor) -> Tensor:
        """Positions `[B, S, held + n]`: in slot order, followed by those of new tokens `[B, n]`, the same for all
        sets."""
        held = self.all_positions()[:, :, : self.counters.held]
        return torch.cat([held, new[:, None].expand(-1, held.shape[1], -1)], dim=-1)

    @property
    def unscored(self) -> Tensor | None:
        """The slots `[B, S, P]` of the tokens that came since the last eviction, the current block; None = all held
        tokens must be scored."""
        return self.choice.slots if self.counters.scored else None

    def take_scores(self, scores: Tensor) -> None:
        """Store the scores of the `unscored` tokens."""
        counters = self.counters
        if counters.scored:
            self.tokens.scores.scatter_(-1, self.choice.slots, scores)
        else:
            self.tokens.scores[:, :, : counters.held] = scores
        counters.scored = counters.overwriting and self._token_local

    @property
    def scores(self) -> Tensor:
        """Scores `[B, S, held]` in slot order, as of the last `take_scores`."""
        return self.tokens.scores[:, :, : self.held]

    @property
    def all_used(self) -> bool:
        """Whether every slot that a set may use is known to hold a real token. Reads no tensor."""
        return self.full and max(self.counters.full_at_values) <= self.counters.seen

    @property
    def all_real(self) -> bool:
        """Whether every slot is known to hold a real token. Reads no tensor."""
        counters = self.counters
        return self.phase.limits is None and max(counters.full_at_values) <= max(counters.seen, self.capacity)

    @property
    def used(self) -> Tensor:
        """`[B, S, held]` bool, the slots that hold a real token."""
        if not self.full:
            return self.positions >= 0
        slots, left = torch.arange(self.capacity, device=self.device), self.phase.full_at - self.counters.seen
        used = slots >= left[..., None]  # pads and empty slots are the lowest
        return used if self.phase.limits is None else used & (slots < self.phase.limits[..., None])

    def used_after(self, count: int) -> Tensor:
        """`[count, B, S, C]` bool, what `used` will be after each of the next `count` real tokens; all slots are in
        use."""
        seen = self.counters.seen + torch.arange(1, count + 1, device=self.device)[:, None, None, None]
        slots, limits = torch.arange(self.capacity, device=self.device), self.phase.limits
        used = slots >= self.phase.full_at[..., None] - seen
        return used if limits is None else used & (slots < limits[..., None])

    @property
    def evicted_tokens(self) -> Tensor:
        """`[B]` int64, number of real tokens seen and no longer held; a mean if sets hold different numbers."""
        used = self.used
        return self.next_positions - used.sum((1, 2)) // used.shape[1]
