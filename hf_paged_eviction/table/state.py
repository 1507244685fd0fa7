"""The tensors and counters of a table.

Shapes: `B` rows, `S` sets of victims (1 where all KV heads share theirs, else the number of KV heads), `C` slots, `P`
block size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors.parts import map_tensors, persistent, split_rows


@dataclass(frozen=True)
class Tokens:
    """The entries of each slot. Written in place.

    Attributes:
        positions: `[B, S, C]` int64, -1 for slots without a real token.
        scores: `[B, S, C]` float32, nan = unknown.
        shifts: `[B, S, C]` int64, number of positions by which the key of each slot is rotated forward for attention,
            see `gaps`; None if keys keep their positions in the text.
    """

    positions: Tensor
    scores: Tensor
    shifts: Tensor | None = None

    def first(self, held: int) -> list[Tensor]:
        """Views of the first `held` slots."""
        return [column[:, :, :held] for column in vars(self).values() if column is not None]

    def reorder(self, order: Tensor) -> None:
        """Reorder the first slots by `order` `[B, S, held]`."""
        for column in self.first(order.shape[-1]):
            column.copy_(column.gather(-1, order))


@dataclass(frozen=True)
class Phase:
    """The phase of each row inside its blocks.

    Attributes:
        pads: `[B]` int64, number of pads among the columns seen.
        full_at: `[B, S]` int64, number of columns seen at which the set is full of real tokens.
        limits: `[B, S]` int64, number of slots that a set may use, the others are dead; None = all slots.
        order: `[B, S, C]` int64, slot of each logical place; None if they are the same.
        bounds: `[B, n]` int64, protected spans, see `bounds`.
    """

    pads: Tensor
    full_at: Tensor
    bounds: Tensor
    limits: Tensor | None = None
    order: Tensor | None = None

    def usable(self, slots: int) -> Tensor:
        """`[B, S]` number of slots, of so many, that are not dead."""
        return torch.full_like(self.full_at, slots) if self.limits is None else self.limits

    def missing(self, block_size: int) -> Tensor | int:
        """`[B, S]` how many places at the start of the first block stay empty, because the set may use a number of
        slots that is no multiple of the block size. The first block is then shorter, and never leaves."""
        return 0 if self.limits is None else -self.limits % block_size

    def block_at(self, slots: int, block_size: int, left: Tensor) -> Tensor:
        """`[B, S]` logical block of the usable place that `left` `[B, S]` others follow, the last one included."""
        return (self.usable(slots) + self.missing(block_size) - left).clamp_min(0) // block_size

    def logical_order(self, slots: int, block_size: int, held_pads: Tensor) -> Tensor:
        """`order` of full sets with so many pads, `[B, S]`."""
        places, usable = torch.arange(slots, device=self.pads.device), self.usable(slots)[..., None]
        logical = places - (0 if self.limits is None else -usable % block_size)
        shifted = logical + held_pads[..., None]
        order = torch.where(shifted < usable, shifted, usable - 1 - logical)
        order = torch.where(logical < 0, usable + places, order)
        return torch.where(logical < usable, order, places)


@dataclass(frozen=True)
class Choice:
    """The block that each set overwrites, and the victims chosen with it.

    Attributes:
        block: `[B, S]` int64, logical block that is being overwritten, the newest one.
        slots: `[B, S, P]` int64, its slots.
        ahead: `[B, S, n]` int64, blocks that were chosen together.
        left, taken: `[B, S]` int64, number of these blocks that are left, and that were taken.
        evicted_blocks: `[B]` int64, number of blocks so far that new tokens have begun to overwrite.
    """

    block: Tensor
    slots: Tensor
    ahead: Tensor
    left: Tensor
    taken: Tensor
    evicted_blocks: Tensor


@dataclass(frozen=True)
class TableState:
    """All tensors of a table; dimension 0 is the row."""

    tokens: Tokens
    phase: Phase
    choice: Choice

    @classmethod
    def empty(
        cls, bounds: Tensor, sets: int, slots: int, block_size: int, ahead: int, shifting: bool = False
    ) -> "TableState":
        """The state before the first token; `bounds`, see `Phase`, has the rows and the device."""
        rows, device = bounds.shape[0], bounds.device
        none = torch.zeros(rows, dtype=torch.int64, device=device)
        block = torch.zeros(rows, sets, dtype=torch.int64, device=device)
        return cls(
            empty_tokens(rows, sets, slots, device, shifting),
            Phase(none, torch.full_like(block, slots), bounds),
            Choice(
                block,
                block[..., None].expand(-1, -1, block_size),
                block[..., None].expand(-1, -1, ahead),
                left=block,
                taken=block,
                evicted_blocks=none,
            ),
        )

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "TableState":
        """The same with the rows indexed."""
        tokens = map_tensors(lambda states: persistent(change(states)), self.tokens)
        return TableState(tokens, map_tensors(change, self.phase), map_tensors(change, self.choice))

    def split(self, rows: int) -> "list[TableState]":
        """Views of so many rows each."""
        parts = zip(*(split_rows(part, rows) for part in (self.tokens, self.phase, self.choice)), strict=True)
        return [TableState(*part) for part in parts]


def empty_tokens(rows: int, sets: int, slots: int, device: torch.device, shifting: bool = False) -> Tokens:
    """Empty slots, which may be written to inside and outside of `torch.inference_mode`."""
    with torch.inference_mode(False):
        positions = torch.full((rows, sets, slots), -1, dtype=torch.int64, device=device)
        scores = torch.full(positions.shape, float("nan"), device=device)
        return Tokens(positions, scores, torch.zeros_like(positions) if shifting else None)


@dataclass
class Counters:
    """Counters that are equal in all rows and known without reading a tensor.

    Attributes:
        block_size: tokens per block.
        by_row: a superset of the values in `Phase.full_at`, row by row.
        full_at_values: those of any row.
        residues: these values modulo the block size, which tell when blocks are full.
        held: number of slots in use.
        seen: number of columns seen, pads included.
        in_arrival_order: whether column `n` of the batch is in slot `n`.
        overwriting: whether all slots are in use.
        positions_until: number of columns whose positions are stored. Positions are stored once per block, not once per
            token.
        scored: whether only the newest block lacks scores.
        chosen_at: value of `seen` for which victims have been chosen.
    """

    block_size: int
    by_row: tuple[frozenset[int], ...] = ()
    full_at_values: frozenset[int] = frozenset()
    residues: frozenset[int] = frozenset()
    held: int = 0
    seen: int = 0
    in_arrival_order: bool = True
    overwriting: bool = False
    positions_until: int = 0
    scored: bool = False
    chosen_at: int = -1

    @property
    def in_step(self) -> bool:
        """Whether the blocks of all rows are known to become full at the same time."""
        return len(self.residues) == 1

    @property
    def may_fill_block(self) -> bool:
        """Whether the last column may have filled the newest block of some row."""
        return self.seen % self.block_size in self.residues

    @property
    def victims_due(self) -> bool:
        """Whether victims must be chosen before the next token is written."""
        return self.overwriting and self.may_fill_block and self.chosen_at != self.seen

    @property
    def tokens_until_due(self) -> int:
        """Number of single tokens until victims are due again, if none of them is a pad."""
        return self.block_size - max([(self.seen - residue) % self.block_size for residue in self.residues])

    @property
    def choosing(self) -> int:
        """The number of rows that may choose a victim now."""
        due = {at for at in self.full_at_values if at <= self.seen and (self.seen - at) % self.block_size == 0}
        return sum([not due.isdisjoint(values) for values in self.by_row])

    def know(self, by_row: Iterable[Iterable[int]]) -> None:
        """Store values of `full_at`, row by row."""
        self.by_row = tuple(map(frozenset, by_row))
        self.full_at_values = frozenset[int]().union(*self.by_row)
        self.residues = frozenset([value % self.block_size for value in self.full_at_values])
