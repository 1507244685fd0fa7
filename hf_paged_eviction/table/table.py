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

import torch
from torch import Tensor

from ..ranking import KEEP, rank_keys
from ..saved import LONGEST, SavedState, StateDict
from .bounds import blocks_in, bounds_of, inside, spans_in
from .budget import BlockBudget
from .gaps import shifts_without_gaps
from .spans import Spans
from .state import Choice, Counters, Phase, TableState, Tokens, empty_tokens

ScoreSlots = Callable[[Tensor | None], Tensor]


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
        self._sizes = budget
        self._token_local = token_local
        self._absolute_noise = absolute_noise
        self.blocks_ahead = max(1, interval // self.block_size)
        self.counters = Counters(frozenset([self.capacity]), frozenset([self.capacity % self.block_size]))
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
    def evicted_blocks(self) -> Tensor:
        """`[B]` int64, number of blocks so far that new tokens have begun to overwrite."""
        return self.choice.evicted_blocks

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.phase.pads.shape[0]

    def check_rows(self, rows: int) -> None:
        """Raise ValueError unless the table has so many rows."""
        if rows != self.phase.pads.shape[0]:
            raise ValueError(
                f"The cache holds {self.rows} rows but got {rows}. Use a new cache or `cache.reset()` for another "
                "batch, `batch_repeat_interleave` or `batch_select_indices` to change the rows of this one."
            )

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all tensors."""
        self.give(self.state.map_rows(change))

    def state_dict(self) -> StateDict:
        """All tensors and counters as they are now. What is protected, and when blocks are full, follows from them and
        the settings."""
        shifts = self.held_shifts if self.counters.overwriting else self.tokens.shifts
        held = {**vars(self.phase), **vars(self.choice), **vars(self.counters), "scores": self.tokens.scores}
        for derived in ("bounds", "residues", "positions_until", "held", "seen"):
            del held[derived]
        return {**held, "positions": self._all_positions(), "shifts": shifts}

    def load_state(self, saved: SavedState, held: int, seen: int, unequal: bool) -> None:
        """Restore the state of another table of this size.

        Args:
            unequal: whether rows or sets may hold different numbers of tokens.

        Raises:
            ValueError: the state does not fit, or an index is out of range.
        """
        self._load_counters(saved, held, seen)
        self.tokens = self._saved_tokens(saved)
        self.phase = self._saved_phase(saved, unequal)
        self.choice = self._saved_choice(saved)
        saved.need(held <= seen or self.limits is not None, f"{held} tokens are held, and {seen} were seen")
        inside = self.positions.sort(-1).values
        saved.need((inside < self._next_positions[:, None, None]).all(), "positions lie in the future")
        again = (inside[..., 1:] == inside[..., :-1]) & (inside[..., 1:] >= 0)
        saved.need(not again.any(), "a position is held twice")

    def _load_counters(self, saved: SavedState, held: int, seen: int) -> None:
        self.counters = Counters(
            held=held,
            seen=seen,
            in_arrival_order=saved.flag("in_arrival_order"),
            overwriting=saved.flag("overwriting"),
            positions_until=seen,
            scored=saved.flag("scored"),
            chosen_at=saved.number("chosen_at", -1, seen),
        )
        full = self.counters.overwriting == (held == self.capacity)
        saved.need(full, "it is full and goes on growing, or the reverse")
        self.counters.know(saved.numbers("full_at_values", 0, LONGEST), self.block_size)

    def _saved_tokens(self, saved: SavedState) -> Tokens:
        new = self.tokens
        positions, scores = saved.like("positions", new.positions, -1, LONGEST), saved.like("scores", new.scores)
        return Tokens(positions, scores, None if new.shifts is None else saved.like("shifts", new.shifts, 0, LONGEST))

    def _saved_phase(self, saved: SavedState, unequal: bool) -> Phase:
        new, limits, order = self.phase, None, None
        if unequal and saved.has("limits"):
            limits = saved.like("limits", new.full_at, self.block_size, self.capacity)
        if saved.has("order"):
            order = saved.like("order", self.tokens.positions, 0, self.capacity - 1)
            in_order = order.sort(-1).values == torch.arange(self.capacity, device=self.device)
            saved.need(in_order.all(), "order is no order of the slots")
        pads = saved.like("pads", new.pads, 0, self.seen)
        full_at = saved.like("full_at", new.full_at, 0, LONGEST)
        # It has more values where rows were dropped.
        counted = set(full_at.flatten().tolist()) <= self.counters.full_at_values
        saved.need(counted, "full_at has values that are not counted")
        return Phase(pads, full_at, new.bounds, limits, order)

    def _saved_choice(self, saved: SavedState) -> Choice:
        new, blocks, ahead = self.choice, self.capacity // self.block_size, saved.peek("ahead", 3).shape[-1]
        fits = ahead in (self.blocks_ahead, min(self.blocks_ahead, blocks))
        saved.need(fits, f"{ahead} victims are chosen together, and its policy chooses {self.blocks_ahead}")
        return Choice(
            block=saved.like("block", new.block, 0, blocks - 1),
            slots=saved.like("slots", new.slots, 0, self.capacity - 1),
            ahead=saved.tensor("ahead", (*new.block.shape, ahead), torch.int64, 0, blocks - 1),
            left=saved.like("left", new.left, 0, ahead),
            taken=saved.like("taken", new.taken, 0, ahead - 1),
            evicted_blocks=saved.like("evicted_blocks", new.evicted_blocks, 0, LONGEST),
        )

    # ---- protection ----------------------------------------------------------------------------------------------

    def protect(self, budget: BlockBudget) -> None:
        """Protect these spans from now on, and no others. Tokens must be divided into blocks again afterwards, see
        `replace`."""
        self._sizes = budget
        bounds = bounds_of(budget.spans, budget.protected, self.rows, self.device)
        self.phase = replace(self.phase, bounds=bounds)

    def protected(self, positions: Tensor) -> Tensor:
        """Bool: which of these positions `[B, ...]` are in a protected span or the protected start."""
        return inside(self.phase.bounds, positions)

    @property
    def spans(self) -> list[Spans]:
        """The protected spans of each row, its start included. Reads a tensor."""
        return spans_in(self.phase.bounds)

    def least(self, sizes: BlockBudget, whole: bool) -> Tensor:
        """`[B]` smallest budget of a set in tokens: room for the protected and the newest tokens, and one block to
        evict.

        Args:
            sizes: present sizes of the layer.
            whole: whether sets hold whole blocks; if not, the block of the protected start ends with its last protected
                token.
        """
        bounds, size = self.phase.bounds, self.block_size
        tokens = (blocks_in(bounds, size) + sizes.recent_blocks + 1) * size
        return tokens if whole else tokens - -bounds[:, 1:2].where(bounds[:, :1] == 0, 0).sum(-1) % size

    def filled(self, real: Tensor | None) -> Tensor | None:
        """`[B]` bool, rows whose sets have all just become full, so that their next token is the first to overwrite
        another; None if there is known to be no such row.

        Args:
            real: `[B, 1]` bool, rows whose next token is no pad; None = all.
        """
        counters = self.counters
        if not counters.overwriting or counters.seen not in counters.full_at_values:
            return None
        full = (self.phase.full_at == counters.seen).all(-1)
        return full if real is None else full & real[:, 0]

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
        self._enter(replace(phase, full_at=phase.full_at + pads[:, None], pads=phase.pads + pads))

    def _enter(self, phase: Phase) -> None:
        """Rows are in another phase. Reads a tensor."""
        self.phase = phase
        self.counters.know(phase.full_at.flatten().tolist(), self.block_size)

    @property
    def in_step(self) -> bool:
        """Whether the blocks of all rows are known to become full at the same time. Reads no tensor."""
        return len(self.counters.residues) == 1

    @property
    def may_fill_block(self) -> bool:
        """Whether the last column may have filled the newest block of some row. Reads no tensor."""
        return self.counters.seen % self.block_size in self.counters.residues

    def block_filled(self) -> Tensor | None:
        """`[B]` bool, rows in which some newest block is full; None if there is known to be none."""
        if not self.may_fill_block:
            return None
        return ((self.counters.seen - self.phase.full_at) % self.block_size == 0).any(-1)

    # ---- overwriting, one token at a time -----------------------------------------------------------------------

    def _start_overwriting(self) -> None:
        """All slots are in use. The row's newest block is its last one."""
        self.write_back()
        counters = self.counters
        full_at = self.phase.full_at.clamp_min(counters.seen)
        if min(counters.full_at_values) < counters.seen:
            counters.know([max(value, counters.seen) for value in counters.full_at_values], self.block_size)
        if self.limits is None and max(counters.full_at_values) == counters.seen:  # neither pads nor dead slots
            order, newest = None, torch.full_like(full_at, (self.capacity - 1) // self.block_size)
        else:
            order, newest = self._order_and_newest((full_at - counters.seen).minimum(self.usable))
        self.phase = replace(self.phase, full_at=full_at, order=order)
        counters.overwriting = True
        counters.chosen_at = -1
        none = torch.zeros_like(full_at)
        blocks = min(self.blocks_ahead, self.capacity // self.block_size)
        self.choice = replace(self.choice, left=none, taken=none, ahead=none[..., None].expand(-1, -1, blocks))
        self.begin(newest)

    def _order_and_newest(self, held_pads: Tensor) -> tuple[Tensor | None, Tensor]:
        """`Phase.order` and the newest block `[B, S]` of full sets with so many pads, `[B, S]`. Reads a tensor."""
        missing = self._missing
        shorter = isinstance(missing, Tensor) and bool(missing.any())
        ordered = shorter or max(self.counters.full_at_values) > self.counters.seen
        newest = (self.usable + missing - held_pads - 1).clamp_min(0) // self.block_size
        return self._logical_order(held_pads) if ordered else None, newest

    @property
    def usable(self) -> Tensor:
        """`[B, S]` number of slots that are not dead."""
        limits = self.phase.limits
        return torch.full_like(self.phase.full_at, self.capacity) if limits is None else limits

    @property
    def _missing(self) -> Tensor | int:
        """`[B, S]` how many places at the start of the first block stay empty, because the set may use a number of
        slots that is no multiple of the block size. The first block is then shorter, and never leaves."""
        limits = self.phase.limits
        return 0 if limits is None else -limits % self.block_size

    def _logical_order(self, held_pads: Tensor) -> Tensor:
        places, usable = torch.arange(self.capacity, device=self.device), self.usable[..., None]
        logical = places - (0 if self.phase.limits is None else -usable % self.block_size)
        shifted = logical + held_pads[..., None]
        order = torch.where(shifted < usable, shifted, usable - 1 - logical)
        order = torch.where(logical < 0, usable + places, order)
        return torch.where(logical < usable, order, places)

    def begin(self, block: Tensor) -> None:
        """Let the next tokens overwrite this logical block, `[B, S]`."""
        slots = block[..., None] * self.block_size + torch.arange(self.block_size, device=self.device)
        if self.phase.order is not None:
            slots = self.phase.order.gather(-1, slots)
        self.choice = replace(self.choice, block=block, slots=slots)

    def block_of_pads(self) -> Tensor:
        """`[B, S]` logical block in the slots of pads, for sets that still hold pads."""
        left = self.phase.full_at - self.counters.seen
        return (self.usable + self._missing - left).clamp_min(0) // self.block_size

    @property
    def full(self) -> bool:
        """Whether all slots are in use, so that the next single token overwrites one."""
        return self.counters.overwriting

    @property
    def victims_due(self) -> bool:
        """Whether victims must be chosen before the next token is written. Reads no tensor."""
        counters = self.counters
        return (
            counters.overwriting
            and counters.seen % self.block_size in counters.residues
            and counters.chosen_at != counters.seen
        )

    @property
    def decides(self) -> bool:
        """Whether some row chooses its next victim by score now, instead of taking one that was chosen before.

        Reads no tensor: the sizes tell how many victims are chosen together, unless rows or heads have different
        budgets, or more than the start and the newest block is protected. The result is True then.
        """
        more = self._sizes.recent > self.block_size or self._sizes.spans
        if self.blocks_ahead == 1 or self.limits is not None or more:
            return True
        blocks, seen = self.capacity // self.block_size, self.counters.seen
        free = blocks - self._sizes.protected_blocks - 1
        together = max(1, min(free // 2, self.blocks_ahead, blocks)) * self.block_size
        return any(seen >= full_at and (seen - full_at) % together == 0 for full_at in self.counters.full_at_values)

    @property
    def tokens_until_due(self) -> int:
        """Number of single tokens until victims are due again, if none of them is a pad. Reads no tensor."""
        seen, size = self.counters.seen, self.block_size
        return size - max([(seen - residue) % size for residue in self.counters.residues])

    def next_slots(self, count: int = 1) -> Tensor:
        """The slots of the next `count` tokens, at most `tokens_until_due`: `[B, S, count]`."""
        counters = self.counters
        if len(counters.residues) == 1:
            (residue,) = counters.residues
            return self.choice.slots.narrow(2, (counters.seen - residue) % self.block_size, count)
        place = (counters.seen - self.phase.full_at) % self.block_size
        return self.choice.slots.gather(2, place[..., None] + torch.arange(count, device=self.device))

    def positions_in(self, slots: Tensor, real: Tensor | None) -> Tensor:
        """`[B, S, 1]` positions of the tokens that the next tokens will overwrite, -1 = none.

        These tokens are older than the choice of the block, so their positions are stored.

        Args:
            real: `[B, 1]` bool, rows whose new token is real; None = all rows.
        """
        positions = self.tokens.positions.gather(-1, slots)
        return positions if real is None else positions.masked_fill(~real[..., None], -1)

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

    def can_group_with(self, other: "BlockTable") -> bool:
        """Whether both tables have equal counters and sizes, so that their victims can be chosen together. Reads no
        tensor."""
        phase, other_phase = self.phase, other.phase
        return (
            self.counters == other.counters
            and self.device == other.device
            and self.tokens.positions.shape == other.tokens.positions.shape
            and (phase.limits is None and other_phase.limits is None)
            and (phase.order is None) == (other_phase.order is None)
            and (self.tokens.shifts is None) == (other.tokens.shifts is None)
        )

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
            shifts: `[B, S, C]`, see `moved_shifts`; None if the table has no shifts.
        """
        counters = self.counters
        counters.seen += count
        if real is not None:
            self._count_pads(real)
        self.phase = replace(self.phase, limits=limits)
        if limits is not None or positions.shape[-1] != self.capacity:
            self._make_room(positions.shape[-1])
            self._enter(replace(self.phase, full_at=self._work_out_full_at(positions)))
        self._write_all(positions, scores, shifts)
        counters.positions_until = counters.seen
        counters.held = self.capacity
        self._start_overwriting()

    def replace_rows(
        self, rows: Tensor, positions: Tensor, scores: Tensor | None, limits: Tensor, shifts: Tensor | None
    ) -> None:
        """Like `replace`, for the rows `[B]` bool only, without new tokens. The other rows do not change.

        Args:
            positions, scores, limits, shifts: values for all rows; those of other rows must be the present ones.
        """
        self.write_back()
        counters, before = self.counters, self.phase
        sets, slots = rows[:, None], positions.shape[-1]
        self._make_room(slots)
        self._write_all(positions, scores, shifts)
        counters.held = slots
        self.phase = replace(before, limits=limits)
        full_at = torch.where(sets, self._work_out_full_at(positions), before.full_at)
        self._enter(replace(self.phase, full_at=full_at))
        order = torch.arange(slots, device=self.device).expand_as(positions)
        if before.order is not None:
            order = torch.cat([before.order[..., :slots], order[..., before.order.shape[-1] :]], dim=-1)
        newest = self._begin_anew(sets, (full_at - counters.seen).clamp_min(0), order)
        missing = max(min(self.blocks_ahead, slots // self.block_size) - self.choice.ahead.shape[-1], 0)
        self.choice = replace(self.choice, ahead=torch.nn.functional.pad(self.choice.ahead, (0, missing)))
        self.begin(torch.where(sets, newest, self.choice.block))

    def _begin_anew(self, sets: Tensor, left: Tensor, order: Tensor) -> Tensor:
        """These sets, `[B, 1 or S]` bool, have `left` `[B, S]` empty slots and no victims chosen ahead; `order` is that
        of the others. Returns the newest block, `[B, S]`."""
        self.phase = replace(self.phase, order=torch.where(sets[..., None], self._logical_order(left), order))
        choice = self.choice
        self.choice = replace(choice, left=choice.left.masked_fill(sets, 0), taken=choice.taken.masked_fill(sets, 0))
        return (self.usable + self._missing - left - 1).clamp_min(0) // self.block_size

    def _write_all(self, positions: Tensor, scores: Tensor | None, shifts: Tensor | None) -> None:
        """What all slots hold, see `replace`."""
        self.tokens.positions.copy_(positions)
        if self.tokens.shifts is not None and shifts is not None:
            closed = shifts_without_gaps(positions, self._next_positions)
            self.tokens.shifts.copy_(torch.where(shifts < 0, closed, shifts))
        if scores is not None:
            self.tokens.scores.copy_(scores)
        self.counters.scored, self.counters.in_arrival_order = scores is not None, False

    def _make_room(self, capacity: int) -> None:
        if capacity != self.capacity:
            self.capacity = capacity
            rows, sets, _ = self.tokens.positions.shape
            self.tokens = empty_tokens(rows, sets, capacity, self.device, self.tokens.shifts is not None)

    def _work_out_full_at(self, positions: Tensor) -> Tensor:
        """`Phase.full_at` from the positions held, `[B, S, held]`."""
        return self.counters.seen + self.usable - (positions >= 0).sum(-1)

    def _grow_again(self, pads: Tensor) -> None:
        """There are free slots; `pads` `[B]` among the columns that remain."""
        counters = self.counters
        full_at = self._work_out_full_at(self.tokens.positions[:, :, : counters.held])
        self._enter(replace(self.phase, full_at=full_at, pads=pads, order=None))
        counters.scored = counters.overwriting = False
        counters.chosen_at = -1

    def resize(self, capacity: int) -> None:
        """Change the number of slots; it must exceed the number in use. Tokens keep their slots."""
        self.write_back()
        old = self.tokens
        self._make_room(capacity)
        for column, before in zip(self.tokens.first(self.held), old.first(self.held), strict=True):
            column.copy_(before)
        self._grow_again(self.pads)

    def shrink(self, order: Tensor | None, count: int, pads: Tensor) -> None:
        """Take back the last `count` columns.

        Args:
            order: `[B, S, held]`, slot that each remaining token moved from (removed ones last); None = none moved.
            pads: `[B]` number of pads among the remaining columns.
        """
        self.write_back()
        counters = self.counters
        if order is not None:
            self.tokens.reorder(order)
        if self.tokens.shifts is not None:
            self.tokens.shifts[:, :, counters.held - count :] = 0
        counters.held -= count
        counters.seen -= count
        counters.positions_until = counters.seen
        self._grow_again(pads)

    # ---- tokens that a later mask hides ---------------------------------------------------------------------------

    def empty_out(self, gone: Tensor) -> None:
        """Remove the tokens in these slots, `[B, S, held]` bool; `put_in_order` must follow."""
        self.write_back()
        self.tokens.positions[:, :, : self.held].masked_fill_(gone, -1)
        if self.tokens.shifts is not None:
            self.tokens.shifts[:, :, : self.held].masked_fill_(gone, 0)
        self.counters.scored = False

    def order_of_text(self, sets: Tensor) -> Tensor:
        """`[B, S, held]` slots of the sets `[B, S]` bool in the order that `replace` needs; slots of other sets in
        their present order."""
        positions, slots = self.tokens.positions[:, :, : self.held], torch.arange(self.held, device=self.device)
        if self.phase.limits is not None:
            positions = positions.masked_fill(slots >= self.phase.limits[..., None], KEEP)
        return torch.where(sets[..., None], positions.argsort(stable=True, dim=-1), slots)

    def put_in_order(self, order: Tensor, sets: Tensor, pads: Tensor) -> None:
        """Store that slots have moved by `order_of_text`. These sets fill their empty slots and then choose a victim;
        the other sets do not change.

        Args:
            pads: `[B]` number of columns without a position from now on.
        """
        counters, before = self.counters, self.phase
        self.tokens.reorder(order)
        counters.in_arrival_order = False
        full_at = self._work_out_full_at(self.tokens.positions[:, :, : counters.held])
        self._enter(replace(before, full_at=torch.where(sets, full_at, before.full_at), pads=pads))
        if not counters.overwriting:
            return
        left = (full_at - counters.seen).clamp_min(0)
        places = torch.arange(self.capacity, device=self.device) if before.order is None else before.order
        newest = self._begin_anew(sets, left, places)
        used_up = sets & (left % self.block_size == 0)
        self.begin(torch.where(sets, torch.where(used_up, self.block_of_pads(), newest), self.choice.block))

    # ---- gaps ---------------------------------------------------------------------------------------------------

    @property
    def held_shifts(self) -> Tensor | None:
        """The present shifts, `[B, S, held]` in slot order."""
        shifts, count = self.tokens.shifts, self.counters.seen - self.counters.positions_until
        if shifts is not None and count and self.counters.overwriting:
            shifts = self._without_newest(shifts, count, None)
        return None if shifts is None else shifts[:, :, : self.held]

    def moved_shifts(self, kept_indices: Tensor, staying: Tensor, positions: Tensor, count: int) -> Tensor | None:
        """The shifts of the tokens that stay, of the held ones and `count` new ones; -1 in sets that lose a token,
        whose gaps must be closed.

        Args:
            kept_indices: `[B, S, n]`, indices of the tokens that stay.
            staying: `[B, S, n]`, their positions, -1 for places without a real token.
            positions: `[B, 1 or S, held + count]`, positions of all tokens.
        """
        before = self.held_shifts
        if before is None:
            return None
        moved = torch.nn.functional.pad(before, (0, count)).gather(-1, kept_indices).masked_fill(staying < 0, 0)
        went = (positions >= 0).sum(-1) > (staying >= 0).sum(-1)
        return moved.masked_fill(went[..., None], -1)

    @property
    def _next_positions(self) -> Tensor:
        """`[B]` of the next real token."""
        return self.counters.seen - self.phase.pads

    def close_gaps(self, beginning: Tensor) -> None:
        """Close the gaps of the sets `[B, S]` that are about to overwrite the first slot of a block."""
        if self.tokens.shifts is None:
            return
        held = self.tokens.positions.scatter(-1, self.choice.slots[..., :1], -1)
        closed = shifts_without_gaps(held, self._next_positions)
        self.tokens.shifts.copy_(torch.where(beginning[..., None], closed, self.tokens.shifts))

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
        newest = self._next_positions[:, None, None] - 1 - behind
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
            shifts.copy_(self._without_newest(shifts, count, real))

    def _without_newest(self, shifts: Tensor, count: int, real: Tensor | None) -> Tensor:
        slots, (fresh, _) = self.choice.slots, self._newest(count, real)
        return shifts.scatter(-1, slots, shifts.gather(-1, slots).masked_fill(fresh, 0))

    def _all_positions(self) -> Tensor:
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
        return self._all_positions()[:, :, : self.counters.held]

    def positions_with(self, new: Tensor) -> Tensor:
        """Positions `[B, S, held + n]`: in slot order, followed by those of new tokens `[B, n]`, the same for all
        sets."""
        held = self._all_positions()[:, :, : self.counters.held]
        return torch.cat([held, new[:, None].expand(-1, held.shape[1], -1)], dim=-1)

    def refresh_scores(self, score_slots: ScoreSlots) -> None:
        """Score the tokens that came since the last eviction: the current block, or all tokens if necessary.

        Args:
            score_slots: returns the scores `[B, S, n]` of the tokens in the slots `[B, S, n]`; None = all slots.
        """
        self.write_back()
        counters, scores, slots = self.counters, self.tokens.scores, self.choice.slots
        if counters.scored:
            scores.scatter_(-1, slots, score_slots(slots))
        else:
            scores[:, :, : counters.held] = score_slots(None)
        counters.scored = counters.overwriting and self._token_local

    @property
    def scores(self) -> Tensor:
        """Scores `[B, S, held]` in slot order, as of the last `refresh_scores`."""
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

    @property
    def evicted_tokens(self) -> Tensor:
        """`[B]` int64, number of real tokens seen and no longer held; a mean if sets hold different numbers."""
        used = self.used
        return self.seen - self.pads - used.sum((1, 2)) // used.shape[1]

    # ---- blocks -------------------------------------------------------------------------------------------------

    def blocks(self) -> Tensor:
        """`[B, S, C / P, P]` positions in logical order; -1 for places without a real token."""
        return self._in_blocks(self._all_positions(), -1)

    def block_scores(self) -> Tensor:
        """`[B, S, C / P]` mean scores of the blocks, as of `refresh_scores`; nan for blocks that are not full."""
        scores = self.tokens.scores
        if not (self.full and self.all_real):
            scores = scores.masked_fill(self._all_positions() < 0, float("nan"))
        return self._in_blocks(scores, float("nan")).mean(-1)

    def align(self) -> None:
        """Let blocks begin at positions that are multiples of `P`; full rows continue inside their last block."""
        inside = (self.counters.seen - self.phase.pads) % self.block_size
        full = self.phase.full_at <= self.counters.seen
        self._enter(replace(self.phase, full_at=self.phase.full_at - inside[:, None] * full))

    def rank_of_blocks(self) -> Tensor:
        """`[B, S, C / P]` int64: the block with the lowest rank goes first; `KEEP` for protected blocks."""
        scores, positions = self.block_scores(), self.blocks()
        keys = rank_keys(scores, positions[..., 0], scores.isnan().logical_not(), self._absolute_noise)
        blocks = torch.arange(keys.shape[-1], device=self.device)
        missing = self._missing
        start = blocks * self.block_size - (missing if isinstance(missing, int) else missing[..., None])
        safe = self.protected(positions).any(-1) | (start < 0) | (blocks == self.choice.block[..., None])
        if self._sizes.recent > self.block_size:  # otherwise the newest block holds them
            first = (self.seen - self.pads)[:, None, None] - self._sizes.recent
            safe |= positions[..., -1] >= first  # the newest token of a block is its last
        if self.limits is not None:
            safe |= blocks * self.block_size >= self.limits[..., None]
        return keys.masked_fill(safe, KEEP)

    def _in_blocks(self, slots: Tensor, missing: float) -> Tensor:
        if not self.full:
            used = torch.arange(self.capacity, device=self.device) < self.held
            positions = self._all_positions()
            positions = positions.masked_fill(~used | (positions < 0), KEEP)
            slots = slots.masked_fill(~used, missing).gather(-1, positions.argsort(stable=True, dim=-1))
        elif self.phase.order is not None:
            slots = slots.gather(-1, self.phase.order)
        return slots.view(*slots.shape[:-1], -1, self.block_size)
