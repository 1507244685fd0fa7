"""Chinese text cut into words, and F1 of Chinese answers."""

from __future__ import annotations

import logging
import string
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from .extra import import_extra
from .longbench import f1

# What LongBench ignores: ASCII punctuation and these. Not all there is: 《, 〈, 〉 and · count as words.
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"  # noqa: RUF001
    "〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"  # noqa: RUF001
)
NO_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def cut(text: str) -> list[str]:
    """Words, punctuation and blanks of a text in order, as jieba's default mode cuts it.

    Raises:
        UserError: jieba is not installed.
    """
    return list(_tokenizer().cut(text))


@cache
def _tokenizer() -> Any:
    jieba = import_extra("jieba", "zh", "scores of Chinese tasks")
    # It reports on the standard error that it loads its dictionary, and prints a traceback where it cannot cache it.
    jieba.setLogLevel(logging.CRITICAL + 1)
    # One of its own: words that a program adds to jieba's shared dictionary must not change scores.
    tokenizer = jieba.Tokenizer()
    # It would read what lies under a known name in the folder for temporary files, whoever put it there.
    with TemporaryDirectory() as own:
        tokenizer.tmp_dir = own
        tokenizer.initialize()
    return tokenizer


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 of the words, 0 to 1; case, punctuation and blanks do not count.

    Raises:
        UserError: jieba is not installed.
    """
    return f1(_words(prediction), _words(answer))


def _words(text: str) -> list[str]:
    bare = ("".join(word.lower().translate(NO_PUNCTUATION).split()) for word in cut(text))
    return [word for word in bare if word]
