"""Texts encoded in pieces: the ids of the whole, whatever the tokenizer does between words."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_paged_eviction_eval.models import encoding
from hf_paged_eviction_eval.models.encoding import encode

RNG = Random(0)
WORDS = [
    "".join(RNG.choice("abcdefgh") for _ in range(RNG.randint(1, 9))) + RNG.choice(["", ",", "\n", " é"])
    for _ in range(300)
]
TEXTS = {
    "words": " ".join(RNG.choice(WORDS) for _ in range(2000)),
    "letters": "a" * 4000 + " b" * 2000,
    "one long word": "".join(RNG.choice("abcdefgh") for _ in range(6000)),
    "no blank": "".join(RNG.choice(["字", "é", "a1", "\n"]) for _ in range(4000)),
    "short": "a few words",
    "nothing": "",
}


def made(blanks: Any, decoder: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = blanks, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )
    core.train_from_iterator([TEXTS["words"], "ababab" * 50], trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "bytes": made(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    # As SentencePiece: a blank is put before a text, and so before every piece.
    "metaspace": made(pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()),
    "no words at all": made(pre_tokenizers.Split("\0", "isolated"), decoders.Fuse()),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_give_the_ids_of_the_whole(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE", 700)
    monkeypatch.setattr(encoding, "OVERLAP", 90)
    tokenizer, content = TOKENIZERS[name], TEXTS[text]
    whole = tokenizer(content)["input_ids"]
    for most in (10**6, 500, 3):
        assert encode(tokenizer, content, most) == array("i", whole[:most])


def test_a_long_text_is_not_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE", 700)
    monkeypatch.setattr(encoding, "OVERLAP", 90)
    seen: list[int] = []

    class Watched:
        is_fast = True

        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return TOKENIZERS["bytes"](text, **options)

    encode(Watched(), TEXTS["words"], 400)
    assert max(seen) == 790 and sum(seen) < len(TEXTS["words"]) / 2, "no more is read than is wanted"
