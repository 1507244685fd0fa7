"""All slots of a layer in codes, as they lie."""

from dataclasses import dataclass

from ..store.columns import Columns
from .codec import Codec, Codes
from .exact import Exact


@dataclass(frozen=True)
class HeldCodes:
    """All slots of a layer as attention may read them. Tokens in `exact` are read there, not from their slots. Where
    columns have lengths, what lies beyond them is nobody's.

    Attributes:
        codecs: of keys and of values.
        columns: of a `CodedStore`.
        exact: see there.
        empty: so many slots at the beginning of each row and head hold no token.
    """

    codecs: tuple[Codec, Codec]
    columns: Columns
    exact: Exact
    empty: int = 0

    @property
    def dim(self) -> int:
        """Of the values."""
        return self.exact.values.shape[-1]

    def codes(self, part: str) -> Codes:
        """Of the part "key" or "value"."""
        columns = self.columns
        return Codes(columns[f"{part}_codes"], columns.padded(f"{part}_levels"), columns.lengths)
