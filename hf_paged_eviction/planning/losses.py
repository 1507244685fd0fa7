"""What a profile measured at a share of the memory, or near it."""

from dataclasses import dataclass
from math import exp, log

from ..learned.measured import BYTES, OF_USE, Bits, Measured, Row, Use

#: So close to a share that was measured, relative to it, its number counts as measured there.
_CLOSE = 0.02


@dataclass(frozen=True)
class Loss:
    """Divergence from the full cache.

    Attributes:
        nats: per token, mean over the ways to ask that count for a use.
        source: "measured" at this share; "between" two shares that were measured; or "extrapolated": the nearest share
            that was measured is another, and the number is that one's.
    """

    nats: float
    source: str

    def __str__(self) -> str:
        marks = {"measured": "", "between": " ~", "extrapolated": " ?"}
        return f"{self.nats:.3f}{marks[self.source]}"


def loss_at(measured: Measured | None, bits: Bits, share: float, use: Use = "both") -> Loss | None:
    """The loss of the best cache with these bits at a share of the 16-bit bytes of keys and values; None if no cache
    with these bits was measured."""
    if measured is None:
        return None
    scores = measured.scores(BYTES, use)
    labels = {row.label for row in measured.rows if row.unit == BYTES and row.bits == bits} & set(scores)
    if not labels:
        return None
    best = min(labels, key=lambda label: scores[label])
    points = sorted((row.share, _mean(row, use)) for row in measured.rows if (row.unit, row.label) == (BYTES, best))
    nearest = min(points, key=lambda point: abs(log(point[0] / share)))
    if abs(nearest[0] / share - 1) <= _CLOSE:
        return Loss(nearest[1], "measured")
    below, above = (
        max((p for p in points if p[0] < share), default=None),
        min((p for p in points if p[0] > share), default=None),
    )
    if below is None or above is None:
        return Loss(nearest[1], "extrapolated")
    part = log(share / below[0]) / log(above[0] / below[0])
    floor = 1e-6  # a loss may be zero, or less by noise
    return Loss(exp((1 - part) * log(max(below[1], floor)) + part * log(max(above[1], floor))), "between")


def _mean(row: Row, use: Use) -> float:
    means = [row.mean(aspect) for aspect in OF_USE[use] if aspect in row.divergences]
    return sum(means) / len(means)
