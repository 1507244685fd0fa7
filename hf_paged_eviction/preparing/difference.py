"""Whether it matters which tokens of a model stay."""

from collections.abc import Sequence
from statistics import fmean, stdev

from ..learned.measured import Row

#: Divergences in nats per token that nobody notices.
NEGLIGIBLE = 1e-3
#: Standard errors by which random eviction has to be worse.
_ERRORS = 2.0


class NoDifferenceError(ValueError):
    """It makes no difference which tokens stay."""

    def __init__(self) -> None:
        super().__init__(
            "These weights show no difference: a cache that evicts random tokens is as good as any that chooses them. "
            "Nothing was stored. Are the weights those of a trained model?"
        )


def matters(best: Sequence[Row], random: Sequence[Row]) -> bool:
    """Whether random eviction is worse than the best cache.

    Args:
        best, random: rows at the same sizes, in which the divergences of a passage or question have the same place.
    """
    if all(row.mean(aspect) < NEGLIGIBLE for row in random for aspect in row.divergences):
        return False
    gains = [
        (by_chance - chosen) / mean
        for row, other in zip(best, random, strict=True)
        for aspect in row.divergences
        if (mean := other.mean(aspect)) > 0
        for chosen, by_chance in zip(row.divergences[aspect], other.divergences[aspect], strict=True)
    ]
    if len(gains) < 2:
        return bool(gains) and gains[0] > 0
    error: float = stdev(gains) / len(gains) ** 0.5
    return fmean(gains) > _ERRORS * error
