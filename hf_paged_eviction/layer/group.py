"""Layers of one cache that choose their victims together, whatever their limits are."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..store.segments import Segments
from ..table.joint import Joint
from ..table.victims import asks, choose
from ..tensors.graphs import static_zeros
from .layer_state import LayerState
from .scores import ask, in_slots
from .single import BlockFill, NextSlots, PlacesOfTokens, SlotsOfTokens


class Group:
    """Chooses victims once for several layers that have seen equally many tokens, and counts for them between compiled
    steps.

    Attributes:
        layers: these layers, in the order of the model, which are `alike`.
        joint: their tables as one.
        next_slots: slots of the next token in compiled steps; None before `begin_steps`.
    """

    def __init__(self, layers: Sequence[LayerState]) -> None:
        self.layers = list(layers)
        self.joint = Joint([layer.known for layer in layers])
        self.table, self.rows = self.joint.table, self.joint.rows
        self.next_slots: NextSlots | None = None
        self._layouts = [layer.store.columns.layout for layer in layers]
        ragged = [layout for layout in self._layouts if isinstance(layout, Segments)]
        self._layout = Segments.joined(ragged) if len(ragged) > 1 else self._layouts[0]
        self._fills: list[BlockFill] = []
        self._one_kind = len({layer.exact_kind for layer in layers}) == 1

    def serves(self) -> bool:
        """Whether these layers still consist of the same parts, and have seen equally many tokens."""
        for layer, table, layout in zip(self.layers, self.joint.tables, self._layouts, strict=True):
            if layer.table is not table or layer.store.columns.layout is not layout:
                return False
        limits = self.layers[0].budget.table
        divides = limits.foreseen is not None and limits.foresees(self.joint.tables[0].counters.seen)
        return self.joint.holds() and not (divides and any([layer.to_divide for layer in self.layers]))

    # ---- choosing -----------------------------------------------------------------------------------------------

    def choose_victims(self, real: Tensor | None = None) -> None:
        """Choose the next block to overwrite, for every set whose block is used up.

        Args:
            real: `[B, 1]` bool, rows whose next token is not a pad; None = all rows.
        """
        table, joint, layers, action = self.table, self.joint, self.layers, self.layers[0].action
        joint.write_back()
        # An action that plans for blocks that go is shown their scores.
        scores = self._scores(table.unscored) if asks(table, always=action.acts) else None
        begins = choose(table, scores, None if real is None else real.repeat(len(layers), 1))
        joint.hand_choice()
        if action.acts or table.tokens.shifts is not None:
            for layer, rows, begins_here in zip(layers, joint.choosing(), begins.split(self.rows), strict=True):
                if rows is not None and not len(rows):
                    continue
                if action.acts:
                    layer.plan(begins_here)
                layer.rerotate_keys()

    def _scores(self, slots: Tensor | None) -> Tensor:
        """The scores of the tokens in these slots `[layers * B, S, n]`, as each layer gives them; None = of all."""
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
        """The scores of all held tokens. Only rows that may choose a victim have theirs worked out, unless `every`
        score stays what it is."""
        scores, choosing = [], [None] * len(self.layers) if every else self.joint.choosing()
        for layer, own, rows in zip(self.layers, self.joint.tables, choosing, strict=True):
            of_layer = in_slots(layer, None) if rows is None else own.scores
            if rows is not None and len(rows):
                of_layer.index_copy_(0, rows, in_slots(layer, None, rows))
            missing = self.table.held - of_layer.shape[-1]
            scores.append(pad(of_layer, (0, missing), value=float("nan")) if missing else of_layer)
        return torch.cat(scores)

    def fill(self) -> None:
        """Prepare single tokens to be written until victims are due again."""
        table, columns = self.table, self.layers[0].store.columns
        next_slots = table.next_slots(table.counters.tokens_until_due)
        slots: SlotsOfTokens | PlacesOfTokens
        if not self.layers[0].store.rounds:
            slots = SlotsOfTokens(columns, self._layout, self.rows, next_slots)
        elif self._one_kind:
            slots = PlacesOfTokens([layer.store.exact for layer in self.layers], self.rows, next_slots)
        else:
            for layer in self.layers:
                layer.may_fill = False
            return
        if not self._fills:
            for layer, own in zip(self.layers, self.joint.tables, strict=True):
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
        """Compute the slots of the next token. Victims have been chosen."""
        table, next_slots = self.table, self.next_slots
        if next_slots is None:
            raise RuntimeError("The group takes no compiled steps.")
        if table.full:
            next_slots.slots.copy_(table.next_slots())
        else:
            next_slots.slots.fill_(table.held)
        if next_slots.filling is not None:
            next_slots.filling.scatter_(2, next_slots.slots, True)


def append(layers: Sequence[LayerState]) -> None:
    """Prepare single tokens to be appended to these layers, which are `alike`, until one has a decision to make: it is
    full, or needs more slots, or a block of its tokens has to be encoded."""
    first, held, size = layers[0], layers[0].known.held, layers[0].known.block_size
    for layer in layers:
        layer.store.grow(held, held + 1, size, layer.known.capacity)
    room = min([min(layer.known.capacity - 1, layer.store.slots) for layer in layers]) - held
    rounds, columns = first.store.rounds, first.store.columns
    count = min(room, *[layer.store.due - layer.store.uncoded for layer in layers]) if rounds else min(room, size)
    if count < 1 or columns.layout.lengths is not None:
        return
    index, rows = torch.arange(held, held + count, device=first.known.device), first.rows
    slots: SlotsOfTokens | PlacesOfTokens
    if rounds:
        places = index.expand(rows * len(layers), 1, count)
        slots = PlacesOfTokens([layer.store.exact for layer in layers], rows, places)
    else:
        slots = SlotsOfTokens(columns, columns.layout, rows, index.expand(1, 1, -1), len(layers))
    for place, layer in enumerate(layers):
        layer.fill = BlockFill(layer.known, layer.store, layer.padding, layer.exposed, layer.own_mask)
        layer.fill.begin(slots, place)


def _taken_over(old: Tensor | None, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor of an earlier group, if it fits, or a new one; at a fixed address."""
    fits = old is not None and (tuple(old.shape), old.device) == (shape, device)
    return old if old is not None and fits else static_zeros(shape, device, dtype)
