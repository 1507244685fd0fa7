"""The caches that `prepare` tries on a model."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cache import PagedEvictionCache
from ..learned.measured import KEYS_AND_QUERIES, RANDOM, TOKENS, Bits, Row
from ..naming.of_files import quoted
from ..options.defaults import of_profile

#: Powers of the profile's shares: the less a policy's own choice of tokens is worth, the steeper. Steep shares also
#: keep long facts whole, because the few heads that look for them hold more tokens.
POWERS: dict[str, tuple[float, ...]] = {
    "observed": (1.0, 1.5),
    "calibrated": (1.25,),
    **dict.fromkeys(("leverage", "keydiff", KEYS_AND_QUERIES), (1.5,)),
    **dict.fromkeys(("tova", "snapkv", "streaming_llm"), (2.0,)),
}
#: Also tried with equal shares, which may be better if few layers evict.
EQUAL = ("observed", "leverage", "keydiff", "tova", "snapkv", KEYS_AND_QUERIES)
#: Values bear fewer bits than keys, whose errors change what is found: 2 bits for both lose to fewer tokens.
BITS: tuple[Bits, ...] = (8, 4, (4, 2))


@dataclass(frozen=True)
class Candidate:
    """One kind of cache.

    Attributes:
        policy, allocator, bits: see `Row`.
    """

    policy: str
    allocator: str = "uniform"
    bits: Bits = None

    def row(self, unit: str, share: float) -> Row:
        """The row of this cache, without divergences."""
        return Row(self.policy, self.allocator, self.bits, unit, share)

    def make(self, config: Any, profile: Path, unit: str, share: float, tokens: int, token_bytes: int) -> Any:
        """Make an empty cache.

        Args:
            profile: file with scores and shares.
            unit, share: see `Row`.
            tokens: number of tokens of the prompt.
            token_bytes: bytes of one token in the full cache.
        """
        default = of_profile(self.row(unit, share), quoted(str(profile)))
        budget = _blocks(tokens * share) if unit == TOKENS else f"{int(tokens * share * token_bytes)}B"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the cost of few bits is part of the measurement
            return PagedEvictionCache(
                config,
                budget,
                policy=default.policy,
                allocator=default.allocator,
                bits=default.bits,
                sink_tokens=default.sinks,
            )


def _blocks(tokens: float) -> int:
    return max(round(tokens / 16), 4) * 16


def of_tokens() -> list[Candidate]:
    """The caches that are compared at equal numbers of tokens."""
    shared = (
        Candidate(policy, "heads" if power == 1 else f"heads(power={power})")
        for policy, powers in POWERS.items()
        for power in powers
    )
    return [Candidate(RANDOM), *shared, *(Candidate(policy) for policy in EQUAL)]


def of_bytes(best: Candidate) -> list[Candidate]:
    """The caches that are compared at equal numbers of bytes: the best at equal tokens, and the same with few bits."""
    return [Candidate(RANDOM), *(replace(best, bits=bits) for bits in (None, *BITS))]
