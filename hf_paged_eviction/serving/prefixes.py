"""What requests have left where their prompts were cut, for requests that begin alike."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ..table.spans import Spans
from .contexts import ServedContext

#: Cuts that are remembered without what was held there.
_REMEMBERED = 2**16


class Prefixes:
    """What was held at cuts of earlier prompts, the least recently used first.

    A prompt is cut at fixed lengths, and what is held at a cut follows from the tokens before it and from what is
    protected there. So a request that begins with the same tokens may begin with what is held. The last cut of each
    prompt is kept, since the next turn of a conversation begins so, and any other that comes a second time.

    Args:
        cut: prompts are cut every so many tokens.
        most_bytes: that may be held; 0 = nothing is kept.

    Attributes:
        hits: tokens so far that requests found here and did not read.
        bytes: held.
    """

    def __init__(self, cut: int, most_bytes: int) -> None:
        self.cut, self._most_bytes = cut, most_bytes
        self.hits = self.bytes = 0
        self._held: OrderedDict[bytes, ServedContext] = OrderedDict()
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def digests(self, prompt: Sequence[int], spans: Spans, salt: str) -> tuple[bytes, ...]:
        """Of the prompt up to each cut, with what is protected there.

        Args:
            salt: requests with different ones find nothing of each other.
        """
        return tuple(self._digests(prompt, spans, salt)) if self._most_bytes else ()

    def _digests(self, prompt: Sequence[int], spans: Spans, salt: str) -> Iterator[bytes]:
        tokens = hashlib.blake2b(salt.encode(), digest_size=16)
        for end in range(self.cut, len(prompt) + 1, self.cut):
            tokens.update(array("q", prompt[end - self.cut : end]).tobytes())
            protected = [(start, min(stop, end)) for start, stop in spans if start < end]
            digest = tokens.copy()
            digest.update(repr(protected).encode())
            yield digest.digest()

    def match(self, digests: Sequence[bytes], most: int) -> ServedContext | None:
        """What is held at the last of these cuts for which there is something, of at most so many tokens."""
        for digest in reversed(digests[: most // self.cut]):
            if digest in self._held:
                return self._held[digest]
        return None

    def use(self, context: ServedContext) -> None:
        """A request begins with this."""
        self.hits += context.seen
        for digest, held in self._held.items():
            if held is context:
                self._held.move_to_end(digest)
                return

    def wants(self, digest: bytes, is_last: bool) -> bool:
        """A request has come to this cut: whether what it holds is to be kept."""
        again = digest in self._passed
        self._passed[digest] = None
        if len(self._passed) > _REMEMBERED:
            self._passed.popitem(last=False)
        return (again or is_last) and digest not in self._held

    def keep(self, digest: bytes, context: ServedContext) -> None:
        """Keep what is held at this cut, and forget others where it takes too many bytes."""
        if context.bytes > self._most_bytes:
            return
        self._held[digest] = context
        self.bytes += context.bytes
        while self.bytes > self._most_bytes:
            self.bytes -= self._held.popitem(last=False)[1].bytes
