"""Long texts as token ids, a piece at a time: at once, a tokenizer takes half a kilobyte for every token."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

#: Characters of a piece, and how many more it has in common with the next one.
PIECE, OVERLAP = 100_000, 2_000
#: Tokens in a row that two pieces must have in common where they are joined.
_EQUAL = 16


class _Part(NamedTuple):
    """Ids of a piece without special tokens, and where in the text each begins."""

    ids: list[int]
    begins: list[int]


def encode(tokenizer: Any, text: str, most: int) -> array[int]:
    """The first ids of a text, in 32 bits each: those that the tokenizer gives for the whole of it.

    Pieces are joined where both have the same tokens at the same places. A text whose pieces do not meet is read at
    once, and so is every text where the tokenizer does not tell the places.

    Args:
        most: ids wanted.
    """
    ends = _special(tokenizer, text)
    if len(text) <= PIECE + OVERLAP or not tokenizer.is_fast or ends is None:
        return _at_once(tokenizer, text, most)
    ids, part = array("i", ends[0]), _read(tokenizer, text, 0)
    for start in range(PIECE, len(text) - OVERLAP, PIECE):
        following = _read(tokenizer, text, start)
        place = _meet(part, following)
        if place is None:
            return _at_once(tokenizer, text, most)
        ids.extend(part.ids[: place[0]])
        part = _Part(following.ids[place[1] :], following.begins[place[1] :])
        if len(ids) >= most:
            return ids[:most]
    ids.extend(part.ids)
    ids.extend(ends[1])
    return ids[:most]


def _at_once(tokenizer: Any, text: str, most: int) -> array[int]:
    # Enough characters for the tokens wanted, without encoding whole books.
    return array("i", tokenizer(text[: most * 32], verbose=False)["input_ids"][:most])


def _special(tokenizer: Any, text: str) -> tuple[list[int], list[int]] | None:
    """What the tokenizer puts before and behind a text; None if it does something else."""
    bare = tokenizer(text[:64], add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer(text[:64], verbose=False)["input_ids"]
    count = len(bare)
    at = next((at for at in range(len(whole) - count + 1) if whole[at : at + count] == bare), None)
    return None if at is None else (whole[:at], whole[at + count :])


def _read(tokenizer: Any, text: str, start: int) -> _Part:
    piece = text[start : start + PIECE + OVERLAP]
    encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return _Part(encoded["input_ids"], [start + begin for begin, _ in encoded["offset_mapping"]])


def _meet(first: _Part, second: _Part) -> tuple[int, int] | None:
    """The first token of each from which on they agree; where a piece is cut, its next tokens can be others."""
    places = {begin: at for at, begin in enumerate(first.begins) if begin >= second.begins[0]} if second.begins else {}
    for mine in range(len(second.ids) - _EQUAL + 1):
        at = places.get(second.begins[mine])
        if at is None or at + _EQUAL > len(first.ids):
            continue
        same = slice(at, at + _EQUAL), slice(mine, mine + _EQUAL)
        if first.ids[same[0]] == second.ids[same[1]] and first.begins[same[0]] == second.begins[same[1]]:
            return at, mine
    return None
