"""Who began the forward that comes: which thread, and who made its mask."""

from collections.abc import Callable
from threading import get_ident

_CLASH = (
    "Another thread uses this cache at the same time, or a forward of it failed in the middle. Their tokens may be "
    "mixed up, so the cache serves neither any more: give each thread a cache of its own (copy.deepcopy(cache) where "
    "they begin with the same text), and call cache.reset() before this one is used again."
)


class ForwardWatch:
    """Notices forwards that overlap, and masks that transformers did not make. Forwards are told apart by the columns
    seen before them.

    Where forwards overlap all threads are told, and the cache stays of no use until it is reset. One forward after the
    other may come from as many threads as one likes; that of one thread may also go through the layers in several, one
    after the other.

    Args:
        last: index of the last layer that takes in tokens, which ends a forward.
    """

    def __init__(self, last: int) -> None:
        self._end = last
        self.forget()

    def forget(self) -> None:
        """The cache begins anew."""
        self._begun_at = self._asked_at = -1
        self._clashed = self._inside = False
        self._thread, self._layer = 0, self._end  # of the last update
        self._asked: dict[int, int] = {}  # columns seen when a thread asked for a mask, by thread

    # ---- masks ----------------------------------------------------------------------------------------------------

    def begins(self, seen: int) -> None:
        """transformers begins to build a mask, with so many columns seen."""
        self._begun_at = seen

    def asks(self, seen: int) -> None:
        """It asks for the sizes of a mask, with so many columns seen.

        Raises:
            RuntimeError: threads have clashed.
        """
        self._begun_at = self._asked_at = seen
        thread = get_ident()
        if self._clashed or (self._layer != self._end and thread != self._thread):
            self._clash()
        self._asked[thread] = seen

    def brought_along(self, seen: int) -> bool:
        """Whether the caller made the mask of the forward that comes after so many columns: transformers began to build
        one, was handed it, and asked for no sizes. It may have asked ahead of the step (compiled decoding)."""
        return self._begun_at == seen != self._asked_at

    def made_by_model(self, seen: int, count: int) -> bool:
        """Whether a forward of `count` tokens after so many columns has come without a word about its mask."""
        return not seen <= self._begun_at <= seen + count

    # ---- threads --------------------------------------------------------------------------------------------------

    def takes(self, layer_idx: int, seen: Callable[[], int]) -> None:
        """A layer is about to take in tokens; `seen` says how many columns the first layer has seen.

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
        """It has taken them in, or failed."""
        self._inside = False
