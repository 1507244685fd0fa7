"""Contexts at the cuts of earlier prompts, for requests with the same beginning."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from hf_paged_eviction.internals import Spans

from .contexts import ServedContext

#: Number of cuts that are remembered without their contexts.
_REMEMBERED = 2**16


class Prefixes:
    """The contexts at cuts of earlier prompts, least recently used first.

    A prompt is cut at fixed lengths. The tokens held at a cut depend only on the tokens before it and on the protected
    spans. So a request that begins with the same tokens can continue from there. The context at the last cut of each
    prompt is kept, because the next turn of a conversation begins with it; a context at another cut is kept when the
    cut comes a second time.

    Args:
        cut: number of tokens between two cuts.
        most_bytes: limit of `bytes`; 0 = keep nothing.

    Attributes:
        hits: number of tokens so far that requests did not read, because they were found here.
        bytes: bytes of all contexts.
    """

    def __init__(self, cut: int, most_bytes: int) -> None:
        self.cut, self._most_bytes = cut, most_bytes
        self.hits = self.bytes = 0
        self._held: OrderedDict[bytes, ServedContext] = OrderedDict()
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def digests(self, prompt: Sequence[int], spans: Spans, salt: str) -> list[bytes]:
        """Digests of the prompt up to each cut, with its protected spans; empty if nothing is kept.

        Args:
            salt: part of the digest, so requests with different salts share nothing.
        """
        tokens, digests = hashlib.blake2b(salt.encode(), digest_size=16), []
        for end in range(self.cut, len(prompt) + 1, self.cut) if self._most_bytes else ():
            tokens.update(array("q", prompt[end - self.cut : end]).tobytes())
            protected = [(start, min(stop, end)) for start, stop in spans if start < end]
            digest = tokens.copy()
            digest.update(repr(protected).encode())
            digests.append(digest.digest())
        return digests

    def match(self, digests: Sequence[bytes], most: int) -> ServedContext | None:
        """The context at the last of these cuts that has one, with at most so many tokens; None = none."""
        for digest in reversed(digests[: most // self.cut]):
            if digest in self._held:
                self._held.move_to_end(digest)
                return self._held[digest]
        return None

    def clear(self) -> None:
        """Forget all contexts."""
        self._held.clear()
        self._passed.clear()
        self.bytes = 0

    def wants(self, digest: bytes, is_last: bool) -> bool:
        """Whether to keep the context of a request that has reached this cut."""
        again = digest in self._passed
        self._passed[digest] = None
        if len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)
        return (again or is_last) and digest not in self._held

    def keep(self, digest: bytes, context: ServedContext) -> None:
        """Keep the context at this cut, and drop the least recently used ones if there are too many bytes."""
        if context.bytes > self._most_bytes:
            return
        self._held[digest] = context
        self.bytes += context.bytes
        while self.bytes > self._most_bytes:
            self.bytes -= self._held.popitem(last=False)[1].bytes
