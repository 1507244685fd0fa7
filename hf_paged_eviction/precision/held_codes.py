"""The codes of all slots of a layer."""

from dataclasses import dataclass

from ..store.columns import Columns
from .codec import Codec, Codes
from .exact import Exact


@dataclass(frozen=True)
class HeldCodes:
    """The codes of all slots of a layer, for attention. Tokens in `exact` are read from there, not from their slots. If
    columns have lengths, entries beyond them mean nothing.

    Attributes:
        codecs: codecs of keys and of values.
        columns: columns of a `CodedStore`.
        exact: tokens that are not rounded.
        empty: number of slots at the beginning of each row and head that hold no token.
    """

    codecs: tuple[Codec, Codec]
    columns: Columns
    exact: Exact
    empty: int = 0

    @property
    def dim(self) -> int:
        """Head size of the values."""
        return self.exact.values.shape[-1]

    def codes(self, part: str) -> Codes:
        """The codes of the part "key" or "value"."""
        columns = self.columns
        return Codes(columns[f"{part}_codes"], columns.padded(f"{part}_levels"), columns.lengths)
