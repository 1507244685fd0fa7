"""Tables of several alike layers as one, so that what happens once per block happens once for all of them."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from .blocks import BY_ROW, CHOSEN, COUNTERS, WRITTEN, BlockTable, ScoreSlots, persistent


class MergedTable:
    """One `BlockTable` whose rows are those of all layers, layer by layer; the layers' own tables share its memory.

    Args:
        tables: alike (see `BlockTable.alike`), in the order of their layers.
    """

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = list(tables)
        self.table = _joined(self.tables)
        self._hand_out(BY_ROW)

    def serves(self, tables: Sequence[BlockTable]) -> bool:
        """Whether these are the layers' tables, holding what they were given: not after a forward of several tokens."""
        return len(tables) == len(self.tables) and all(
            table is own and table._positions is positions and table._slots is slots and table.pads is pads
            for table, own, (positions, slots, pads) in zip(tables, self.tables, self._given, strict=True)
        )

    def choose_victims(self, score_slots: ScoreSlots, real: Tensor | None) -> None:
        """`BlockTable.choose_victims` for all layers, on counters that are those of the layers' own tables.

        Args:
            score_slots: of all rows of all layers.
            real: `[B, 1]`, of one layer.
        """
        self.take_counters()
        self.table.write_back()
        self.hand_counters()
        self.table.choose_victims(score_slots, None if real is None else real.repeat(len(self.tables), 1))
        self._hand_out(CHOSEN)
        self.hand_counters()

    def advance(self) -> None:
        """A real token was written in every row of every layer."""
        if self.table.full:
            self.table.overwritten(None)
        else:
            self.table.append(1, None)
            if self.table.full:
                self._hand_out(BY_ROW)
        self.hand_counters()

    def take_counters(self) -> None:
        """Be as far as the layers' tables are."""
        _copy_counters(self.tables[0], self.table)

    def hand_counters(self) -> None:
        """Let the layers' tables be as far as this one is."""
        for table in self.tables:
            _copy_counters(self.table, table)

    def _hand_out(self, names: Sequence[str]) -> None:
        rows = self.tables[0].rows
        for name in names:
            joined = getattr(self.table, name)
            parts = [None] * len(self.tables) if joined is None else joined.split(rows)
            for table, part in zip(self.tables, parts, strict=True):
                setattr(table, name, part)
        self._given = [(table._positions, table._slots, table.pads) for table in self.tables]


def _joined(tables: Sequence[BlockTable]) -> BlockTable:
    joined = copy(tables[0])
    for name in BY_ROW:
        parts = [getattr(table, name) for table in tables]
        if parts[0] is not None:
            states = torch.cat(parts)
            setattr(joined, name, persistent(states) if name in WRITTEN else states)
    return joined


def _copy_counters(source: BlockTable, target: BlockTable) -> None:
    for name in COUNTERS:
        setattr(target, name, getattr(source, name))
