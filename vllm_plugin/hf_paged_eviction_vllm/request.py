"""What the workers know of a request on the host."""

from dataclasses import dataclass, field

import numpy as np

from hf_paged_eviction.internals import BlockBudget, Spans

from .sets import Numbers, Sets


@dataclass
class Request:
    """A live request.

    Attributes:
        row: its row in the tables.
        sizes: its budget and protected tokens.
        spans: its own protected spans.
        seen: tokens that it has seen.
        scored: whether its tokens have scores.
        sets: how many tokens its sets hold.
    """

    row: int
    sizes: BlockBudget
    spans: Spans
    seen: int = 0
    scored: bool = False
    sets: Sets = field(init=False)

    def __post_init__(self) -> None:
        self.sets = Sets.equal(self.sizes.capacity)

    @property
    def capacity(self) -> int:
        """Budget in tokens, averaged over sets."""
        return self.sizes.capacity

    def held_in(self, layer: int, seen: int) -> Numbers:
        """Tokens in the sets of a layer, after `seen` tokens."""
        held = self.sets.held(seen)
        return np.asarray(held[layer if len(held) > 1 else 0])


class Rows:
    """Gives rows to requests. A request is known by its first block, which it keeps as long as it lives.

    vLLM does not tell a backend when a request ends. It schedules all running requests before it admits a new one, so
    the row that has not been used for the longest time is free as soon as there are more rows than running requests.

    Args:
        count: number of rows, more than requests that run at once.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._rows: dict[int, int] = {}  # by key, least recently used first

    def of(self, key: int, begins: bool) -> int:
        """The row of a request.

        Raises:
            RuntimeError: it does not begin, and has none.
        """
        row = self._rows.pop(key, None)
        if row is None:
            if not begins:
                raise RuntimeError(
                    "paged_eviction: a request goes on that has not been seen from its beginning. Was it moved here by "
                    "a feature that loads blocks? Leave that feature out."
                )
            if not self._free:
                self._free.append(self._rows.pop(next(iter(self._rows))))
            row = self._free.pop()
        self._rows[key] = row
        return row
