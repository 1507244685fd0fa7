"""The parameters of `Recall`, as its parts see them."""

from typing import Protocol

from ..replacement import Replacement
from .summaries import Kind


class Settings(Protocol):
    """See `Recall`."""

    @property
    def blocks(self) -> int | str: ...

    @property
    def layers(self) -> int: ...

    @property
    def every(self) -> int: ...

    @property
    def summary(self) -> Kind: ...

    @property
    def prefetch(self) -> int: ...

    @property
    def length(self) -> int | None: ...

    @property
    def replacement(self) -> str | Replacement: ...

    @property
    def keep(self) -> float: ...


def most_blocks(settings: Settings, size: int) -> int | None:
    """Number of blocks of `size` tokens in the longest text; None = no limit."""
    return None if settings.length is None else -(-settings.length // size)
