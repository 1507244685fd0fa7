"""The tables of several layers as one, whose rows follow each other, layer by layer."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..tensors.parts import map_tensors, persistent, split_rows
from .state import Choice, Counters, TableState, Tokens
from .table import BlockTable


class Joint:
    """One table for layers that have seen equally many columns.

    It has as many slots as the largest layer; those that another layer lacks are dead. The tokens in the tables of the
    layers are views of its memory. A layer alone keeps its table.

    Attributes:
        tables: the tables of the layers.
        table: the one of all of them.
        rows: number of rows of each layer.
    """

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables, self.rows = list(tables), tables[0].rows
        self.table = tables[0]
        if len(tables) > 1:
            self.table = copy(self.table)
            self.table.capacity = max(own.capacity for own in tables)
            self.table.counters = Counters(self.table.block_size)
            self.table.give(_joined([own.state for own in tables]))
            for own, tokens in zip(tables, split_rows(self.table.tokens, self.rows), strict=True):
                own.tokens = _narrow(tokens, own.capacity)
        self._note()

    def _note(self) -> None:
        """Note the parts of the tables, which nobody else may replace, see `holds`."""
        self._parts = [(own, own.tokens, own.phase, own.choice) for own in self.tables]

    def holds(self) -> bool:
        """Whether nothing but as many single tokens came to each of the tables."""
        counters = self.tables[0].counters
        seen, chosen = counters.seen, counters.chosen_at == counters.seen
        for own, tokens, phase, choice in self._parts:
            its = own.counters
            if own.tokens is not tokens or own.phase is not phase or own.choice is not choice:
                return False
            if its.seen != seen or (its.chosen_at == seen) is not chosen:
                return False
        return True

    def choosing(self) -> list[Tensor | None]:
        """By layer, the rows that may choose a victim now, `[n]` int64; None = all. Reads no tensor."""
        table, counters = self.table, self.table.counters
        if self.rows == 1 or counters.in_step:
            at, none = counters.seen % table.block_size, torch.empty(0, dtype=torch.int64, device=table.device)
            return [None if at in own.counters.residues else none for own in self.tables]
        since = (counters.seen - table.phase.full_at).view(len(self.tables), self.rows, -1)
        chooses = ((since >= 0) & (since % table.block_size == 0)).any(-1)
        order = chooses.int().argsort(descending=True, stable=True)
        counts = [own.counters.choosing for own in self.tables]
        return [None if count == self.rows else rows[:count] for count, rows in zip(counts, order, strict=True)]

    def take_counters(self) -> None:
        """Count what the layers' tables have counted."""
        if len(self.tables) > 1:
            every, counters = [own.counters for own in self.tables], self.table.counters
            if len({its.positions_until for its in every}) > 1:  # somebody has read one of the layers
                for own in self.tables:
                    own.write_back()
            vars(counters).update(vars(every[0]))
            counters.scored = all([its.scored for its in every])
            counters.held = max([its.held for its in every])
            counters.know([row for its in every for row in its.by_row])

    def write_back(self) -> None:
        """See `BlockTable.write_back`, for all tables."""
        self.table.write_back()
        until = self.table.counters.positions_until
        for own in self.tables:
            own.counters.positions_until = until

    def hand_choice(self) -> None:
        """Victims were chosen: the layers overwrite them next."""
        if len(self.tables) > 1:
            counters = self.table.counters
            for own, choice in zip(self.tables, split_rows(self.table.choice, self.rows), strict=True):
                own.choice = choice if choice.ahead.shape[-1] == 1 else _of_blocks(choice, own)
                own.counters.chosen_at, own.counters.scored = counters.chosen_at, counters.scored
        self._note()

    def count_step(self) -> None:
        """Count a real token that was written in every row of every layer."""
        table, grew = self.table, not self.table.full
        if grew:
            table.append(1, None)
        else:
            table.overwritten(None)
        if len(self.tables) == 1:
            self._note()
            return
        for at, own in enumerate(self.tables):
            if grew:  # all have equal counters, and become full now or later
                rows = table.counters.by_row[at * self.rows : (at + 1) * self.rows]
                own.counters = replace(table.counters, by_row=rows)
            else:
                own.counters.seen, own.counters.in_arrival_order = table.counters.seen, False
        if grew and table.full:
            for own, state in zip(self.tables, table.state.split(self.rows), strict=True):
                own.give(state)
            self._note()


def _narrow(tokens: Tokens, slots: int) -> Tokens:
    """Views of the first slots; these tokens if there are no more."""
    return tokens if slots == tokens.positions.shape[-1] else Tokens(*tokens.first(slots))


def _of_blocks(choice: Choice, table: BlockTable) -> Choice:
    """The choice as one of this table, which may have fewer blocks. Victims that are not left may be any."""
    blocks = table.capacity // table.block_size
    return replace(choice, ahead=choice.ahead[..., :blocks].clamp_max(blocks - 1))


def _joined(states: Sequence[TableState]) -> TableState:
    """Concatenate states along the rows."""
    capacities = {state.tokens.positions.shape[-1] for state in states}
    slots, ahead = max(capacities), max(state.choice.ahead.shape[-1] for state in states)
    limited = len(capacities) > 1 or any(state.phase.limits is not None for state in states)
    ordered = any(state.phase.order is not None for state in states)
    alike = [_widened(state, slots, ahead, limited, ordered) for state in states]
    joined = map_tensors(lambda *tensors: torch.cat(tensors), *alike)
    return replace(joined, tokens=map_tensors(persistent, joined.tokens))


def _widened(state: TableState, slots: int, ahead: int, limited: bool, ordered: bool) -> TableState:
    """The same with so many slots and places for victims, and with `limits` and an `order` if these are asked for."""
    tokens, phase, choice = state.tokens, state.phase, state.choice
    held = tokens.positions.shape[-1]
    limits, order = phase.usable(held) if limited else None, phase.order
    if ordered:
        places = torch.arange(slots, device=phase.pads.device)
        parts = (places[:held] if order is None else order), places[held:]
        order = torch.cat([part.expand(*tokens.positions.shape[:2], -1) for part in parts], dim=-1)
    if held < slots:
        values = zip(tokens.first(held), (-1, float("nan"), 0), strict=False)
        tokens = Tokens(*(pad(column, (0, slots - held), value=empty) for column, empty in values))
    if choice.ahead.shape[-1] < ahead:
        choice = replace(choice, ahead=pad(choice.ahead, (0, ahead - choice.ahead.shape[-1])))
    return TableState(tokens, replace(phase, limits=limits, order=order), choice)
