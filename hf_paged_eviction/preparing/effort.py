"""How much `prepare` measures."""

from dataclasses import dataclass

from ..learned.measured import KEYS_AND_FITTED, KEYS_AND_QUERIES, RARE_KEYS_AND_FITTED, Bits
from .candidates import Candidate

#: Steeper budgets of heads for policies whose own choice of tokens is worth less. Steep ones also keep long facts
#: whole, because the few heads that look for them hold more tokens.
_NORMAL = (
    Candidate("observed", "heads(power=1.5)"),
    Candidate("observed", "heads"),
    Candidate(KEYS_AND_QUERIES, "heads(power=1.5)"),
    Candidate("tova", "heads(power=2.0)"),
    # Equal budgets are better if few heads evict.
    Candidate(RARE_KEYS_AND_FITTED),
    Candidate(KEYS_AND_FITTED),
    Candidate("observed"),
)
#: Values bear fewer bits than keys, whose errors change what is found. The last pair is for models where most tokens
#: have to stay, such as Gemma-3-270M.
_BITS: tuple[Bits, ...] = (4, (4, 2), (3, 2))


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        windows: windows that scores and budgets of heads are fitted to.
        passages: passages that caches are compared on; the first half decides which caches are tried on the others.
        candidates: caches that are tried, besides random eviction.
        hopeless: a cache that diverges this many times as much as the best one on the first passages is dropped.
        stay: number of caches that are tried at the second size, on more passages and in few bits, as long as they are
            not clearly worse. Their order depends on sizes and bits: on Gemma-3-270M the best in few bits is the second
            for budgets in tokens.
        bits: bits that the best cache is tried in; if none of them suits the model, its own.
    """

    windows: int
    passages: int
    candidates: tuple[Candidate, ...]
    hopeless: float
    stay: int
    bits: tuple[Bits, ...] = _BITS


NORMAL = Effort(5, 4, _NORMAL, 3.0, 3)
QUICK = Effort(3, 2, (*_NORMAL[:3], _NORMAL[4]), 2.0, 2)
