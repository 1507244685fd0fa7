"""A model that is one GGUF file, as a folder that every command reads."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
from transformers.utils import is_gguf_available

#: What a file says of its tokenizer, in this order.
_READ = tuple(f"tokenizer.ggml.{key}" for key in ("bos_token_id", "eos_token_id", "add_bos_token", "token_type"))
#: What a word begins with where it stands behind a space, in vocabularies of SentencePiece and of bytes.
_SPACES = ("\u2581", "\u0120")
_LETTERS = re.compile("[A-Za-z]+")
#: So many words show whether a tokenizer cuts text as the file says.
_WORDS = 500


class FileError(Exception):
    """A file that cannot be converted; the message says what to do."""


def check_reader() -> None:
    """Raise FileError unless the package is there, in a version that transformers takes, that reads these files."""
    if not is_gguf_available():
        raise FileError("the package gguf is needed to read a GGUF file: pip install 'hf_paged_eviction[gguf]'")


def convert(file: Path) -> Path:
    """The folder beside a GGUF file with its weights in float32, configuration and tokenizer; written unless there.

    Dequantised weights do not fit into 16 bits exactly. The copy has the digest of the file's weights.

    Raises:
        FileError: there is no such file, the package that reads it is missing, or transformers reads it wrongly.
    """
    folder = file.with_suffix("")
    if folder.exists():
        return folder
    if not file.is_file():
        raise FileError(f"{file}: there is no such file")
    check_reader()
    place, named = str(file.parent), {"gguf_file": file.name}
    try:
        tokenizer = mend_tokenizer(AutoTokenizer.from_pretrained(place, **named), str(file))
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **named)
    except (OSError, ValueError, KeyError) as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    forget_quantisation(model)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        for part in (model, tokenizer):
            part.save_pretrained(Path(scratch) / folder.name)
        (Path(scratch) / folder.name).rename(folder)
    return folder


def mend_tokenizer(tokenizer: Any, name: str) -> Any:
    """Mend the tokenizer that transformers has read from a GGUF file.

    Releases before 5.23 may take a wrong token for the end, or add or omit the first one: that is mended. Releases
    before 5.19 also lose the merges of a SentencePiece vocabulary: that is refused.

    Args:
        name: of the file.

    Raises:
        FileError: it cuts words that the vocabulary has.
    """
    from gguf import GGUFReader, TokenType

    fields = {key: field.contents() for key, field in GGUFReader(name).fields.items() if key in _READ}
    begins, ends, first, kinds = (fields.get(key) for key in _READ)
    for role, token in (("bos_token", begins), ("eos_token", ends)):
        if token is not None and getattr(tokenizer, f"{role}_id") != token:
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(token))
    if None not in (first, begins) and (tokenizer("a").input_ids[0] == begins) != first:
        tokenizer.add_bos_token = first
    cut, of = _cut_words(tokenizer, [token for token, kind in enumerate(kinds or ()) if kind == TokenType.NORMAL])
    if 10 * cut > of:
        raise FileError(
            f"transformers {__version__} reads the tokenizer of {name!r} wrongly: it splits {cut} of {of} words of the "
            "vocabulary into pieces that the model was not trained on. Install transformers 5.19 or "
            "later."
        )
    return tokenizer


def _cut_words(tokenizer: Any, ordinary: Sequence[int]) -> tuple[int, int]:
    """How many of some words are not one token any more, whether a space comes first or not; and how many these are."""
    named = zip(ordinary, tokenizer.convert_ids_to_tokens(ordinary), strict=True)
    words = [(token, word[1:]) for token, word in named if word.startswith(_SPACES) and _LETTERS.fullmatch(word[1:])]
    words = words[:: max(1, len(words) // _WORDS)]
    cut = {token for token, _ in words}
    for space in ("", " ") if words else ():
        encoded = tokenizer([space + word for _, word in words], add_special_tokens=False).input_ids
        cut -= {token for ids, (token, _) in zip(encoded, words, strict=True) if ids == [token]}
    return len(cut), len(words)


def forget_quantisation(model: Any) -> None:
    """Make a model that was read from such a file an ordinary one: its weights are, and it can then be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    if hasattr(model, "quantization_method"):
        del model.quantization_method
