"""The noise of RULER's simplest haystacks: the same line again and again."""

from __future__ import annotations

_SENTENCES = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")


def lines(sentences: int) -> list[str]:
    """So many sentences, five to a line. RULER knows full lines only; here the last one may be shorter."""
    whole, rest = divmod(sentences, len(_SENTENCES))
    last = [" ".join(_SENTENCES[:rest])] if rest else []
    return [" ".join(_SENTENCES)] * whole + last


def sentences(lines: int) -> int:
    """How many sentences so many full lines have."""
    return lines * len(_SENTENCES)
