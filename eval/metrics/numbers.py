"""Numbers in a prediction."""

from __future__ import annotations

import re
import unicodedata

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PARAGRAPH_ZH = re.compile(r"段落(\d+)")


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the answer, written the same; 0 without a number."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """`count`, for answers like "Paragraph 7".

    Raises:
        ValueError: the answer is not like that.
    """
    return count(prediction, _paragraph(_PARAGRAPH, answer, "Paragraph 7"))


def retrieval_zh(prediction: str, answer: str) -> float:
    """`count`, for answers like "段落7".

    Raises:
        ValueError: the answer is not like that.
    """
    return count(prediction, _paragraph(_PARAGRAPH_ZH, answer, "段落7"))


def _paragraph(pattern: re.Pattern[str], answer: str, example: str) -> str:
    found = pattern.search(answer)
    if found is None:
        raise ValueError(f"answer {answer!r} names no paragraph: an answer of this metric is like {example!r}")
    return found.group(1)


def longeval(prediction: str, answer: str) -> float:
    """1 if the last whole number of the prediction is the answer, else 0 (LongEval, Li et al. 2023).

    Raises:
        ValueError: the answer is not a whole number.
    """
    if not answer.isdecimal():
        raise ValueError(f"answer {answer!r} is not a whole number")
    numbers = _NUMBER.findall(prediction)
    return float(bool(numbers) and _value(numbers[-1]) == _value(answer))


def _value(digits: str) -> str:
    """The number, without leading zeros and in ASCII: `int` refuses long ones."""
    return "".join(str(unicodedata.decimal(digit)) for digit in digits).lstrip("0")
