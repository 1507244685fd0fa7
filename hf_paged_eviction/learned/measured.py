"""The measured divergences of a model's caches, and the choice of the best one."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: Uses of a cache: text that goes on, or questions about facts.
Use = Literal["text", "questions", "both"]
#: Ways to ask, each measured on its own: a text goes on; the question about a fact comes once the prompt is compressed,
#: or is a part of it.
TEXT, UNKNOWN, KNOWN = ASPECTS = ("text", "unknown", "known")
OF_USE: Mapping[str, tuple[str, ...]] = {"text": (TEXT,), "questions": (UNKNOWN, KNOWN), "both": ASPECTS}
#: Units of sizes: shares of the tokens, or of the bytes of all keys and values in `FULL_BITS`.
TOKENS, BYTES = "tokens", "bytes"
#: Bits of a number in the full cache that shares of bytes refer to, whatever the model's dtype.
FULL_BITS = 16
#: Bits of stored numbers; a pair is of keys and of values.
Bits = int | tuple[int, int] | None
#: The baseline of all comparisons.
RANDOM = "random"
#: What keys say of a token, and what queries to come can be expected to ask: the first finds facts, the other one keeps
#: text going.
KEYS_AND_QUERIES = "hybrid(keydiff, expected_attention)"
#: The same with scores that are fitted to the model's attention in place of expected queries. With leverage, a single
#: rare fact stays; without it, one of many.
KEYS_AND_FITTED = "hybrid(keydiff, observed, weights=(1, 2))"
RARE_KEYS_AND_FITTED = "hybrid(keydiff, leverage, observed, weights=(1, 1, 4))"
_HYBRIDS = KEYS_AND_QUERIES, KEYS_AND_FITTED, RARE_KEYS_AND_FITTED
#: The policies that `prepare` tries. Profiles name no others, so that none of them leads to another file.
POLICIES = frozenset(
    (RANDOM, "observed", "calibrated", "leverage", "keydiff", *_HYBRIDS, "tova", "snapkv", "streaming_llm")
)
#: Its allocators: equal shares, or those of the profile, as they are or raised to a power.
_ALLOCATOR = re.compile(r"uniform|heads(\(power=\d(\.\d{1,3})?\))?")
#: A size at which the best cache still loses so much of what random eviction loses is beyond reach.
_BEYOND_REACH = 1 / 3


def pair(bits: Bits) -> tuple[int | None, ...]:
    """Bits of keys and of values."""
    return bits if isinstance(bits, tuple) else (bits, bits)


@dataclass(frozen=True)
class Row:
    """The divergences of one cache at one size.

    Attributes:
        policy: name of the policy. A policy that needs a file gets the profile.
        allocator: name of the allocator; "heads", with or without parameters, gets the shares of the profile.
        bits: bits per stored number, or a pair for keys and values; None = not rounded, which counts as `FULL_BITS`.
        unit: "tokens" or "bytes".
        share: size as a share of the full cache; of bytes, a share of `FULL_BITS` for each number.
        divergences: by aspect, the KL divergence from the full cache in nats per token, for each passage.
    """

    policy: str
    allocator: str
    bits: Bits
    unit: str
    share: float
    divergences: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short label for tables."""
        bits = "" if self.bits is None else f", {self.bits} bits"
        return f"{self.policy}{'' if self.allocator == 'uniform' else f'@{self.allocator}'}{bits}"

    def mean(self, aspect: str) -> float:
        """Mean divergence in nats per token."""
        divergences = self.divergences[aspect]
        return sum(divergences) / len(divergences)

    @property
    def count(self) -> int:
        """Number of measured divergences."""
        return sum(map(len, self.divergences.values()))


@dataclass(frozen=True)
class Measured:
    """All rows of a model.

    Attributes:
        rows: see `Row`.
        dtype: name of the dtype that the model ran in, such as "float32".
    """

    rows: tuple[Row, ...]
    dtype: str

    def best(self, unit: str, use: str) -> Row | None:
        """The cache with the smallest divergence relative to random eviction: mean over aspects and sizes."""
        scores = self.scores(unit, use)
        if not scores:
            return None
        best = min(scores, key=lambda name: scores[name])
        return next(row for row in self.rows if row.unit == unit and row.label == best)

    def scores(self, unit: str, use: str) -> dict[str, float]:
        """Divergence divided by that of random eviction, by label, for the caches that were measured at all sizes.

        Sizes beyond reach, at which every cache loses what the model needs, do not count, unless all sizes are.
        """
        rows = [row for row in self.rows if row.unit == unit]
        random = {row.share: row for row in rows if row.label == RANDOM}
        ratios: dict[str, dict[float, float]] = {}
        for row in rows:
            aspects = [aspect for aspect in OF_USE[use] if aspect in row.divergences]
            if row.label != RANDOM and aspects and row.count == random[row.share].count:
                parts = (row.mean(aspect) / max(random[row.share].mean(aspect), 1e-9) for aspect in aspects)
                ratios.setdefault(row.label, {})[row.share] = sum(parts) / len(aspects)
        shares = {share for by_share in ratios.values() for share in by_share}
        whole = {label: by_share for label, by_share in ratios.items() if len(by_share) == len(shares)}
        least = {share: min((by_share[share] for by_share in whole.values()), default=0.0) for share in shares}
        counted = [share for share, ratio in least.items() if ratio < _BEYOND_REACH] or shares
        return {label: sum(by_share[share] for share in counted) / len(counted) for label, by_share in whole.items()}

    def serves(self, use: str) -> bool:
        """Whether all that counts for this use was measured."""
        measured = {aspect for row in self.rows for aspect in row.divergences}
        return measured >= {*OF_USE[use]}

    @property
    def text(self) -> str:
        """The rows as JSON, with their unit."""
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"full_bits": FULL_BITS, "dtype": self.dtype, "rows": rows})

    @classmethod
    def of(cls, text: str) -> "Measured":
        """Read rows from JSON.

        Raises:
            ValueError: they are in other units, or name a cache that `prepare` does not try.
        """
        table = json.loads(text)
        if not isinstance(table, dict) or table.get("full_bits") != FULL_BITS:
            raise ValueError(
                f"its caches were not compared at shares of {FULL_BITS}-bit keys and values: make it again with "
                "`paged-eviction prepare`"
            )
        rows: list[dict[str, Any]] = table["rows"]
        pairs = ({**row, "bits": tuple(row["bits"])} if isinstance(row["bits"], list) else row for row in rows)
        measured = cls(tuple(Row(**row) for row in pairs), table["dtype"])
        for row in measured.rows:
            if row.policy not in POLICIES or not _ALLOCATOR.fullmatch(row.allocator):
                raise ValueError(f"prepare tries no cache like {row.policy!r} with {row.allocator!r}")
        return measured
