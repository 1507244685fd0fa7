"""A needle in a haystack, at every length and depth (github.com/gkamradt/LLMTest_NeedleInAHaystack).

As there: the needle, the question, eleven depths from 0 to 100 %, and the needle behind the end of a sentence.
Different: the room left for other tokens is counted instead of 200, and the answer is looked up in the prediction
instead of graded from 1 to 10 by another model. Unless texts are given (`--haystack`), the haystack is the filler text
of this package instead of Paul Graham's essays, which are not free to be shipped. Scores are not comparable with
published ones.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from ..errors import UserError
from ..options.files import read_text
from . import haystack
from .sized import Draft, Prefix, SizedTask

DEPTHS = tuple(place / 10 for place in range(11))
"""Where needles lie, as shares of the text; sample `index` has depth `index % 11`."""

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
ANSWERS = ("eat a sandwich", "sit in Dolores Park")
"""Both in the prediction is a score of 1, one of them a score of 0.5."""


def needle_in_a_haystack(texts: Sequence[str] = ()) -> SizedTask:
    """The task.

    Args:
        texts: the haystack, one after the other and again from the first; the filler text if there are none.
    """
    # Each word with what stands behind it, so that paragraphs stay.
    hay = [word for text in texts for word in re.findall(r"\S+\s*", f"{text.strip()}\n\n")]

    def draw(rng: random.Random, length: int, index: int) -> Draft:
        depth = DEPTHS[index % len(DEPTHS)]
        words = Prefix(_from(hay, rng, index) if hay else (f"{word} " for word in haystack.word_stream(rng)))
        return Draft(
            context=lambda units: f"{bury(''.join(words(units)).rstrip(), depth)}\n",
            ask="What is the best thing to do in San Francisco? Answer from the text above alone.\nAnswer:",
            answers=ANSWERS,
            completion=f" {NEEDLE.strip()}",
            metadata={"depth": depth},
        )

    description = "The needle in a haystack, at eleven depths in turn; the score is the share of it that comes back."
    return SizedTask("niah", description, "string_match_all", draw, 50, "words")


def _from(words: list[str], rng: random.Random, index: int) -> Iterator[str]:
    """The texts: as they are for the first sample of each depth, then from some sentence on."""
    start = 0
    if index >= len(DEPTHS):
        ends = [at + 1 for at, word in enumerate(words[:-1]) if word.rstrip().endswith((".", "!", "?"))]
        start = rng.choice(ends or [0])
    return cycle(words[start:] + words[:start])


def bury(text: str, depth: float) -> str:
    """`text` with the needle at `depth` in [0, 1], moved back to the end of a sentence or to the beginning.

    At depth 1 it stands at the very end.
    """
    most = int(len(text) * depth)
    place = len(text) if depth >= 1 else max(text.rfind(end, 0, most) for end in (". ", ".\n")) + 1
    return text[:place] + NEEDLE + text[place:].lstrip(" ")


def read_haystack(places: Sequence[str]) -> list[str]:
    """The texts of these files, and of the .txt and .md files in these folders, in the order of their names.

    Raises:
        UserError: there is no such file, one cannot be read, or there is no word in any of them.
    """
    texts = [read_text("--haystack", path) for path in _files(places)]
    if not any(text.strip() for text in texts):
        raise UserError(f"--haystack {', '.join(places)}: no text in there (.txt and .md files of a folder are read)")
    return [text for text in texts if text.strip()]


def haystack_digest(places: Sequence[str]) -> str:
    """SHA-256 of the texts."""
    digest = hashlib.sha256()
    for text in read_haystack(places):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _files(places: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f"--haystack {place}: there is no such file or folder")
        files += (
            sorted(path for path in place.glob("*.*") if path.suffix in (".txt", ".md")) if place.is_dir() else [place]
        )
    return files
