"""Text in pieces is the text, and ends where it should."""

import random
from collections.abc import Sequence

import pytest

pytest.importorskip("pydantic", reason="the extra `eval` is not installed")

from hf_paged_eviction_server.text import TextStream


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte; the first space of a text is dropped, as some tokenizers do."""
    return bytes(tokens).decode("utf-8", "replace").removeprefix(" ")


def streamed(text: str, stops: Sequence[str], draw: random.Random) -> tuple[list[str], bool]:
    tokens, stream, pieces = list(text.encode()), TextStream(decode, stops), []
    while tokens and not stream.stopped:
        count = draw.choice([1, 1, 2, 5])
        pieces.append(stream.add(tokens[:count]))
        del tokens[:count]
    return [*pieces, stream.end()], stream.stopped


def test_any_text() -> None:
    draw = random.Random(0)
    letters = ["a", "b", " ", "\n", "é", "漢", "🙂", "👩\u200d🚀"]
    for _ in range(300):
        text = "".join(draw.choices(letters, k=draw.randint(0, 20)))
        stops = ["".join(draw.choices(letters[:4], k=draw.randint(1, 3))) for _ in range(draw.randint(0, 2))]
        shown = text.removeprefix(" ")
        ends = [place for place in (shown.find(stop) for stop in stops) if place >= 0]
        pieces, stopped = streamed(text, stops, draw)
        assert "".join(pieces) == (shown[: min(ends)] if ends else shown), (text, stops)
        assert stopped == bool(ends)


def test_half_a_character() -> None:
    """It is not shown before it is whole, and as what it is if it never becomes whole."""
    stream = TextStream(decode)
    assert stream.add([0xC3]) == ""
    assert stream.add([0xA9]) == "é"
    assert stream.add([0xC3]) + stream.end() == "\ufffd"


def test_what_may_become_a_stop_waits() -> None:
    stream = TextStream(decode, ["END"])
    assert [stream.add([byte]) for byte in b"aENx"] == ["a", "", "", "ENx"]
    assert stream.add(b"EN") + stream.end() == "EN"
