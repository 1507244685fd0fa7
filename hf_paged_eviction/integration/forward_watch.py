"""Detects overlapping forwards, and masks that transformers did not build."""

from collections.abc import Callable
from threading import get_ident
from typing import Literal

_CLASH = (
    "Another thread uses this cache at the same time, or a forward of it failed in the middle. Their tokens may be "
    "mixed up, so the cache serves neither any more: give each thread a cache of its own (copy.deepcopy(cache) where "
    "they begin with the same text), and call cache.reset() before this one is used again."
)


class ForwardWatch:
    """Detects forwards that overlap, and masks that transformers did not build. The number of columns seen before a
    forward identifies it.

    Attributes:
        begun_at: number of columns seen when transformers last began to build a mask; the cache sets it.
        inside: whether a layer takes in tokens now; the cache sets it to False.

    If forwards overlap, all threads get an error, and the cache cannot be used until it is reset. Forwards that follow
    each other may come from different threads. One forward may also go through the layers in several threads, one after
    the other.

    Args:
        last: index of the last layer that takes in tokens; it ends a forward.
    """

    def __init__(self, last: int) -> None:
        self._end = last
        self.forget()

    def forget(self) -> None:
        """Forget all forwards: the cache is empty again."""
        self.begun_at = self._asked_at = -1
        self._clashed = self.inside = False
        self._thread, self._layer = 0, self._end  # of the latest update
        self._asked: dict[int, int] = {}  # by thread, the columns seen when it asked for a mask

    # ---- masks ----------------------------------------------------------------------------------------------------

    def asks(self, seen: int) -> None:
        """transformers asks for the sizes of a mask, after `seen` columns.

        Raises:
            RuntimeError: threads have clashed.
        """
        self.begun_at = self._asked_at = seen
        thread = get_ident()
        if self._clashed or (self._layer != self._end and thread != self._thread):
            self._clash()
        self._asked[thread] = seen

    def mask_of(self, seen: int, count: int) -> Literal["transformers", "caller", "model"]:
        """Who made the mask of the forward of `count` tokens after `seen` columns.

        "caller": transformers began to build one, got it from the caller, and asked for no sizes. It may have asked
        before the step (compiled decoding). "model": transformers did not begin.
        """
        if not seen <= self.begun_at <= seen + count:
            return "model"
        return "caller" if self.begun_at == seen != self._asked_at else "transformers"

    # ---- threads --------------------------------------------------------------------------------------------------

    def takes(self, layer_idx: int, seen: Callable[[], int]) -> None:
        """A layer is about to take in tokens; `seen` returns the number of columns that the first layer has seen.
        `inside` is True from now on.

        Raises:
            RuntimeError: threads have clashed.
        """
        thread, before, layer = get_ident(), self._thread, self._layer
        self._thread, self._layer = thread, layer_idx
        begins = layer == self._end
        seen_at_mask = self._asked.pop(thread, None) if begins else None
        if self._clashed or thread != before:
            overlaps = seen_at_mask not in (None, seen()) if begins else layer_idx != layer + 1
            if self._clashed or self.inside or overlaps:
                self._clash()
        self.inside = True

    def _clash(self) -> None:
        self._clashed = True
        raise RuntimeError(_CLASH)
