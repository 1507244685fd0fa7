"""Which slots of a request belong to which set of tokens.

A request has as many slots in all as its budget says, for all layers and KV heads together. A *set* is what evicts on
its own: a layer, or a KV head of a layer. Its slots lie next to each other, those of the first set first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Layout:
    """Slots of all sets of a request, layer by layer.

    A set takes tokens in until it has used up its slots; from then on new tokens overwrite block after block.

    Attributes:
        limits: slots that each set may use.
        starts: the first slot of each.
        full_at: tokens seen by the request when each set has used up its slots.
    """

    limits: tuple[int, ...]
    starts: tuple[int, ...]
    full_at: tuple[int, ...]

    @classmethod
    def equal(cls, sets: int, capacity: int, width: int) -> "Layout":
        """As many slots for each, `width` of which are there: a request that stays short needs no more."""
        limits = (capacity,) * sets
        return cls(limits, tuple(range(0, sets * width, width)), limits)

    @classmethod
    def of(cls, limits: Sequence[int], full_at: Sequence[int]) -> "Layout":
        """So many slots for each."""
        return cls(tuple(limits), (0, *accumulate(limits[:-1])), tuple(full_at))

    def choosing(self, limits: Sequence[int], seen: int, new: int) -> "Layout":
        """The layout in which each set holds the best of what it held and of `new` tokens, after so many seen."""
        candidates = [held + new for held in self.held(seen - new)]
        full_at = [seen + max(limit - count, 0) for limit, count in zip(limits, candidates, strict=True)]
        return Layout.of(limits, full_at)

    def held(self, seen: int) -> Sequence[int]:
        """Tokens of each set, of so many seen."""
        if seen >= self._all_full_at:
            return self.limits
        return [limit - max(full_at - seen, 0) for limit, full_at in zip(self.limits, self.full_at, strict=True)]

    @cached_property
    def _all_full_at(self) -> int:
        return max(self.full_at)

    @cached_property
    def growing_until(self) -> int:
        """Tokens seen at which the first set is full."""
        return min(self.full_at)

    def is_due(self, seen: int, block_size: int) -> bool:
        """Whether the next token begins a block in any set."""
        return any((seen - full_at) % block_size == 0 for full_at in self._ends)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self.full_at)

    def in_step(self, block_size: int) -> bool:
        """Whether the blocks of all sets are full at the same time."""
        return len({full_at % block_size for full_at in self._ends}) == 1

    def same_slots(self, other: "Layout") -> bool:
        """Whether sets have the same slots there."""
        return self.limits == other.limits and self.starts == other.starts


def size_classes(widths: Sequence[int], least_saved: float) -> list[list[int]]:
    """Group sets by how many tokens they hold. What is read of a group is as wide as its largest set.

    Args:
        widths: tokens of each set.
        least_saved: a group is split where this many tokens, or more, need not be read then.

    Returns:
        Places in `widths`, those of the largest sets first; one group where nothing is worth a split.
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
