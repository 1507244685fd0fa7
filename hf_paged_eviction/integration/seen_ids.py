"""Which ids the tokens seen had, as far as a cache was told: a digest of them, which does not grow."""

from hashlib import blake2b

from torch import Tensor


class SeenIds:
    """A digest per row of the ids at the beginning of a conversation."""

    def __init__(self) -> None:
        self._count = 0
        self._digests: list[bytes] = []

    def keep(self, most: int) -> None:
        """Forget what was told if it was about more than so many tokens."""
        if self._count > most:
            self._count, self._digests = 0, []

    def note(self, ids: Tensor, seen: int) -> bool:
        """Whether `ids` `[rows, n]` begin with those told before; if so, the first `seen` are known from now on."""
        ids = ids.detach().cpu()
        if ids.shape[1] < seen or (self._count and _digests(ids[:, : self._count]) != self._digests):
            return False
        self._count, self._digests = seen, _digests(ids[:, :seen])
        return True


def _digests(ids: Tensor) -> list[bytes]:
    return [blake2b(row.contiguous().numpy().tobytes(), digest_size=16).digest() for row in ids]
