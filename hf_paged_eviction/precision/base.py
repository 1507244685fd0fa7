"""Precisions: the values of the option `bits`."""

from dataclasses import dataclass
from typing import Any

from ..integration.heads import LocalHeads
from .codec import Codec, check_bits

Codecs = tuple[Codec, Codec]


class Precision:
    """The precision of stored keys and values, `bits=` of a cache."""

    @property
    def label(self) -> str:
        """What `repr` of a cache and rows of results say."""
        raise NotImplementedError

    @property
    def rounding(self) -> tuple[int | None, int | None]:
        """Bits per number of keys and of values; None = the model's dtype."""
        raise NotImplementedError

    @property
    def known_bad(self) -> str | None:
        """A warning, if this precision was bad on every measured model; None = no warning."""
        return None

    def check_model(self, config: Any) -> None:
        """Refuse a model that this precision does not support.

        Raises:
            ValueError: not supported; the message gives the reason and what to use instead.
        """

    def codecs(self, index: int, plain: Codecs, local_heads: LocalHeads) -> Codecs:
        """The codecs of keys and of values of one layer.

        Args:
            index: index of the layer in the model.
            plain: codecs that only round numbers to the bits of `rounding`.
            local_heads: the KV heads of the layer that this process holds.
        """
        return plain

    @property
    def saved(self) -> Any:
        """The value of `bits=` for loading a cache, as JSON.

        Raises:
            ValueError: this precision cannot be saved.
        """
        raise ValueError(f"A cache of {self.label} cannot be saved. Save one of plain bits=, such as 4.")


@dataclass(frozen=True)
class Rounded(Precision):
    """Rounds every number to a number of bits."""

    keys: int
    values: int

    @property
    def rounding(self) -> tuple[int, int]:
        return self.keys, self.values

    @property
    def known_bad(self) -> str | None:
        if self.keys != 2:
            return None
        return (
            "Keys in 2 bits can lose what has to be found again: when all tokens are held so, SmolLM2-135M keeps 5 of "
            "20 needles, and more with 4 bits and fewer tokens in the same bytes; Gemma-3-270M keeps 17 of 21. "
            "`verify(model, text=ids)` says what they cost your model."
        )

    @property
    def label(self) -> str:
        """The value of `bits=`: one number, or a pair."""
        return str(self.keys if self.keys == self.values else self.rounding)

    @property
    def saved(self) -> list[int]:
        return [self.keys, self.values]


def read_bits(bits: Any) -> Any:
    """Parse the option `bits`: "4" or 4, "8,4" or [8, 4] (keys and values separately).

    Raises:
        ValueError: `bits` is none of these.
    """
    words = str(bits).split(",") if isinstance(bits, str | int) else [str(count) for count in bits]
    try:
        counts = [int(word) for word in words]
        pair = check_bits(counts[0] if len(counts) == 1 else counts)
    except ValueError:
        raise ValueError("write 8, 4, 3 or 2, or two of these for keys and values, such as 8,4") from None
    return pair[0] if len(counts) == 1 else pair


def make_precision(bits: object) -> Precision | None:
    """Make the precision for `bits=`; None = the model's dtype.

    Raises:
        TypeError, ValueError: `bits` is not a precision.
    """
    if isinstance(bits, Precision):
        return bits
    if isinstance(bits, str):
        try:
            bits = read_bits(bits)
        except ValueError as error:
            raise ValueError(f"bits={bits!r}: {error}.") from None
    keys, values = check_bits(bits)
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        raise ValueError(f"bits={bits!r} says nothing of one half: give it 8, which is nearly exact.")
    return Rounded(keys, values)
