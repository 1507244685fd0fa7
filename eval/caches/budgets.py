"""Budgets as a person writes them ("256", "12.5%", "25% of memory", "2MiB", "full"), and as a cache takes them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hf_paged_eviction.naming import sizes
from hf_paged_eviction.table.budget import BlockBudget

from ..errors import UserError
from ..options.cache import CacheOptions
from ..options.settings import Settings

FULL = "full"
#: Behind the name of a policy whose held tokens stand one after the other. Here, since reports need it without torch.
IN_CACHE = ", positions=cache"


@dataclass(frozen=True)
class Budget:
    """One budget: tokens, a share of the length, bytes, a share of memory, or none of them (the full cache).

    Attributes:
        memory: bytes of keys and values that a row may take in all paged layers together.
        memory_share: share of the bytes that a text of this length takes in these layers in 16 bits.
    """

    label: str
    tokens: int | None = None
    share: Fraction | None = None
    memory: int | None = None
    memory_share: Fraction | None = None

    @property
    def is_full(self) -> bool:
        return self.tokens is None and self.share is None and not self.in_bytes

    @property
    def in_bytes(self) -> bool:
        """Whether how many tokens it holds depends on the model and the bits."""
        return self.memory is not None or self.memory_share is not None

    def resolve(self, length: int, options: CacheOptions) -> int | None:
        """Tokens held at this `length`: rounded up to whole blocks, a share also to the smallest legal budget.

        Raises:
            ValueError: it is in bytes; how many tokens these are depends on the model, see `sizes.tokens_held`.
            UserError: a number of tokens is below the smallest legal budget.
        """
        if self.is_full:
            return None
        if self.in_bytes:
            raise ValueError(f"{self.label} is in bytes, how many tokens that is depends on the model")
        wanted = self.tokens if self.share is None else self.share * length
        tokens = int(-(-Fraction(wanted or 0) // options.block)) * options.block
        if self.share is not None:
            return max(tokens, block_budget(options).smallest)
        try:
            return block_budget(options, tokens).capacity
        except ValueError as error:
            raise UserError(f"--budgets {self.label}: {error}") from error


def block_budget(options: CacheOptions, budget: int | str = "100%") -> BlockBudget:
    """The tokens that are protected at both ends of a cache, and the `smallest` legal budget.

    Raises:
        ValueError: the budget is smaller.
    """
    return BlockBudget.validate(budget, options.block, options.sink_tokens, options.recent_tokens)


def parse_budget(text: str) -> Budget:
    """Read one budget; its label is the text in the usual letters and blanks."""
    label = "".join(text.lower().split())
    if label == FULL:
        return Budget(FULL)
    share, percent, rest = label.partition("%")
    try:
        if rest == "ofmemory":
            return Budget(f"{share}% of memory", memory_share=sizes.parse_share(share + percent))
        tokens, _, memory = sizes.parse_budget(label)
        if memory is not None:
            return Budget(_unit(label), memory=memory)
        if tokens is None:
            return Budget(label, share=sizes.parse_share(label))
    except ValueError:
        tokens = 0
    if not tokens:
        raise UserError(
            f"budget {text!r}: write tokens (256), a share of the length up to 100 % (12.5%), a share of its memory "
            "(12.5% of memory), bytes (2MiB), or full"
        )
    return Budget(label, tokens=tokens)


def budgets_of(settings: Settings) -> tuple[Budget, ...]:
    """The budgets of a run."""
    return tuple(map(parse_budget, settings.budgets))


def _unit(label: str) -> str:
    """2mib as 2MiB, 1.5gb as 1.5GB, 3kb as 3kB."""
    number = label.rstrip("kmgtib")
    unit = label[len(number) :]
    return number + (unit if unit == "kb" else unit.capitalize())[:-1] + "B"


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Read a comma-separated list, without repetitions, in the order given."""
    budgets = {budget.label: budget for budget in map(parse_budget, filter(str.strip, text.split(",")))}
    if not budgets:
        raise UserError("no budget given: for example --budgets 6%,12.5%,25%,50%,full")
    return tuple(budgets.values())


def rounding_notes(budgets: tuple[Budget, ...], length: int, options: CacheOptions) -> list[str]:
    """One sentence for every share that had to be raised to the smallest legal budget."""
    smallest, block_size = block_budget(options).smallest, options.block
    notes = []
    for budget in budgets:
        if budget.share is not None and budget.share * length <= smallest - block_size:
            notes.append(
                f"{budget.label} of {length} tokens is below the smallest legal budget with blocks of "
                f"{block_size}: {smallest} tokens are used"
            )
    return notes
