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

    A set holds all tokens until it has used up its slots; from then on new tokens overwrite a block.

    Attributes:
        limits: slots that each set may use.
        starts: the first slot of each.
        chosen_at: tokens seen when sets were filled with the best of them; 0 = tokens have come one after the other.
    """

    limits: tuple[int, ...]
    starts: tuple[int, ...]
    chosen_at: int = 0

    @classmethod
    def equal(cls, sets: int, capacity: int, width: int) -> "Layout":
        """As many slots for each, `width` of which are there: a request that stays short needs no more."""
        return cls((capacity,) * sets, tuple(range(0, sets * width, width)))

    @classmethod
    def of(cls, limits: Sequence[int], chosen_at: int) -> "Layout":
        """So many slots for each."""
        return cls(tuple(limits), (0, *accumulate(limits[:-1])), chosen_at)

    def held(self, seen: int) -> list[int]:
        """Tokens of each set, of so many seen."""
        return [min(limit, seen) for limit in self.limits]

    @cached_property
    def full_at(self) -> tuple[int, ...]:
        """Tokens seen at which each set has used up its slots: from there on it overwrites block after block."""
        return tuple(max(limit, self.chosen_at) for limit in self.limits)

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
