"""Detects overlapping forwards, and masks that transformers did not build."""

from collections.abc import Callable
from threading import get_ident

_CLASH = (
    "Another thread uses this cache at the same time, or a forward of it failed in the middle. Their tokens may be "
    "mixed up, so the cache serves neither any more: give each thread a cache of its own (copy.deepcopy(cache) where "
    "they begin with the same text), and call cache.reset() before this one is used again."
)


class ForwardWatch:
    """Detects forwards that overlap, and masks that transformers did not build. The number of columns seen before a
    forward identifies it.

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
        self._begun_at = self._asked_at = -1
        self._clashed = self._inside = False
        self._thread, self._layer = 0, self._end  # of the last update
        self._asked: dict[int, int] = {}  # columns seen when a thread asked for a mask, by thread

    # ---- masks ----------------------------------------------------------------------------------------------------

    def begins(self, seen: int) -> None:
        """transformers begins to build a mask, after `seen` columns."""
        self._begun_at = seen

    def asks(self, seen: int) -> None:
        """transformers asks for the sizes of a mask, after `seen` columns.

        Raises:
            RuntimeError: threads have clashed.
        """
        self._begun_at = self._asked_at = seen
        thread = get_ident()
        if self._clashed or (self._layer != self._end and thread != self._thread):
            self._clash()
        self._asked[thread] = seen

    def brought_along(self, seen: int) -> bool:
        """Whether the caller made the mask of the forward after `seen` columns: transformers began to build one, got it
        from the caller, and asked for no sizes. It may have asked before the step (compiled decoding)."""
        return self._begun_at == seen != self._asked_at

    def made_by_model(self, seen: int, count: int) -> bool:
        """Whether transformers built no mask for the forward of `count` tokens after `seen` columns."""
        return not seen <= self._begun_at <= seen + count

    # ---- threads --------------------------------------------------------------------------------------------------

    def takes(self, layer_idx: int, seen: Callable[[], int]) -> None:
        """A layer is about to take in tokens; `seen` returns the number of columns that the first layer has seen.

        Raises:
            RuntimeError: threads have clashed.
        """
        thread, before, layer = get_ident(), self._thread, self._layer
        self._thread, self._layer = thread, layer_idx
        begins = layer == self._end
        seen_at_mask = self._asked.pop(thread, None) if begins else None
        if self._clashed or thread != before:
            overlaps = seen_at_mask not in (None, seen()) if begins else layer_idx != layer + 1
            if self._clashed or self._inside or overlaps:
                self._clash()
        self._inside = True

    def _clash(self) -> None:
        self._clashed = True
        raise RuntimeError(_CLASH)

    def took(self) -> None:
        """The layer has taken in its tokens, or failed."""
        self._inside = False
