"""One forward: which tokens of which requests it brings, where they go and what they read."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .roster import Roster
from .seats import Seat


@dataclass(frozen=True)
class Entry:
    """The tokens of one request.

    Attributes:
        seat: of the request; it counts these tokens as seen.
        count: how many.
        held: tokens held before.
        overflows: several tokens that do not all fit: all are read, the best are kept.
        place: in the block that is overwritten, where a single token overwrites one; None if it does not.
    """

    seat: Seat
    count: int
    held: int
    overflows: bool
    place: int | None

    @property
    def read(self) -> int:
        """Tokens that its queries may attend to."""
        return self.held if self.place is not None else self.held + self.count


class Step:
    """What is known of a forward before it runs, and the tensors that all its layers share.

    Args:
        capacity, block_size: tokens of a request, tokens of a block.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity, self._block_size = capacity, block_size
        self.entries: list[Entry] = []
        self.begun = False
        self._rows: Tensor | None = None
        self._read: Tensor | None = None
        self._written: Tensor | None = None

    def add(self, seat: Seat, count: int) -> None:
        """The forward brings the next `count` tokens of this request."""
        held = min(seat.seen, self._capacity)
        overwrites = count == 1 and held == self._capacity
        overflows = not overwrites and held + count > self._capacity
        place = (seat.seen - seat.full_at) % self._block_size if overwrites else None
        self.entries.append(Entry(seat, count, held, overflows, place))
        seat.seen += count
        if overflows or (held < self._capacity and held + count == self._capacity):
            seat.full_at, seat.scored = seat.seen, overflows

    # ---- the first layer -----------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> None:
        """Choose victims where blocks are used up, and find out where every token goes. Reads no tensor."""
        self.begun = True
        device = roster.pages.device
        used_up = [entry.seat for entry in self.entries if entry.place == 0]
        if used_up:
            roster.choose(used_up)
        rows = [row for entry, first in self._with_firsts() if not entry.overflows for row in _tokens(entry, first)]
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 5).to(device)
        packed, seats, places, overwriting, positions = table.unbind(-1)
        if len(rows) < self.count:
            self._written = packed
        slots = roster.slots(seats, places, overwriting.bool())
        roster.note(seats, slots, positions)
        self._rows = roster.pages.rows[seats[:, None], slots]
        if any(entry.held for entry in self.entries):
            self._read = torch.cat([self._rows_read(entry, roster) for entry in self.entries])

    @property
    def count(self) -> int:
        """Tokens that it brings."""
        return sum(entry.count for entry in self.entries)

    def _with_firsts(self) -> Iterator[tuple[Entry, int]]:
        first = 0
        for entry in self.entries:
            yield entry, first
            first += entry.count

    def _rows_read(self, entry: Entry, roster: Roster) -> Tensor:
        rows = roster.pages.rows[entry.seat.number]
        if entry.overflows:  # what stands in place of the new tokens is written over
            return torch.cat([rows[: entry.held], rows[:1].expand(entry.count)])
        return rows[: entry.read]

    # ---- each layer ----------------------------------------------------------------------------------------------

    def take(self, layer: int, roster: Roster, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a layer's new tokens.

        Args:
            layer: place among the paged layers.
            keys, values: `[new, H, D]`, of all requests one after the other.

        Returns:
            What their queries may attend to, `[read, H, D]` each, the new tokens of a request last.
        """
        if self._rows is None:
            raise RuntimeError("The step has not begun.")
        pages, written = roster.pages, self._written
        new_k, new_v = (keys, values) if written is None else (keys[written], values[written])
        pages.write(layer, self._rows[layer], new_k, new_v)
        if self._read is None:
            read_k, read_v = keys, values
        else:
            read_k, read_v = pages.read(layer, self._read)
        if written is not None:
            self._overflow(layer, roster, (keys, values), (read_k, read_v))
        return read_k, read_v

    def _overflow(self, layer: int, roster: Roster, new: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor]) -> None:
        start = 0
        for entry, first in self._with_firsts():
            stop = start + entry.read
            if entry.overflows:
                for to, states in zip(read, new, strict=True):
                    if to is not states:
                        to[start + entry.held : stop] = states[first : first + entry.count]
                roster.keep_best(layer, entry.seat, read[0][start:stop], read[1][start:stop], entry.held)
            start = stop


def _tokens(entry: Entry, first: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each token: its place in the forward, its seat, its slot (or its place in the block that it overwrites),
    whether it overwrites, its position."""
    seen = entry.seat.seen - entry.count
    for at in range(entry.count):
        if entry.place is None:
            yield first + at, entry.seat.number, entry.held + at, 0, seen + at
        else:
            yield first + at, entry.seat.number, entry.place, 1, seen + at
