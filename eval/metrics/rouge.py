"""ROUGE-L (Lin 2004), as LongBench computes it: with the package `rouge` 1.0.1, whose rules these are."""

from __future__ import annotations

from . import chinese


def rouge_l_zh(prediction: str, reference: str) -> float:
    """`rouge_l` of Chinese texts."""
    return rouge_l(" ".join(chinese.cut(prediction)), " ".join(chinese.cut(reference)))


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the common words of all pairs of sentences, 0 to just under 1.

    Sentences end at full stops, words at blanks; case counts. Every pair of sentences gives the words of one longest
    common subsequence; their union, as a set, is compared with the sets of words of both texts.

    Returns:
        0 if a text has no sentence (empty, or only full stops), where `rouge` raises and LongBench counts 0.
    """
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return 0.0
    common: set[str] = set()
    for sentence in predicted:
        places = _places(sentence)
        for other in wanted:
            common |= _common_words(other, places, len(sentence))
    precision = len(common) / len({word for sentence in predicted for word in sentence})
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    # A sentence of blanks holds one word, the empty one.
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _places(sentence: list[str]) -> dict[str, int]:
    """Where each word stands: bit i for position i."""
    places: dict[str, int] = {}
    for index, word in enumerate(sentence):
        places[word] = places.get(word, 0) | 1 << index
    return places


def _common_words(wanted: list[str], places: dict[str, int], width: int) -> set[str]:
    """Words of one longest common subsequence: the one that `rouge` finds.

    The table of lengths, a row per wanted word and a column per word of the other sentence, grows by 0 or 1 from
    column to column. A row is kept as the bits of the columns where it grows (Hyyrö 2004), computed for all columns
    at once. The way back from the last cell takes the diagonal where the words match, goes up where the row grows,
    and left otherwise: so from any cell it stops next at the highest such column.

    Args:
        wanted: words of a sentence.
        places: words of the other sentence, with the bits of their positions.
        width: length of the other sentence, in words.
    """
    if places.keys().isdisjoint(wanted):
        return set()
    every = (1 << width) - 1
    flat, rows = every, []  # `flat`: the columns where the row does not grow
    for word in wanted:
        match = places.get(word, 0)
        gain = flat & match
        flat = ((flat + gain) | (flat - gain)) & every
        rows.append((word, match, every ^ flat))
    common, column = set(), width
    for word, match, grows in reversed(rows):
        stops = (match | grows) & ((1 << column) - 1)
        if not stops:
            break
        column = stops.bit_length()
        if match >> (column - 1) & 1:
            common.add(word)
            column -= 1
    return common
