"""Names and bytes of tokens, for log probabilities."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenNames:
    """The names and bytes of the tokens of a vocabulary.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        special: tokens that are left out of texts.
        bytes_of: returns the bytes of a token that is not the first of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {int(token) for token in getattr(tokenizer, "added_tokens_decoder", {})}
        self.special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._byte_level = decoder is not None and b'"ByteLevel"' in bytes(decoder.__getstate__())
        self.bytes_of = lru_cache(None)(self._bytes_of)

    def name(self, token: int) -> str:
        """The text of a token; for a part of a character "bytes:\\xe2", as in OpenAI's format."""
        raw = self.bytes_of(token)
        try:
            return raw.decode("utf-8") if raw else f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, bytes):
            return piece
        if piece is None:
            return b""
        if token in self._added:
            return str(piece).encode("utf-8", "replace")
        if self._byte_level and all(char in _BYTES for char in piece):
            return bytes(_BYTES[char] for char in piece)
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes.fromhex(byte[1])
        # Decoders leave out the blank that the first token begins with: it is the second that is looked at.
        once, twice = (self._tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
        return str(twice[len(once) :]).encode("utf-8", "replace")


class Offsets:
    """Computes the offsets of tokens in their text, in characters."""

    def __init__(self, names: TokenNames) -> None:
        self._names, self._characters = names, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The offsets of the next tokens; a part of a character has the offset of the character."""
        offsets = []
        for token in tokens:
            offsets.append(self._characters)
            if token not in self._names.special:
                self._characters += len(self._decoder.decode(self._names.bytes_of(token)))
        return offsets

    def of_text(self, tokens: Iterable[int], text: str) -> list[int]:
        """The offsets of the first tokens, whose text is given, because the first token may lack its leading blank."""
        offsets = self.of(tokens)
        blanks, self._characters = max(self._characters - len(text), 0), len(text)
        return [max(at - blanks, 0) for at in offsets]


def _byte_level() -> dict[str, int]:
    """The characters that tokenizers of the kind of GPT-2 write for bytes: for those that cannot be seen, others."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + at): byte for at, byte in enumerate(unseen)}


_BYTES = _byte_level()
