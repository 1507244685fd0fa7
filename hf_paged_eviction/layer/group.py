"""Layers of one cache that choose their victims together, whatever their limits are."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..store.segments import Segments
from ..table.state import Counters, join
from ..table.victims import asks, choose
from ..tensors.graphs import static_zeros
from ..tensors.parts import split_rows
from .block_fill import BlockFill, SlotsOfTokens
from .layer_state import LayerState
from .next_slots import NextSlots
from .scores import ask, in_slots

#: Makes a context manager.
Around = Callable[[], AbstractContextManager[Any]]


class Group:
    """Chooses victims once for several layers that have seen equally many tokens, and counts for them between compiled
    steps.

    Its table has the rows of all layers, layer by layer, and as many slots as the largest layer; slots that a layer
    lacks are dead. The tokens in the tables of the layers are views of its memory. A group may consist of one layer, and
    then uses that layer's table.

    Attributes:
        table: see above.
        next_slots: slots of the next token in compiled steps; None before `begin_steps`.

    Args:
        layers: these layers, in the order of the model, see `LayerState.can_group_with`.
        around: see `Plan.surround`.
    """

    def __init__(self, layers: Sequence[LayerState], around: Around = nullcontext) -> None:
        self.layers = list(layers)
        self.around = around
        self.next_slots: NextSlots | None = None
        self._fills: list[BlockFill] = []
        self._tables = [layer.known for layer in layers]
        self.table = self._tables[0]
        if len(self._tables) > 1:
            self.table = copy(self.table)
            self.table.capacity = max(table.capacity for table in self._tables)
            self.table.counters = Counters(self.table.block_size)
            self._write_back()
            self.table.give(join([table.state for table in self._tables]))
            for table, tokens in zip(self._tables, split_rows(self.table.tokens, self.rows), strict=True):
                table.tokens = tokens.narrow(table.capacity)
        layouts = [layer.store.columns.layout for layer in layers]
        ragged = [layout for layout in layouts if isinstance(layout, Segments)]
        self._layout = Segments.joined(ragged) if len(ragged) > 1 else layouts[0]
        self._note()

    @property
    def rows(self) -> int:
        """Number of rows of each layer."""
        return self._tables[0].rows

    def _note(self) -> None:
        """Note what the layers consist of now, see `serves`."""
        self._parts = [
            (table, table.tokens, table.phase, table.choice, layer.store.columns.layout)
            for layer, table in zip(self.layers, self._tables, strict=True)
        ]

    def serves(self) -> bool:
        """Whether these layers still consist of the same parts, and have seen equally many tokens."""
        counters = self._tables[0].counters
        seen, chosen = counters.seen, counters.chosen_at == counters.seen
        for layer, (table, tokens, phase, choice, layout) in zip(self.layers, self._parts, strict=True):
            its = table.counters
            if (
                layer.table is not table
                or table.tokens is not tokens
                or table.phase is not phase
                or table.choice is not choice
                or layer.store.columns.layout is not layout
                or its.seen != seen
                or (its.chosen_at == seen) is not chosen
                or (seen in its.full_at_values and layer.to_divide)
            ):
                return False
        return True

    def take_counters(self) -> None:
        """Copy the counters of the layers' tables."""
        if self.table is not self._tables[0]:
            self._write_back()
            every = [table.counters for table in self._tables]
            counters = self.table.counters
            counters.take(every[0])
            counters.scored = all(its.scored for its in every)
            counters.held = max(its.held for its in every)
            counters.know(frozenset[int]().union(*(its.full_at_values for its in every)))

    def _write_back(self) -> None:
        """Where layers have stored the positions of different numbers of tokens, all of them store them."""
        if len({table.counters.positions_until for table in self._tables}) > 1:
            for table in self._tables:
                table.write_back()

    # ---- choosing -----------------------------------------------------------------------------------------------

    def choose_victims(self, real: Tensor | None = None) -> None:
        """Choose the next block to overwrite, for every set whose block is used up.

        Args:
            real: `[B, 1]` bool, rows whose next token is not a pad; None = all rows.
        """
        with self.around():
            self._choose_victims(real)

    def _choose_victims(self, real: Tensor | None) -> None:
        table, layers, action = self.table, self.layers, self.layers[0].action
        table.write_back()
        self._hand_counters()
        # An action that plans for blocks that go is shown their scores.
        scores = self._scores(table.unscored) if asks(table, always=action.plans) else None
        begins = choose(table, scores, None if real is None else real.repeat(len(layers), 1))
        if len(layers) > 1:
            for own, choice in zip(self._tables, split_rows(table.choice, self.rows), strict=True):
                own.choice = choice.narrow(own.capacity // own.block_size)
            self._hand_counters()
        self._note()
        if action.plans:
            for layer, begins_here in zip(layers, begins.split(self.rows), strict=True):
                layer.plan(begins_here)
        if table.tokens.shifts is not None:
            for layer in layers:
                layer.rerotate_keys()

    def _scores(self, slots: Tensor | None) -> Tensor:
        """The scores of the tokens in these slots `[layers * B, S, n]`, None = all of them, as each layer gives them."""
        first, needs, table = self.layers[0], self.layers[0].needs, self.table
        if slots is None:
            return self._all_scores(every=needs.token_local)
        parts = [*zip(self.layers, slots.split(self.rows), strict=True)]
        stackable = needs.token_local and not needs.by_layer and not first.early and len(parts) > 1
        stackable = stackable and not (needs.reads_budget and table.limits is not None)
        if not stackable or any(layer.scorer.rotary is not first.scorer.rotary for layer in self.layers):
            return torch.cat([in_slots(layer, part) for layer, part in parts])
        states = [layer.store.at(part) for layer, part in parts]
        keys, values = map(torch.cat, zip(*states, strict=True))
        return ask(first, keys, values, table.tokens.positions.gather(-1, slots), table.seen - table.pads)

    def _all_scores(self, every: bool) -> Tensor:
        """The scores of all held tokens. In layers where no block is full, none is asked for; unless `every` score
        stays what it is, such a layer works none out."""
        due, held, scores = self.table.counters.seen % self.table.block_size, self.table.held, []
        for layer, own in zip(self.layers, self._tables, strict=True):
            is_due = every or due in own.counters.residues
            of_layer = in_slots(layer, None) if is_due else own.scores
            missing = held - of_layer.shape[-1]
            scores.append(pad(of_layer, (0, missing), value=float("nan")) if missing else of_layer)
        return torch.cat(scores)

    def fill(self) -> None:
        """Prepare single tokens to be written until victims are due again."""
        table, first = self.table, self.layers[0]
        slots = SlotsOfTokens(
            first.store.columns, self._layout, self.rows, table.next_slots(table.counters.tokens_until_due)
        )
        if not self._fills:
            for layer, own in zip(self.layers, self._tables, strict=True):
                self._fills.append(BlockFill(own, layer.store, layer.padding, layer.exposed, layer.own_mask))
        for place, (layer, fill) in enumerate(zip(self.layers, self._fills, strict=True)):
            fill.begin(slots, place)
            layer.fill = fill

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
        table = self.table
        if table.full:
            table.overwritten(None)
        else:
            table.append(1, None)
            if table.full and table is not self._tables[0]:
                for own, state in zip(self._tables, table.state.split(self.rows), strict=True):
                    own.give(state)
                    own.counters = replace(table.counters)
            self._note()
        self._hand_counters()

    def _hand_counters(self) -> None:
        for table in self._tables:
            if table is not self.table:
                table.counters.take(self.table.counters)
                table.counters.held = min(self.table.held, table.capacity)


def _taken_over(old: Tensor | None, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor of an earlier group, if it fits, or a new one; at a fixed address."""
    fits = old is not None and (tuple(old.shape), old.device) == (shape, device)
    return old if old is not None and fits else static_zeros(shape, device, dtype)
