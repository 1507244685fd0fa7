"""How many tokens each candidate may hold, and which candidates a model refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_paged_eviction import PagedEvictionCache

from ..caches.budgets import Budget
from ..caches.making import make_paged_cache
from ..caches.sizes import tokens_held
from ..errors import UserError
from ..options.cache import CacheOptions
from .candidates import DROP, Candidate


@dataclass(frozen=True)
class Entry:
    """A candidate at a size.

    Attributes:
        tokens: held per layer; what its disposal keeps beside them may turn out to leave room for fewer.
    """

    size: Budget
    candidate: Candidate
    tokens: int

    @property
    def key(self) -> tuple[str, str]:
        return self.size.label, self.candidate.label

    def make(self, config: Any, base: CacheOptions, tokens: int | None = None) -> PagedEvictionCache:
        """An empty cache.

        Raises:
            UserError: the model cannot be served so.
        """
        options = self.candidate.options(base)
        return make_paged_cache(
            config, options, self.candidate.policy_name, f"at {self.size.label}", budget=tokens or self.tokens
        )


@dataclass(frozen=True)
class LeftOut:
    """Why some candidates were not compared."""

    reason: str
    candidates: tuple[str, ...]


def entries(
    model: Any,
    base: CacheOptions,
    sizes: Sequence[Budget],
    candidates: Iterable[Candidate],
    longest: int,
) -> tuple[list[Entry], list[LeftOut]]:
    """What can be compared, and what cannot.

    Args:
        longest: tokens of the longest passage, to which shares refer.
    """
    found: list[Entry] = []
    reasons: dict[str, list[str]] = {}
    for candidate in candidates:
        for size in sizes:
            try:
                entry = Entry(size, candidate, _tokens(model, base, size, candidate, longest))
                entry.make(model.config, base)
                found.append(entry)
            except UserError as error:
                reasons.setdefault(reason_of(error, candidate, size), []).append(candidate.label)
    return found, [LeftOut(reason, tuple(dict.fromkeys(names))) for reason, names in reasons.items()]


def reason_of(error: Exception, candidate: Candidate, size: Budget) -> str:
    """Without the name of the one that it is about, so that others can share it."""
    reason = str(error)
    for where in (f"{candidate.policy_name} at {size.label}: ", f"{candidate.policy_name} {size.label}: "):
        reason = reason.removeprefix(where)
    return reason


def _tokens(model: Any, base: CacheOptions, size: Budget, candidate: Candidate, longest: int) -> int:
    # What a disposal keeps is not known before something was read: `Search` takes it off then.
    plain = Candidate(candidate.policy, candidate.allocator, candidate.bits, candidate.positions, DROP)
    tokens = tokens_held(size, model, plain.options(base), candidate.policy_name, longest)
    if tokens is None:
        raise ValueError("the full cache is no candidate")
    return tokens


def fewer(tokens: int, taken: int, allowed: int, base: CacheOptions) -> int:
    """Tokens that fit if so many take too many bytes: at least a block fewer."""
    block = int(base.block_size)
    return min(tokens * allowed // taken, tokens - 1) // block * block
