"""How many tokens the sets of a request hold.

The budget of a request is a number of tokens for all layers and KV heads together. A *set* is a unit that evicts by
itself: a layer, or a KV head of a layer. Sets are numbered layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Layout:
    """The sizes of all sets of a request.

    A set takes in tokens until it is full; after that, new tokens overwrite block after block.

    Attributes:
        limits: number of tokens that each set may hold.
        full_at: number of tokens seen by the request when each set becomes full.
    """

    limits: tuple[int, ...]
    full_at: tuple[int, ...]

    @classmethod
    def equal(cls, sets: int, capacity: int) -> "Layout":
        """The same number of tokens for each set."""
        limits = (capacity,) * sets
        return cls(limits, limits)

    def choosing(self, limits: Sequence[int], seen: int, new: int) -> "Layout":
        """The layout after each set has kept the best of its tokens and of `new` ones, with `seen` tokens seen."""
        candidates = [held + new for held in self.held(seen - new)]
        full_at = [seen + max(limit - count, 0) for limit, count in zip(limits, candidates, strict=True)]
        return Layout(tuple(limits), tuple(full_at))

    def held(self, seen: int) -> Sequence[int]:
        """Number of tokens in each set, after `seen` tokens."""
        if seen >= self._all_full_at:
            return self.limits
        if self.full_at is self.limits:
            return (seen,) * len(self.limits)
        return [limit - max(full_at - seen, 0) for limit, full_at in zip(self.limits, self.full_at, strict=True)]

    @cached_property
    def _all_full_at(self) -> int:
        return max(self.full_at)

    @cached_property
    def growing_until(self) -> int:
        """Number of tokens seen when the first set becomes full."""
        return min(self.full_at)

    def is_due(self, seen: int, block_size: int) -> bool:
        """Whether the next token begins a block in some set."""
        return any((seen - full_at) % block_size == 0 for full_at in self._ends)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self.full_at)

    def in_step(self, block_size: int) -> bool:
        """Whether the blocks of all sets become full at the same time."""
        return len({full_at % block_size for full_at in self._ends}) == 1


def size_classes(widths: Sequence[int], least_saved: float) -> list[list[int]]:
    """Group sets by their number of tokens. A read of a group is as wide as its largest set.

    Args:
        widths: number of tokens of each set.
        least_saved: a group is split if that saves reading at least this many tokens.

    Returns:
        Groups of indices into `widths`, largest sets first; one group if no split is worth it.
    """
    if max(widths) - min(widths) < least_saved / len(widths):
        return [[*range(len(widths))]]
    return _split(sorted(range(len(widths)), key=lambda place: -widths[place]), widths, least_saved)


def _split(places: list[int], widths: Sequence[int], least_saved: float) -> list[list[int]]:
    saved = [(widths[places[0]] - widths[place]) * (len(places) - at) for at, place in enumerate(places)]
    if max(saved) < least_saved:
        return [places]
    cut = saved.index(max(saved))
    return [*_split(places[:cut], widths, least_saved), *_split(places[cut:], widths, least_saved)]
