"""Parse budgets: "1024" tokens, "25%" of the first prompt, "25% of memory", "2GiB" of keys and values."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral

_UNITS = {
    "B": 1,
    "kB": 1000,
    **{f"{letter}B": 1000**power for power, letter in enumerate("MGT", 2)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_bytes(memory: int | str) -> int:
    """Parse a number of bytes.

    Args:
        memory: an int of bytes, or text: "512MiB", "2 GiB" (1024 to the power of 2, of 3), "1.5GB" (1000 to the power
            of 3), whatever the case of the letters.

    Raises:
        TypeError: `memory` is neither int nor text. ValueError: the text is not valid, or the number is not positive.
    """
    if isinstance(memory, bool) or not isinstance(memory, Integral | str):
        raise TypeError(f"memory must be an int of bytes or a text such as '2GiB', got {memory!r}.")
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]+)\s*", memory.lower(), re.ASCII)
        if match is None or match[2] not in _LOWER:
            raise ValueError(
                f"{memory!r} is not a number of bytes: write it with B, kB, MB, GB, TB (powers of 1000) or KiB, "
                "MiB, GiB, TiB (powers of 1024), such as '2GiB'."
            )
        count = int(float(match[1]) * _LOWER[match[2]]) if "." in match[1] else int(match[1]) * _LOWER[match[2]]
    else:
        count = int(memory)
    if count < 1:
        raise ValueError(f"memory must be at least one byte, got {memory!r}.")
    return count


def parse_share(text: str) -> Fraction:
    """Parse a share: "12.5%" -> 1/8.

    Raises:
        ValueError: the text is not valid, or the share is not above 0% and at most 100%.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,40})?|\.\d{1,40})\s*%\s*", text, re.ASCII)
    share = Fraction(match[1]) / 100 if match else Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is not a share: write one above 0% and up to 100%, such as '25%'.")
    return share


@dataclass(frozen=True)
class MemoryShare:
    """A share of the bytes that keys and values take in 16 bits: those of the first forward, or of so many tokens.

    Attributes:
        share: above 0 and at most 1.
        tokens: number of tokens of each row; None = those of the first forward.
    """

    share: float
    tokens: int | None = None

    @property
    def text(self) -> str:
        """The text that `parse_memory_share` parses."""
        return f"{share_text(self.share)} of memory" + ("" if self.tokens is None else f" of {self.tokens} tokens")


def parse_memory_share(text: str) -> MemoryShare | None:
    """Parse "25% of memory" or "25% of memory of 8192 tokens"; None if the text speaks of no memory.

    Raises:
        ValueError: the text speaks of memory in another way, or the share is not above 0% and at most 100%.
    """
    if not re.search(r"%.*[a-z]", text, re.IGNORECASE | re.DOTALL):
        return None
    share, words, rest = text.partition("%")
    match = re.fullmatch("of memory(?: of ([1-9][0-9]{0,11}) tokens)?", " ".join(rest.lower().split()))
    if match is None:
        raise ValueError(
            f"budget={text!r} cannot be parsed: a share of the keys and values of the first prompt in 16 bits is "
            f"written '{share.strip()}% of memory', of a text in chunks '{share.strip()}% of memory of 8192 tokens', a "
            f"share of its tokens '{share.strip()}%'."
        )
    return MemoryShare(float(parse_share(share + words)), int(match[1]) if match[1] else None)


def share_text(share: float) -> str:
    """Write a share as text, so that `parse_share` returns the same float: 0.125 -> "12.5%"."""
    return f"{(Decimal(repr(float(share))) * 100).normalize():f}%"


def parse_budget(text: str) -> tuple[int | None, float | None, int | None]:
    """Parse a budget to tokens, share and bytes, of which all but one are None.

    Raises:
        ValueError: the text is none of the three.
    """
    plain = text.strip()
    if plain.isascii() and plain.isdecimal():
        return int(plain), None, None
    try:
        return (None, float(parse_share(plain)), None) if plain.endswith("%") else (None, None, parse_bytes(plain))
    except ValueError as error:
        raise ValueError(
            f"budget={text!r} cannot be parsed ({str(error).rstrip('.')}). Give tokens (1024), a share of the "
            "first prompt ('25%') or of its memory ('25% of memory'), or bytes ('2GiB')."
        ) from error


def bytes_text(count: int) -> str:
    """Write bytes as text, so that `parse_bytes` returns the same number, in few characters: 2147483648 -> "2GiB"."""
    return min((f"{count // size}{unit}" for unit, size in _UNITS.items() if count % size == 0), key=len)


def readable_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def shortened(number: int) -> str:
    """A number for messages: one that nobody means is told by its length."""
    return str(number) if abs(number) < 10**20 else f"a number of {int(abs(number).bit_length() * 0.30103) + 1} digits"
