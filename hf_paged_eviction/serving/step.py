"""One forward: which tokens of which requests it brings, where they go and what they attend to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..queries.observer import Queries
from ..table.spans import Spans
from .comparing import compare
from .layout import Layout, size_classes
from .observers import Watched
from .roster import Kept, Roster
from .seats import Seat

#: Bytes of keys and values: a CPU copies and compares so many in the time that the operators of one group of sets take.
_WORTH_A_GROUP = 2 << 20


@dataclass(frozen=True)
class Entry:
    """The tokens of one request.

    Attributes:
        seat: of the request; it counts these tokens as seen.
        first: place of the first token in the forward.
        count: how many.
        layout: which slots its sets have afterwards, where so many came that the best are kept; None = they all fit,
            or one token overwrites another.
    """

    seat: Seat
    first: int
    count: int
    layout: Layout | None

    @property
    def seen(self) -> int:
        """Tokens that went through the model before."""
        return self.seat.seen - self.count

    @property
    def tokens(self) -> slice:
        """Places in the forward."""
        return slice(self.first, self.first + self.count)


class Step:
    """What is known of a forward before it runs, and what all its layers share.

    Args:
        roster: the bookkeeping.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._entries: list[Entry] = []
        self.begun = False
        self._count = 0
        self._written: Tensor | None = None
        self._rows = torch.empty(0)
        self._singles: list[Entry] = []
        self._counts: list[Sequence[int]] = []  # tokens of each set, with these
        self._widths: list[int] = []  # of each set, most tokens of a request
        self._numbers = self._seen = self._places = torch.empty(0, dtype=torch.int64)
        self._new: tuple[Tensor, Tensor] | None = None
        self._moves: list[tuple[Entry, int, Layout, Kept]] = []

    def add(self, seat: Seat, count: int, spans: Spans) -> None:
        """The forward brings the next `count` tokens of this request, which protects these spans."""
        shares = seat.shares
        if count == 1 and shares.foreseen is not None and seat.seen == shares.capacity:
            self._share_out(seat, shares.limits(shares.foreseen, spans))
        seat.seen += count
        layout = None
        if count > 1 and seat.seen > shares.capacity:
            layout = seat.layout.choosing(shares.limits(seat.seen, spans), seat.seen, count)
        self._entries.append(Entry(seat, self._count, count, layout))
        self._count += count

    # ---- the first layer -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Choose victims where blocks are used up, and find out where every token goes. Reads no tensor."""
        self.begun = True
        roster, size = self._roster, self._roster.block_size
        self._singles = [entry for entry in self._entries if entry.count == 1]
        self._counts = [entry.seat.layout.held(entry.seat.seen) for entry in self._singles]
        self._widths = [max(each) for each in zip(*self._counts, strict=True)]
        due = [entry.seat for entry in self._singles if entry.seat.layout.is_due(entry.seen, size)]
        if due:
            roster.choose(due)
        rows = [row for entry in self._entries if entry.layout is None for row in _tokens(entry)]
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(roster.device)
        places, numbers, positions, behind = table.unbind(-1)
        if len(rows) < self._count:
            self._written = places
        slots = roster.slots(numbers, positions, behind.bool())
        roster.note(numbers, slots, positions)
        of_layers = roster.pages.rows[numbers].gather(1, slots).unflatten(1, (roster.layers, roster.sets))
        self._rows = of_layers.transpose(0, 1).flatten(1)  # [L, n * S]
        for entry in self._entries:
            if entry.layout is None and entry.count > 1:
                roster.grown(entry.seat)
        single = [(entry.first, entry.seat.number, entry.seat.seen) for entry in self._singles]
        self._places, self._numbers, self._seen = (
            torch.tensor(single, dtype=torch.int64).view(-1, 3).to(roster.device).unbind(-1)
        )

    def _share_out(self, seat: Seat, limits: list[int]) -> None:
        """The sets of a request that single tokens have filled keep the best of what they hold, so many each."""
        roster, layout = self._roster, seat.layout.choosing(limits, seat.seen, 0)
        kept = [roster.best(seat, layer, layout, self._watched(seat, layer)) for layer in range(roster.layers)]
        roster.give(seat, layout)
        roster.grown(seat)
        for layer, tokens in enumerate(kept):
            roster.put(seat, layer, layout, tokens)
        seat.scored = True

    def _watched(self, seat: Seat, layer: int) -> Watched:
        """What a request holds in a layer, and what has been seen of queries."""
        keys, values, positions = self._held(seat, layer, seat.seen)
        return Watched(keys, values, positions, self._roster.observers.statistics(seat.number, layer, positions))

    # ---- each layer ----------------------------------------------------------------------------------------------

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take in a layer's new tokens, `[new, H, D]`, of all requests one after the other."""
        written, pages = self._written, self._roster.pages
        states = (keys, values) if written is None else (keys[written], values[written])
        pages.write(self._rows[layer], *(each.reshape(-1, *pages.keys.shape[1:]) for each in states))
        self._new = keys, values

    def attend(self, layer: int, query: Tensor, logits: Logits) -> Tensor:
        """Attention of a layer's new tokens; then those go that do not fit.

        Args:
            query: `[1, query_heads, new, D]`.

        Returns:
            `[1, new, query_heads, D]`.
        """
        if self._new is None:
            raise RuntimeError("Attention ran before the cache had the new tokens of this layer.")
        (keys, values), self._new = self._new, None
        output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        if self._singles:
            self._attend_one_by_one(layer, query, logits, output)
            if self._roster.observers.any:
                self._see_singles(layer, query, keys, logits)
        for entry in self._entries:
            if entry.count > 1:
                new = tuple(each[entry.tokens].transpose(0, 1)[None] for each in (keys, values))
                output[entry.tokens] = self._attend_together(entry, layer, query[:, :, entry.tokens], new, logits)
        if layer == self._roster.layers - 1:
            self._end()
        return output[None]

    def _attend_one_by_one(self, layer: int, query: Tensor, logits: Logits, output: Tensor) -> None:
        """The requests that bring one token each."""
        roster = self._roster
        asked = query[0, :, self._places].transpose(0, 1)[:, :, None]  # [n, query_heads, 1, D]
        counts = [held[roster.of_layer(layer)] for held in self._counts]
        groups = size_classes(self._widths[roster.of_layer(layer)], self._least_saved())
        if len(groups) == 1:
            output[self._places] = self._attend_sets(layer, asked, logits, counts, None)[:, :, 0]
        else:
            of_sets, found = asked.unflatten(1, (roster.sets, -1)), torch.empty_like(asked)
            for group in groups:
                sets = torch.tensor(group, device=roster.device)
                sinks = None if logits.sinks is None else logits.sinks.view(roster.sets, -1)[sets].flatten()
                own = [[held[at] for at in group] for held in counts]
                part = self._attend_sets(layer, of_sets[:, sets].flatten(1, 2), replace(logits, sinks=sinks), own, sets)
                found.unflatten(1, (roster.sets, -1))[:, sets] = part.unflatten(1, (len(group), -1))
            output[self._places] = found[:, :, 0]

    def _least_saved(self) -> float:
        """Tokens of a set that must not have to be read for a further group of sets to be worth its operators."""
        pages = self._roster.pages
        if pages.device.type != "cpu":
            return inf
        of_token = 2 * pages.keys[0].numel() * pages.keys.element_size()
        return _WORTH_A_GROUP / (of_token * len(self._singles))

    def _attend_sets(
        self, layer: int, asked: Tensor, logits: Logits, counts: Sequence[Sequence[int]], sets: Tensor | None
    ) -> Tensor:
        """Attention of the query heads of some sets, or of all: `[n, query_heads, 1, D]`.

        Args:
            counts: tokens of these sets, by request.
        """
        roster = self._roster
        slots, used = roster.held(layer, self._numbers, self._seen, max(map(max, counts)), sets)
        keys, values = roster.states(self._numbers, slots)
        mask = None if len({each for held in counts for each in held}) == 1 else used[:, :, None]
        return compare(asked, keys, values, mask, logits)

    def _see_singles(self, layer: int, query: Tensor, new: Tensor, logits: Logits) -> None:
        """Note the queries of the requests that bring one token each; `new` `[new, H, D]` keys of the forward."""
        roster = self._roster
        for entry in self._singles:
            seat = entry.seat
            own = Queries(query[:, :, entry.tokens], new[entry.tokens].transpose(0, 1)[None], logits)
            roster.observers.see_one(seat.number, layer, own)
            if seat.layout.is_due(seat.seen, roster.block_size):
                keys, _, positions = self._held(seat, layer, seat.seen)
                in_step = seat.layout.in_step(roster.block_size)
                roster.observers.block_filled(seat.number, layer, keys, positions, seat.seen, in_step)

    def _attend_together(
        self, entry: Entry, layer: int, query: Tensor, new: tuple[Tensor, ...], logits: Logits
    ) -> Tensor:
        """A request that brings several tokens: `[new, query_heads, D]`."""
        keys, values, positions = self._with_held(entry, layer, new)
        mask = None
        if entry.seen:
            last = positions[0, 0, -entry.count :]
            mask = (positions >= 0)[..., None, :] & (positions[..., None, :] <= last[:, None])  # [1, S, new, tokens]
        found = compare(query, keys, values, mask, logits, causal=mask is None)
        self._seen_together(entry, layer, Queries(query, keys, logits), (keys, values, positions))
        return found[0].transpose(0, 1)

    def _with_held(self, entry: Entry, layer: int, new: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that a request holds in a layer, and behind them new ones `[1, H, n, D]`, with their positions."""
        roster, seat = self._roster, entry.seat
        came = torch.arange(entry.seen, seat.seen, device=roster.device).expand(1, roster.sets, -1)
        if not entry.seen:
            return new[0], new[1], came
        *states, positions = self._held(seat, layer, entry.seen)
        keys, values = (torch.cat(each, dim=2) for each in zip(states, new, strict=True))
        return keys, values, torch.cat([positions, came], dim=-1)

    def _held(self, seat: Seat, layer: int, seen: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[1, H, n, D]` that a request holds in a layer after so many tokens, and their positions."""
        roster = self._roster
        row, count = (torch.tensor([each], device=roster.device) for each in (seat.number, seen))
        width = max(seat.layout.held(seen)[roster.of_layer(layer)])
        slots, used = roster.held(layer, row, count, width)
        return (*roster.states(row, slots), roster.positions_in(row, slots, used))

    def _seen_together(self, entry: Entry, layer: int, queries: Queries, tokens: tuple[Tensor, Tensor, Tensor]) -> None:
        roster, number, positions = self._roster, entry.seat.number, tokens[2]
        held = positions.shape[-1] - entry.count
        observed = roster.observers.see_several(number, layer, queries, positions, held)
        if entry.layout is None:
            roster.observers.settle(number, layer, None)
            return
        kept = roster.best(entry.seat, layer, entry.layout, Watched(*tokens, observed))
        if entry.layout.same_slots(entry.seat.layout):
            roster.put(entry.seat, layer, entry.layout, kept)
        else:  # its slots may be those of a layer that is still to be read
            self._moves.append((entry, layer, entry.layout, kept))

    def _end(self) -> None:
        """All layers have been read."""
        roster = self._roster
        for entry in self._entries:
            if entry.layout is not None:
                roster.give(entry.seat, entry.layout)
                roster.grown(entry.seat)
                entry.seat.scored = True
        for entry, layer, layout, kept in self._moves:
            roster.put(entry.seat, layer, layout, kept)
        self._moves = []


def _tokens(entry: Entry) -> Iterator[tuple[int, int, int, int]]:
    """Of each token: its place in the forward, its seat, its position, and whether it is put behind those held
    whatever block is overwritten."""
    for at in range(entry.count):
        yield entry.first + at, entry.seat.number, entry.seen + at, int(entry.count > 1)
