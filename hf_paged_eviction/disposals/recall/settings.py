"""The parameters of `Recall`."""

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from .summaries import Kind


@dataclass(frozen=True)
class Settings:
    """See `Recall`, which documents these parameters."""

    blocks: int | Literal["all"] = 8
    every: int = 1
    summary: Kind = "box"
    layers: int = 1
    keep: float = 1.0
    prefetch: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        leasts = {"blocks": 1, "every": 1, "layers": 1, "prefetch": 0, "length": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if (name == "blocks" and value == "all") or (name == "length" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                also = ' or "all"' if name == "blocks" else ""
                raise ValueError(f"recall: {name} must be a whole number of at least {least}{also}, got {value!r}.")
        if self.prefetch and self.blocks == "all":
            raise ValueError("recall: blocks='all' reads everything at every step, so there is nothing to prefetch.")
        if self.summary not in ("box", "vector"):
            raise ValueError(f'recall: summary must be "box" or "vector", got {self.summary!r}.')
        if isinstance(self.keep, bool) or not isinstance(self.keep, Real) or not 0 < self.keep <= 1:
            raise ValueError(f"recall: keep must lie in (0, 1], got {self.keep!r}.")

    def most_blocks(self, size: int) -> int | None:
        """Number of blocks of `size` tokens in the longest text; None = no limit."""
        return None if self.length is None else -(-self.length // size)
