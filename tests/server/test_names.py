"""What tokens are called where log probabilities are told, by tokenizers of each kind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import driving

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

if not driving.UNSERVED:
    from hf_paged_eviction_server.answers import Answer, ChatForm, CompletionForm, Piece
    from hf_paged_eviction_server.names import Offsets, TokenNames
    from hf_paged_eviction_server.prompts import Limits, Prompt, Prompts
    from hf_paged_eviction_server.sampling import Chosen, Sampler, Sampling

EURO = list("€".encode())


def sentence_piece() -> Any:
    """With blanks as marks, and bytes for what has no piece."""
    words = ["<unk>", "<s>", "the", "▁the", "▁", "<0xE2>", "<0x82>", "<0xAC>", "é"]
    inner = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")


def word_piece() -> Any:
    """With marks for pieces that go on."""
    words = ["[UNK]", "the", "##re", "a"]
    inner = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


def byte_level() -> Any:
    from hf_paged_eviction_eval.embedded import load

    return load()[1]


def test_sentence_piece() -> None:
    names = TokenNames(sentence_piece())
    assert [names.name(token) for token in range(9)] == [
        "<unk>",
        "<s>",
        "the",
        " the",
        " ",
        r"bytes:\xe2",
        r"bytes:\x82",
        r"bytes:\xac",
        "é",
    ]
    assert b"".join(map(names.bytes_of, [3, 4, 5, 6, 7])) == " the €".encode()


def test_word_piece() -> None:
    names = TokenNames(word_piece())
    assert [names.name(token) for token in range(4)] == ["[UNK]", " the", "re", " a"]


def test_byte_level() -> None:
    """Each name once, and the bytes of a text are those of its tokens."""
    tokenizer = byte_level()
    names = TokenNames(tokenizer)
    assert len({names.name(token) for token in range(len(tokenizer))}) == len(tokenizer)
    for text in ("The café cost 5 € — naïve?\n", "日本\t語", " a  b   c", "\N{GRINNING FACE}\x00\x7f"):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(map(names.bytes_of, tokens)).decode() == text
        starts = [len(b"".join(map(names.bytes_of, tokens[:at])).decode(errors="ignore")) for at in range(len(tokens))]
        assert Offsets(names).of(tokens) == starts


@pytest.mark.parametrize("make", [sentence_piece, byte_level])
def test_offsets_are_places_in_the_text(make: Any) -> None:
    """Whatever is drawn, answered behind whatever: a token's text stands where its offset says."""
    tokenizer, draw = make(), random.Random(0)
    prompts = Prompts(tokenizer, len(tokenizer), Limits(99, 99, None))
    names = prompts.names
    whole = [token for token in range(len(tokenizer)) if not names.name(token).startswith("bytes:")]
    for _ in range(50):
        before, tokens = ([draw.choice(whole) for _ in range(count)] for count in (4, 12))
        answer = Answer(prompts, Prompt(before, tail=before), [], frozenset(), Sampler(Sampling()))
        text = answer._text.add(tokens) + answer._text.end()
        piece = answer._piece(text, [Chosen(token, -0.1, ()) for token in tokens], None)
        for token, offset in zip(tokens, piece.offsets, strict=True):
            if token not in names.special:
                assert text[offset:].startswith(names.name(token)), (tokenizer.decode(before), text, token, offset)


@pytest.mark.parametrize("make", [sentence_piece, byte_level])
def test_offsets_in_prompts(make: Any) -> None:
    """The first token may stand there without its blank; what is answered begins where the prompt ends."""
    tokenizer, draw = make(), random.Random(0)
    names = TokenNames(tokenizer)
    whole = [token for token in range(len(tokenizer)) if not names.name(token).startswith("bytes:")]
    for _ in range(50):
        tokens = [draw.choice(whole) for _ in range(12)]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        offsets = Offsets(names)
        places = offsets.of_text(tokens, text)
        for at, (token, place) in enumerate(zip(tokens, places, strict=True)):
            if token not in names.special:
                name = names.name(token)
                assert text[place:].startswith(name) or (not any(places[: at + 1]) and text.startswith(name.lstrip()))
        assert offsets.of(tokens[:1]) == [len(text)]


def test_two_tokens_are_two() -> None:
    """As the first of a text they would be called alike."""
    prompts = Prompts(sentence_piece(), 9, Limits(9, 9, None))
    chosen = Chosen(3, -0.1, ((3, -0.1), (2, -2.0), (99, float("nan")), (98, -float("inf"))))
    logprobs = CompletionForm("m", prompts, True)._logprobs(Piece("", [chosen, chosen], [0, 4], None))
    assert logprobs["tokens"] == [" the", " the"]
    assert logprobs["top_logprobs"][0] == {" the": -0.1, "the": -2.0, "token_id:99": -9999.0, "token_id:98": -9999.0}
    euro = [ChatForm("m", prompts, True)._with_alternatives(Chosen(token, -1.0, ())) for token in (5, 6, 7)]
    assert [byte for entry in euro for byte in entry["bytes"]] == EURO


def test_a_text_goes_on() -> None:
    """Behind a prompt the first blank stands; a message begins without it."""
    prompts = Prompts(sentence_piece(), 9, Limits(9, 9, None))
    texts = []
    for tail in ([3, 2], [], [5]):  # the last ends in the middle of a character
        answer = Answer(prompts, Prompt([3, 2], tail=tail), [], frozenset(), Sampler(Sampling()))
        texts.append(answer._text.add([3, 3]) + answer._text.end())
    assert texts == [" the the", "the the", "the the"]
