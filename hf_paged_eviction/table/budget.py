"""The budget of a layer, in blocks, and its protected tokens."""

from dataclasses import dataclass, field, replace
from math import ceil
from numbers import Integral

from ..naming.sizes import (
    MemoryShare,
    bytes_text,
    parse_budget,
    parse_memory_share,
    readable_bytes,
    share_text,
    shortened,
)
from .spans import LONGEST, Spans, blocks_of, merged, read_spans

#: Every slot has numbers of its own in every layer, used or not, so a budget that no text reaches is no way to evict
#: nothing.
MOST_TOKENS = 2**24


def whole_number(name: str, value: object, least: int, most: int | None = LONGEST) -> int:
    """Return the value as an int; `most`: None = the caller looks.

    Raises:
        TypeError: the value is not a whole number. ValueError: it is less than `least`, or no number of tokens.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} counts tokens and must be a whole number, got {value!r}.")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {shortened(number)}.")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most:,}, got {shortened(number)}.")
    return number


@dataclass(frozen=True)
class BlockBudget:
    """Validated sizes, in tokens.

    Attributes:
        tokens: number of tokens held per layer and row; None for a share or bytes before the first prompt.
        block_size: tokens per block.
        protected: number of real tokens at the start of each row that are never evicted.
        recent: number of newest real tokens of each row that are never evicted; see `recent_blocks`.
        keep_ratio: share of the first prompt to hold; None if the budget is not a share.
        memory: bytes of all layers and rows, see `MemoryPlan`; None if the budget is not in bytes.
        memory_share: share of bytes over all layers and rows; None if the budget is not such a share.
        recent_share: `recent` is this share of `tokens`, in whole blocks, once these are known; None = `recent` is the
            user's.
        spans: other spans that are never evicted, by row; one entry is for all rows.
    """

    tokens: int | None
    block_size: int
    protected: int
    recent: int
    keep_ratio: float | None = None
    memory: int | None = None
    recent_share: float | None = field(default=None, compare=False)  # a saved cache knows `recent` alone
    spans: tuple[Spans, ...] = ()
    memory_share: MemoryShare | None = None

    @classmethod
    def validate(
        cls,
        budget: int | str | None,
        block_size: int,
        sink_tokens: int | None,
        recent_tokens: int | None = None,
        protect: object = None,
        recent_share: float | None = None,
    ) -> "BlockBudget":
        """Check the user's sizes.

        Args:
            budget: number of tokens, a share of the first prompt ("25%") or of its memory in 16 bits ("25% of
                memory", or "25% of memory of 8192 tokens"), or bytes of all layers and rows ("2GiB").
            protect: see `CacheOptions`.
            recent_share: see above; with a share, `recent_tokens` does not matter.

        Raises:
            TypeError: a size is not a whole number.
            ValueError: a size is out of range, or sizes do not fit together; the message names sizes that do.
        """
        block_size = whole_number("block_size", block_size, 1)
        protected = block_size if sink_tokens is None else whole_number("sink_tokens", sink_tokens, 0)
        recent = block_size if recent_tokens is None else whole_number("recent_tokens", recent_tokens, 0)
        spans = read_spans(protect)
        if budget is None:
            raise ValueError(
                "budget= is missing: give tokens (1024), a share of the first prompt ('25%') or of its memory ('25% of "
                "memory'), or bytes ('2GiB')."
            )
        memory_share = parse_memory_share(budget) if isinstance(budget, str) else None
        if memory_share is not None:
            return cls(None, block_size, protected, recent, None, None, recent_share, spans, memory_share)
        tokens, keep_ratio, memory = parse_budget(budget) if isinstance(budget, str) else (budget, None, None)
        sizes = cls(None, block_size, protected, recent, keep_ratio, memory, recent_share, spans)
        if tokens is not None:
            number = whole_number("budget", tokens, 1, most=None)
            sizes.of(number)._check_most(number)
            sizes = sizes._with_share(number)
            sizes._check_budget()
        return sizes

    def _check_budget(self) -> None:
        tokens = self.tokens or 0
        if tokens % self.block_size:
            below = tokens // self.block_size * self.block_size
            options = [size for size in (below, below + self.block_size) if size >= self.smallest]
            nearest = " or ".join(str(size) for size in options) or str(self.smallest)
            raise ValueError(
                f"budget={tokens} is not a multiple of block_size={self.block_size}; nearest legal: {nearest}."
            )
        if tokens < self.smallest:
            start, recent = self.protected_blocks, self.recent_blocks
            raise ValueError(
                f"budget={tokens} leaves no block to evict. In blocks of {self.block_size} tokens, the protected start "
                f"(sink_tokens={self.protected}){self._spans_text} takes {start}, the newest tokens "
                f"(recent_tokens={self.recent}) take {recent}, and 1 more is needed: ({start} + {recent} + 1) * "
                f"{self.block_size}. Smallest legal budget: {self.smallest}."
            )

    def _check_most(self, tokens: int) -> None:
        if tokens > MOST_TOKENS:
            text = self.text
            raise ValueError(
                f"budget={shortened(text) if isinstance(text, int) else repr(text)} is {shortened(tokens)} tokens per "
                f"layer and row, and at most {MOST_TOKENS:,} are possible. Give the length of the longest text, or use "
                "DynamicCache, which evicts nothing."
            )

    @property
    def _spans_text(self) -> str:
        longest = max(self.spans, key=lambda spans: blocks_of(spans, self.block_size), default=())
        count = sum(end - start for start, end in longest)
        return f" with the {count} tokens of protect={list(longest)}" if count else ""

    def start_and(self, spans: Spans) -> Spans:
        """Spans joined with the protected start."""
        return merged([(0, self.protected), *spans])

    @property
    def protected_blocks(self) -> int:
        """Largest number of blocks with a protected token, in the row with most of them."""
        return max(blocks_of(self.start_and(spans), self.block_size) for spans in self.spans or ((),))

    @property
    def recent_blocks(self) -> int:
        """Number of blocks with the newest tokens at the choice of a victim. The newest block, which is full then,
        always counts, even if `recent` is 0."""
        return max(1, ceil(self.recent / self.block_size))

    @property
    def smallest(self) -> int:
        """Smallest budget in tokens: it has room for the protected and the newest blocks, and for one block to
        evict."""
        return (self.protected_blocks + self.recent_blocks + 1) * self.block_size

    def of(self, tokens: int) -> "BlockBudget":
        """The same sizes with another number of tokens, a multiple of the block size."""
        return replace(self, tokens=tokens, keep_ratio=None, memory=None, memory_share=None)

    @property
    def in_bytes(self) -> bool:
        """Whether the budget counts bytes, or a share of them."""
        return self.memory is not None or self.memory_share is not None

    @property
    def of_first_forward(self) -> bool:
        """Whether the budget is a share of the tokens, or of the memory, of the first forward."""
        share = self.memory_share
        return self.keep_ratio is not None or (share is not None and share.tokens is None)

    def of_prompt(self, token_bytes: int, tokens: int) -> "BlockBudget":
        """The same with bytes for a share of memory.

        Args:
            token_bytes: bytes that a token of all rows takes in 16 bits, in all layers.
            tokens: number of tokens of the first forward.
        """
        share = self.memory_share
        if share is None:
            return self
        return replace(self, memory=int(share.share * token_bytes * (share.tokens or tokens)))

    def protecting(self, protect: object) -> "BlockBudget":
        """The same sizes with other spans.

        Raises:
            TypeError, ValueError: see `validate`.
        """
        sizes = replace(self, spans=read_spans(protect))
        if sizes.tokens is not None:
            sizes._check_budget()
        return sizes

    def in_tokens(self, tokens: int) -> "BlockBudget":
        """Like `of`, for a share or bytes that have become tokens: `recent_share` is applied."""
        self._check_most(tokens)
        return self._with_share(tokens)

    def _with_share(self, tokens: int) -> "BlockBudget":
        if self.recent_share is None:
            return self.of(tokens)
        recent = max(1, int(self.recent_share * tokens) // self.block_size) * self.block_size
        return replace(self.of(tokens), recent=recent)

    def resized(self, budget: int | str | None) -> "BlockBudget":
        """The same options with another budget, see `validate`.

        Raises:
            TypeError, ValueError: see `validate`.
        """
        recent = self.recent if self.recent_share is None else None
        return self.validate(budget, self.block_size, self.protected, recent, self.spans, self.recent_share)

    def resolve(self, prompt_length: int) -> "BlockBudget":
        """Turn `keep_ratio` into tokens, rounded up to a block, and at least the smallest budget.

        Raises:
            ValueError: the share is below the smallest budget because of protected spans.
        """
        if self.keep_ratio is None:
            return self
        tokens = ceil(self.keep_ratio * prompt_length / self.block_size) * self.block_size
        if self.spans and tokens < self.smallest:
            raise ValueError(
                f"budget={self.text!r} of {prompt_length} tokens is {tokens}, too small{self._spans_text}: with the "
                "protected start, the newest tokens and a block to evict, the smallest legal budget is "
                f"{self.smallest} tokens. Give a larger share, or tokens."
            )
        return self.in_tokens(max(tokens, self.smallest))

    @property
    def capacity(self) -> int:
        """`tokens`, which must be known."""
        if self.tokens is None:
            raise RuntimeError(f"budget={self.text!r} has not seen a prompt yet, so its number of tokens is not known.")
        return self.tokens

    @property
    def text(self) -> int | str:
        """The budget as `validate` takes it."""
        if self.tokens is not None:
            return self.tokens
        if self.memory_share is not None:
            return self.memory_share.text
        return bytes_text(self.memory) if self.memory is not None else share_text(self.keep_ratio or 0.0)

    @property
    def label(self) -> str:
        """A label for messages: "64 tokens", "50% of the prompt", "50% of memory", "2.0 GiB"."""
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        if self.memory_share is not None:
            return self.memory_share.text
        return readable_bytes(self.memory) if self.memory is not None else f"{self.keep_ratio:.0%} of the prompt"
