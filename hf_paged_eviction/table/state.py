"""The tensors and counters of a table.

Shapes: `B` rows, `S` sets of victims (1 where all KV heads share theirs, else the number of KV heads), `C` slots, `P`
block size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..parts import map_tensors, persistent, split_rows


@dataclass(frozen=True)
class Tokens:
    """What each slot holds. Written in place.

    Attributes:
        positions: `[B, S, C]` int64, -1 where no real token is.
        scores: `[B, S, C]` float32, nan where none is kept.
        shifts: `[B, S, C]` int64, how many positions forward the key of each slot is turned for attention, see `gaps`;
            None where keys stay at the positions of the text.
    """

    positions: Tensor
    scores: Tensor
    shifts: Tensor | None = None

    def first(self, held: int) -> list[Tensor]:
        """Views of the first `held` slots of each."""
        return [column[:, :, :held] for column in vars(self).values() if column is not None]

    def reorder(self, order: Tensor) -> None:
        """Bring the first slots into another order, `[B, S, held]`."""
        for column in self.first(order.shape[-1]):
            column.copy_(column.gather(-1, order))


@dataclass(frozen=True)
class Phase:
    """How far each row is.

    Attributes:
        pads: `[B]` int64, pads among the columns seen.
        full_at: `[B, S]` int64, columns seen at which the set holds as many real tokens as it may.
        limits: `[B, S]` int64, slots that a set may use, the others are dead; None = all of them.
        order: `[B, S, C]` int64, slot of each logical place; None where they are the same.
        bounds: `[B, n]` int64, which tokens are protected wherever the row is, see `bounds`.
    """

    pads: Tensor
    full_at: Tensor
    bounds: Tensor
    limits: Tensor | None = None
    order: Tensor | None = None


@dataclass(frozen=True)
class Choice:
    """The block that each set overwrites, and the victims chosen with it.

    Attributes:
        block: `[B, S]` int64, logical block being overwritten: the newest one.
        slots: `[B, S, P]` int64, its slots.
        ahead: `[B, S, n]` int64, blocks chosen together.
        left, taken: `[B, S]` int64, how many of them are left, and how many were taken.
        evicted_blocks: `[B]` int64, blocks whose overwriting has begun.
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
        """Nothing has been seen; `bounds`, see `Phase`, tell the rows and the device."""
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
                *(block, block, none),
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


def join(states: Sequence[TableState]) -> TableState:
    """One state whose rows are those of all, one after the other."""
    joined = map_tensors(lambda *tensors: torch.cat(tensors), *states)
    return replace(joined, tokens=map_tensors(persistent, joined.tokens))


def empty_tokens(rows: int, sets: int, slots: int, device: torch.device, shifting: bool = False) -> Tokens:
    """Slots that hold nothing, to be written to in and out of `torch.inference_mode`."""
    with torch.inference_mode(False):
        positions = torch.full((rows, sets, slots), -1, dtype=torch.int64, device=device)
        scores = torch.full(positions.shape, float("nan"), device=device)
        return Tokens(positions, scores, torch.zeros_like(positions) if shifting else None)


@dataclass
class Counters:
    """What is equal in all rows, and known without reading a tensor.

    Attributes:
        full_at_values: the values that `Phase.full_at` has, or more: it stays true when rows are permuted.
        residues: these modulo the block size: when blocks are full.
        held: slots in use.
        seen: columns seen, pads included.
        in_arrival_order: whether column `n` of the batch lies in slot `n`.
        overwriting: whether all slots are in use.
        positions_until: columns whose positions are written. They are written once per block, not once per token.
        scored: whether only the newest block lacks scores.
        chosen_at: value of `seen` for which victims have been chosen.
    """

    full_at_values: frozenset[int] = frozenset()
    residues: frozenset[int] = field(default=frozenset())
    held: int = 0
    seen: int = 0
    in_arrival_order: bool = True
    overwriting: bool = False
    positions_until: int = 0
    scored: bool = False
    chosen_at: int = -1

    def take(self, other: "Counters") -> None:
        """Count what another table has counted."""
        vars(self).update(vars(other))

    def know(self, full_at_values: Iterable[int], block_size: int) -> None:
        """Take note of when rows are full."""
        self.full_at_values = frozenset(full_at_values)
        self.residues = frozenset([value % block_size for value in self.full_at_values])
