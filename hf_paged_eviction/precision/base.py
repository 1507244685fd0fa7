"""Precisions: the values of the option `bits`, by name."""

import re
from dataclasses import dataclass
from typing import Any

from ..integration.heads import LocalHeads
from ..naming import Kind, Named, Registry
from .codec import Codec, check_bits

Codecs = tuple[Codec, Codec]


class Precision(Named):
    """The precision of stored keys and values, `bits=` of a cache."""

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
        return self.label


@dataclass(frozen=True)
class Rounded(Precision):
    """Rounds every number to a number of bits."""

    keys: int | None
    values: int | None

    @property
    def rounding(self) -> tuple[int | None, int | None]:
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
    def saved(self) -> list[int | None]:
        return [self.keys, self.values]


#: Precisions with a name, from the lab and other packages.
PRECISIONS: Registry[Precision] = Registry(Kind("precision", "precisions", "low_rank(file='FILE', rank=64)"), Precision)


def read_bits(bits: Any) -> Any:
    """Parse the option `bits`: "4" or 4, "8,none" or [8, None] (keys and values separately). A text that names another
    precision is returned unchanged.

    Raises:
        ValueError: `bits` is none of these.
    """
    words = str(bits).split(",") if isinstance(bits, str | int) else [str(count) for count in bits]
    name = re.match(r"[^\W\d]\w*", words[0].strip())
    if name and PRECISIONS.find(name[0]):
        return bits
    try:
        counts = [None if word.strip().lower() == "none" else int(word) for word in words]
        pair = check_bits(counts[0] if len(counts) == 1 else counts)
    except ValueError:
        raise ValueError("write 8, 4, 3 or 2, or two of these or none for keys and values, such as 8,4") from None
    return pair[0] if len(counts) == 1 else pair


def make_precision(bits: object) -> Precision | None:
    """Make the precision for `bits=`; None = the model's dtype.

    Raises:
        TypeError, ValueError: `bits` is not a precision.
    """
    if isinstance(bits, str):
        try:
            bits = read_bits(bits)
        except ValueError as error:
            raise ValueError(f"bits={bits!r}: {error}.") from None
    if isinstance(bits, str | Precision):
        return PRECISIONS.make(bits)
    keys, values = check_bits(bits)
    return None if keys is values is None else Rounded(keys, values)
