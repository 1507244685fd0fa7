"""What was measured of a model's caches, and which of them that says to use."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: What a cache is used for: text that goes on, or facts that are asked for.
Use = Literal["text", "questions", "both"]
#: Ways to ask, each measured on its own: a text goes on; a fact is asked for once the prompt is compressed, or in it.
TEXT, LATER, BEFORE = ASPECTS = ("text", "asked later", "asked before")
OF_USE: Mapping[str, tuple[str, ...]] = {"text": (TEXT,), "questions": (LATER, BEFORE), "both": ASPECTS}
#: What sizes are counted in.
TOKENS, BYTES = UNITS = ("tokens", "bytes")
#: What all others are compared with: as good as it is no better than chance.
RANDOM = "random"


@dataclass(frozen=True)
class Row:
    """One cache at one size.

    Attributes:
        policy: its name; one of a file has the profile as its file.
        allocator: "heads", perhaps with parameters, for the profile's shares; or another name.
        bits: per number kept; None = the model's own type.
        unit: "tokens" or "bytes".
        share: of what the full cache takes.
        divergences: by aspect, KL to the full cache in nats per token, for each passage or question.
    """

    policy: str
    allocator: str
    bits: int | None
    unit: str
    share: float
    divergences: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Short, for tables."""
        bits = "" if self.bits is None else f", {self.bits} bits"
        return f"{self.policy}{'' if self.allocator == 'uniform' else f'@{self.allocator}'}{bits}"

    def mean(self, aspect: str) -> float:
        """Nats per token."""
        divergences = self.divergences[aspect]
        return sum(divergences) / len(divergences)

    @property
    def count(self) -> int:
        """Numbers that there are."""
        return sum(map(len, self.divergences.values()))


@dataclass(frozen=True)
class Measured:
    """All rows of a model.

    Raises:
        ValueError: something in them cannot be.
    """

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            numbers = [number for divergences in row.divergences.values() for number in divergences]
            right = row.unit in UNITS and 0 < row.share <= 1 and row.bits in (None, 2, 3, 4, 8)
            if not right or set(row.divergences) - {*ASPECTS} or not all(number >= -1e-3 for number in numbers):
                raise ValueError(f"a row of measurements is not valid: {row}")

    def best(self, unit: str, use: str) -> Row | None:
        """The cache that diverges least, as a share of what random eviction does: mean over aspects and sizes."""
        scores = self.scores(unit, use)
        if not scores:
            return None
        best = min(scores, key=lambda name: scores[name])
        return next(row for row in self.rows if row.unit == unit and row.label == best)

    def scores(self, unit: str, use: str) -> dict[str, float]:
        """By label of the caches that were measured everywhere: divergence over that of random eviction."""
        rows = [row for row in self.rows if row.unit == unit]
        shares = sorted({row.share for row in rows})
        by_label: dict[str, dict[float, Row]] = {}
        for row in rows:
            by_label.setdefault(row.label, {})[row.share] = row
        whole = {share: max((row.count for row in rows if row.share == share), default=0) for share in shares}
        scores = {}
        for label, sizes in by_label.items():
            if label == RANDOM or any(share not in sizes or sizes[share].count < whole[share] for share in shares):
                continue
            parts = [
                sizes[share].mean(aspect) / max(by_label[RANDOM][share].mean(aspect), 1e-9)
                for share in shares
                for aspect in OF_USE[use]
                if aspect in sizes[share].divergences
            ]
            if parts:
                scores[label] = sum(parts) / len(parts)
        return scores

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps([asdict(row) for row in self.rows])

    @classmethod
    def of(cls, text: str) -> "Measured":
        """The reverse of `text`.

        Raises:
            ValueError, TypeError, KeyError: it is no such text.
        """
        rows: Iterable[dict[str, Any]] = json.loads(text)
        return cls(tuple(Row(**row) for row in rows))
