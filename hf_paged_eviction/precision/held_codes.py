"""The codes of all slots of a layer."""

from dataclasses import dataclass

from torch import Tensor

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
        held: number of slots in use, the first ones; None = all.
        empty: number of slots at the beginning of each row and head that hold no token.
        visible: `[batch, 1 or kv_heads, slots]` bool, the slots that hold a token; None = the model's mask says it.
    """

    codecs: tuple[Codec, Codec]
    columns: Columns
    exact: Exact
    held: int | None = None
    empty: int = 0
    visible: Tensor | None = None

    @property
    def dim(self) -> int:
        """Head size of the values."""
        return self.exact.values.shape[-1]

    @property
    def slots(self) -> int:
        """Number of slots that attention reads; for heads of different length, the slots of a padded copy."""
        columns = self.columns
        return columns.shape[2] if self.held is None or columns.lengths is not None else self.held

    def codes(self, part: str) -> Codes:
        """The codes of the part "key" or "value"."""
        columns = self.columns
        packed, levels = columns[f"{part}_codes"], columns.padded(f"{part}_levels")
        if columns.lengths is None:
            packed = packed[:, :, : self.slots]
        return Codes(packed, levels[:, :, : self.slots], columns.lengths)
