"""Models that are one GGUF file: transformers reads weights, configuration and tokenizer from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import __version__
from transformers.utils import is_gguf_available

from ..errors import UserError

_SUFFIX = ".gguf"
#: What a file says of its tokenizer, in this order.
_READ = tuple(f"tokenizer.ggml.{key}" for key in ("bos_token_id", "eos_token_id", "add_bos_token", "token_type"))
#: What a word begins with where it stands behind a space, in vocabularies of SentencePiece and of bytes.
_SPACES = ("\u2581", "\u0120")
_LETTERS = re.compile("[A-Za-z]+")
#: So many words show whether a tokenizer cuts text as the file says.
_WORDS = 500


def is_gguf(name: str) -> bool:
    """Whether the name of a model, or of a tokenizer, is that of a GGUF file."""
    return name.lower().endswith(_SUFFIX)


def gguf_arguments(name: str) -> dict[str, Any]:
    """Further arguments of `from_pretrained`; none for a model that is no GGUF file.

    Raises:
        UserError: there is no such file, or the package that reads it is missing.
    """
    if not is_gguf(name):
        return {}
    if not Path(name).is_file():
        raise UserError(f"cannot load {name!r}: there is no such file")
    # One that is missing and one that is too old are the same to transformers.
    if not is_gguf_available():
        raise UserError(f"cannot load {name!r}: gguf is needed: pip install 'hf_paged_eviction[gguf]'")
    return {"gguf_file": Path(name).name}


def mend_tokenizer(tokenizer: Any, name: str) -> Any:
    """Mend the tokenizer that transformers has read from a GGUF file.

    Releases before 5.23 may take a wrong token for the end, or add or omit the first one: that is mended. Releases
    before 5.19 also lose the merges of a SentencePiece vocabulary: that is refused.

    Args:
        name: of the file.

    Raises:
        UserError: it cuts words that the vocabulary has.
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
        raise UserError(
            f"transformers {__version__} reads the tokenizer of {name!r} wrongly: it splits {cut} of {of} words of the "
            "vocabulary into pieces that the model was not trained on. Install transformers 5.19 or "
            "later; or load the tokenizer there (from_pretrained with gguf_file), save_pretrained, --tokenizer FOLDER"
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


def forget_gguf(model: Any) -> None:
    """Make a model that was read from such a file an ordinary one: its weights are, and it can then be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    if hasattr(model, "quantization_method"):
        del model.quantization_method
