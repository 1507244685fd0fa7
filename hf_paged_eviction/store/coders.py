"""What lies in the slots of a store, and what attention gets."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..attention.in_place import Reader
from ..attention.segments import InSegments, SegmentsReader
from ..integration.rotary import Rotary
from .columns import Columns, States
from .exact import Exact

#: What `Coder.read` reads.
BOTH = ("keys", "values")
#: `[batch, kv_heads, n, dim]` each.
KeysValues = tuple[Tensor, Tensor]
#: Returns the slots that hold a token, `[batch, 1 or kv_heads, n]` bool; None = all.
Visible = Callable[[], Tensor | None]


class Coder(Protocol):
    """Makes columns of keys and values, and keys and values of columns.

    Attributes:
        rounds: whether tokens are stored in fewer bits.
        codecs: those of keys and of values; none if the coder does not round.
        rerotation: rotation of the keys, if attention reads them at other positions; else None.
    """

    rounds: bool
    codecs: tuple[Any, ...]
    rerotation: Rotary | None

    def kinds(self, keys: Tensor, values: Tensor) -> tuple[dict[str, Tensor], Exact | None]:
        """The columns for states like these, without slots, `[batch, sets, 0, ...]`; and, on the device "meta", what is
        not rounded in their rows, if the coder rounds. Called on the host before such states come."""

    def encode(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, exact: Exact | None = None
    ) -> dict[str, Tensor]:
        """The columns of tokens at `positions` `[batch, 1 or kv_heads, n]`; the last two are needed to round."""

    def decode(self, columns: States, exact: Exact | None) -> KeysValues:
        """Keys and values of columns `[batch, sets, n, ...]`."""

    def read(self, columns: Columns, held: int | None, reads: Sequence[str] = BOTH) -> KeysValues:
        """Keys and values of the first `held` slots (None = all), `[batch, kv_heads, held, dim]`; of segments, nothing
        beyond their ends means anything. `reads`: which of them; the others may have no channels."""

    def reader(self, columns: Columns, like: Tensor, held: int | None, visible: Visible) -> Reader | None:
        """Attention to the first `held` slots (None = all) in the form in which they lie; None = attention needs keys
        and values. Queries are on the device of `like`."""


class Plain:
    """Keys and values as they come; and, with `rerotation`, a copy of the keys at other positions, see `Coder`.

    The copy takes half as much memory as keys and values. In return a decoded token rotates nothing: the copy is
    renewed once per block, always from the original keys, so rounding errors do not add up.
    """

    rounds, codecs = False, ()

    def __init__(self, rerotation: Rotary | None = None) -> None:
        self.rerotation = rerotation

    def kinds(self, keys: Tensor, values: Tensor) -> tuple[dict[str, Tensor], None]:
        """See `Coder.kinds`."""
        return self.encode(keys[:, :, :0], values[:, :, :0]), None

    def encode(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, exact: Exact | None = None
    ) -> dict[str, Tensor]:
        """See `Coder.encode`; new keys are at their own positions."""
        states = {"keys": keys, "values": values}
        return states if self.rerotation is None else {**states, "rerotated": keys}

    def decode(self, columns: States, exact: Exact | None) -> KeysValues:
        """See `Coder.decode`."""
        return columns["keys"], columns["values"]

    def read(self, columns: Columns, held: int | None, reads: Sequence[str] = BOTH) -> KeysValues:
        """See `Coder.read`; views, but padded copies of segments."""
        return self.decode(columns.first(held), None)

    def reader(self, columns: Columns, like: Tensor, held: int | None, visible: Visible) -> Reader | None:
        """See `Coder.reader`; of segments, but not on an accelerator, where a loop over rows and heads costs more than
        a padded copy."""
        lengths = columns.layout.lengths
        if lengths is None or like.device.type != "cpu":
            return None
        segments, bounds = InSegments(columns["keys"], columns["values"], lengths, visible()), columns.layout.bounds
        return segments.read if bounds is None else SegmentsReader(segments, bounds)
