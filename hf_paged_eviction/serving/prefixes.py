"""Pages that requests which begin alike share, as far as nothing is ever evicted from them."""

from collections.abc import Collection, Sequence


class Prefixes:
    """Pages by the tokens from the start of a text to the end of the page.

    Only pages that lie wholly inside the protected beginning of a text are here. Until a text is longer than that,
    nothing has been evicted, so what such a page holds follows from the tokens alone; and nobody overwrites it.

    Args:
        page_size: tokens per page.
        shares: whether there are any.

    Attributes:
        hits: tokens so far that requests found in such pages and did not read.
    """

    def __init__(self, page_size: int, shares: bool) -> None:
        self._page_size, self._shares = page_size, shares
        self.hits = 0
        #: The least recently used first.
        self._blocks: dict[tuple[int, ...], int] = {}
        self._texts: dict[int, tuple[int, ...]] = {}
        self._users: dict[int, int] = {}

    @property
    def unused(self) -> list[int]:
        """Pages that are kept for requests to come, the least recently used first."""
        return [block for block in self._blocks.values() if not self._users[block]]

    def match(self, prompt: Sequence[int], kept: int) -> list[int]:
        """Pages that this prompt begins with, whose first `kept` tokens are never evicted; one token at least is left
        to be read."""
        found: list[int] = []
        for page in range(self._pages(min(kept, len(prompt) - 1))):
            block = self._blocks.get(self._text(prompt, page))
            if block is None:
                break
            found.append(block)
        return found

    def use(self, blocks: Sequence[int]) -> None:
        """One more request has these pages."""
        self.hits += len(blocks) * self._page_size
        for block in blocks:
            self._users[block] += 1
            self._blocks[self._texts[block]] = self._blocks.pop(self._texts[block])

    def add(self, prompt: Sequence[int], blocks: Sequence[int], read: int) -> None:
        """A request whose pages these are has read so many tokens of its prompt, all of them never evicted: full pages
        can be shared from now on, unless others with the same text are."""
        for page in range(self._pages(read)):
            text, block = self._text(prompt, page), blocks[page]
            if text not in self._blocks and block not in self._texts:
                self._blocks[text], self._texts[block], self._users[block] = block, text, 1

    def leave(self, blocks: Sequence[int]) -> list[int]:
        """A request ends; returns those of its pages that are free now."""
        for block in blocks:
            if block in self._users:
                self._users[block] -= 1
        return [block for block in blocks if block not in self._users]

    def give_up(self, count: int, keep: Collection[int] = ()) -> list[int]:
        """Forget so many pages that nobody uses, if there are, but not those to `keep`; returns them."""
        given = [block for block in self.unused if block not in keep][:count]
        for block in given:
            del self._blocks[self._texts.pop(block)], self._users[block]
        return given

    def _pages(self, tokens: int) -> int:
        return tokens // self._page_size if self._shares else 0

    def _text(self, prompt: Sequence[int], page: int) -> tuple[int, ...]:
        return tuple(prompt[: (page + 1) * self._page_size])
