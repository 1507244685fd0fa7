"""Layers of one cache that choose their victims together, because they have equal counters and sizes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from ..table.state import Counters, TableState, join
from ..table.table import BlockTable, ScoreSlots
from ..table.victims import choose
from ..tensors.graphs import static_zeros
from ..tensors.parts import split_rows
from .block_fill import BlockFill, SlotsOfTokens
from .layer_state import LayerState
from .next_slots import NextSlots
from .scores import ask, in_slots

#: Makes a context manager.
Around = Callable[[], AbstractContextManager[Any]]


class Group:
    """Chooses victims once for several layers of equal counters and sizes, and counts for them between compiled steps.

    Its table has the rows of all layers, layer by layer; the tables of the layers are views of its memory. A group may
    consist of one layer, and then uses that layer's table.

    Attributes:
        next_slots: slots of the next token in compiled steps; None before `begin_steps`.

    Args:
        layers: these layers, in the order of the model.
        around: see `Plan.surround`.
    """

    def __init__(self, layers: Sequence[LayerState], around: Around = nullcontext) -> None:
        self.layers = list(layers)
        self.around = around
        self.next_slots: NextSlots | None = None
        self._tables = [layer.known for layer in layers]
        self._handed_out: list[TableState] = []
        self._layouts: list[object] = []  # of the stores when single tokens were prepared
        self.table = self._tables[0]
        if len(self._tables) > 1:
            self.table = copy(self.table)
            self.table.counters = Counters(self.table.block_size)
            self.table.give(join([table.state for table in self._tables]))
            self._hand_out()

    def serves(self, layers: Sequence[LayerState]) -> bool:
        """Whether these layers still use the tensors of this group. In a forward of several tokens a layer makes new
        tensors."""
        tables = [layer.known for layer in layers]
        if len(tables) != len(self._tables) or any(map(is_not, tables, self._tables)):
            return False
        # A group of one layer uses the layer's own tensors.
        return all(
            table.tokens is state.tokens and table.phase is state.phase and table.choice is state.choice
            for table, state in zip(tables, self._handed_out, strict=False)
        )

    def in_step(self) -> bool:
        """Whether nothing but as many single tokens came to each of these layers since they were prepared for them."""
        counters = vars(self._tables[0].counters)
        return (
            len(self._layouts) == len(self._tables)
            and self.serves(self.layers)
            and all(
                layer.store.columns.layout is layout and vars(table.counters) == counters
                for layer, layout, table in zip(self.layers, self._layouts, self._tables, strict=True)
            )
        )

    def take_counters(self) -> None:
        """Copy the counters of the layers' tables."""
        if self._handed_out:
            self.table.counters.take(self._tables[0].counters)

    # ---- choosing -----------------------------------------------------------------------------------------------

    def choose_victims(self, real: Tensor | None = None) -> None:
        """Choose the next block to overwrite, for every set whose block is used up.

        Args:
            real: `[B, 1]` bool, rows whose next token is not a pad; None = all rows.
        """
        with self.around():
            self._choose_victims(real)

    def _choose_victims(self, real: Tensor | None) -> None:
        if not self._handed_out:
            self._begin(choose(self.table, lambda slots: in_slots(self.layers[0], slots), real, self._shows_scores))
            return
        self.table.write_back()
        self._hand_counters()
        real = None if real is None else real.repeat(len(self.layers), 1)
        begins = choose(self.table, _score_together(self.layers, self.table), real, self._shows_scores)
        choices = split_rows(self.table.choice, self._tables[0].rows)
        self._handed_out = [
            replace(state, choice=choice) for state, choice in zip(self._handed_out, choices, strict=True)
        ]
        for table, choice in zip(self._tables, choices, strict=True):
            table.choice = choice
        self._hand_counters()
        self._begin(begins)

    @property
    def _shows_scores(self) -> bool:
        """Whether an action plans for blocks that go: it is shown their scores, so they have to be worked out."""
        return self.layers[0].action.plans

    def _begin(self, begins: Tensor) -> None:
        """Blocks are about to be overwritten: tell the layers' actions, where they want to know, and turn keys."""
        if self.layers[0].action.plans:
            for layer, begins_here in zip(self.layers, begins.split(self._tables[0].rows), strict=True):
                layer.plan(begins_here)
        if self.table.tokens.shifts is not None:
            for layer in self.layers:
                layer.rerotate_keys()

    def fill(self) -> None:
        """Prepare single tokens to be written until victims are due again."""
        table, first = self.table, self.layers[0]
        slots = SlotsOfTokens(first.store.columns, first.rows, table.next_slots(table.counters.tokens_until_due))
        self._layouts = []
        for place, layer in enumerate(self.layers):
            if layer.may_fill:
                layer.fill = BlockFill(layer.known, layer.store, layer.padding, layer.exposed, slots, place)
            self._layouts.append(layer.store.columns.layout)

    # ---- compiled steps -----------------------------------------------------------------------------------------

    def begin_steps(self, old: NextSlots | None) -> None:
        """Take compiled steps from now on; `old`: slots of earlier steps, whose tensors are used again if they fit."""
        table, own_mask, visible = self.table, self.layers[0].own_mask, None
        shape = (*table.phase.full_at.shape, 1)
        slots = _taken_over(None if old is None else old.slots, shape, table.device, torch.int64)
        if own_mask and not (table.full and table.all_real):
            shape = (*shape[:2], table.capacity)
            visible = _taken_over(None if old is None else old.visible, shape, table.device, torch.bool)
            visible[..., : table.held] = table.used
            visible[..., table.held :] = False
        all_real = table.all_used if own_mask else table.full and table.all_real
        self.next_slots = NextSlots(slots, visible, all_real, None if all_real else visible)
        for index, layer in enumerate(self.layers):
            layer.join(self.next_slots, index)

    def prepare_step(self) -> None:
        """Choose victims that are due, and compute the slots of the next token."""
        table, next_slots = self.table, self.next_slots
        if next_slots is None:
            raise RuntimeError("The group takes no compiled steps.")
        if not table.counters.overwriting:
            next_slots.slots.fill_(table.held)
        else:
            if table.counters.victims_due:
                self.choose_victims()
            next_slots.slots.copy_(table.next_slots())
        if next_slots.filling is not None:
            next_slots.filling.scatter_(2, next_slots.slots, True)

    def advance(self) -> None:
        """Count a real token that was written in every row of every layer."""
        if self.table.full:
            self.table.overwritten(None)
        else:
            self.table.append(1, None)
            if self.table.full:
                self._hand_out()
        self._hand_counters()

    def _hand_out(self) -> None:
        if len(self._tables) == 1:
            return
        self._handed_out = self.table.state.split(self._tables[0].rows)
        for table, state in zip(self._tables, self._handed_out, strict=True):
            table.give(state)

    def _hand_counters(self) -> None:
        for table in self._tables:
            if table is not self.table:
                table.counters.take(self.table.counters)


def _taken_over(old: Tensor | None, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor of an earlier group, if it fits, or a new one; at a fixed address."""
    fits = old is not None and (tuple(old.shape), old.device) == (shape, device)
    return old if old is not None and fits else static_zeros(shape, device, dtype)


def _score_together(layers: Sequence[LayerState], table: BlockTable) -> ScoreSlots:
    """The `in_slots` of alike layers as one: rows are those of all layers, layer by layer, as in the `table`."""
    first, rows = layers[0], layers[0].known.rows

    def one_by_one(slots: Tensor | None) -> Tensor:
        parts = [None] * len(layers) if slots is None else slots.split(rows)
        return torch.cat([in_slots(layer, part) for layer, part in zip(layers, parts, strict=True)])

    def at_once(slots: Tensor | None) -> Tensor:
        if slots is None:
            return one_by_one(None)
        states = [layer.store.at(part) for layer, part in zip(layers, slots.split(rows), strict=True)]
        keys, values = map(torch.cat, zip(*states, strict=True))
        return ask(first, keys, values, table.tokens.positions.gather(-1, slots), table.seen - table.pads)

    stackable = first.needs.token_local and not first.needs.by_layer and not first.early
    return at_once if stackable and all(layer.scorer.rotary is first.scorer.rotary for layer in layers) else one_by_one
