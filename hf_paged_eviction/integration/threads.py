"""Two threads that use one cache at once."""

from collections.abc import Callable
from threading import get_ident

_CLASH = (
    "Another thread uses this cache at the same time, or a forward of it failed in the middle. Their tokens may be "
    "mixed up, so the cache serves neither any more: give each thread a cache of its own (copy.deepcopy(cache) where "
    "they begin with the same text), and call cache.reset() before this one is used again."
)


class Threads:
    """Notices forwards that overlap: all threads are told, and the cache stays of no use until it is reset.

    One forward after the other may come from as many threads as one likes; that of one thread may also go through the
    layers in several, one after the other.

    Args:
        last: index of the last layer that takes in tokens, which ends a forward.
    """

    def __init__(self, last: int) -> None:
        self._end = last
        self.forget()

    def forget(self) -> None:
        """The cache begins anew."""
        self._clashed = self._inside = False
        self._thread, self._layer = 0, self._end  # of the last update
        self._asked: dict[int, int] = {}  # columns seen when a thread asked for a mask, by thread

    def asks(self, seen: int) -> None:
        """A mask is asked for, with so many columns seen.

        Raises:
            RuntimeError: threads have clashed.
        """
        thread = get_ident()
        self._check(self._layer != self._end and thread != self._thread)
        self._asked[thread] = seen

    def takes(self, layer_idx: int, seen: Callable[[], int]) -> None:
        """A layer is about to take in tokens; `seen` says how many columns the first layer has seen.

        Raises:
            RuntimeError: threads have clashed.
        """
        thread, before, layer = get_ident(), self._thread, self._layer
        self._thread, self._layer = thread, layer_idx
        begins = layer == self._end
        asked = self._asked.pop(thread, None) if begins else None
        if self._clashed or thread != before:
            overlaps = asked not in (None, seen()) if begins else layer_idx != layer + 1
            self._check(self._inside or overlaps)
        self._inside = True

    def _check(self, clash: bool) -> None:
        self._clashed = self._clashed or clash
        if self._clashed:
            raise RuntimeError(_CLASH)

    def took(self) -> None:
        """It has taken them in, or failed."""
        self._inside = False
