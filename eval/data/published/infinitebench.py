"""InfiniteBench (Zhang et al. 2024, arXiv 2402.13718): 12 tasks over texts of 100,000 tokens and more.

Prompts and lengths of answers are the official tables for open models (`yarn-mistral`), shipped unchanged next to this
module (see NOTICE); such prompts are not put into a chat template. Answers are scored as by the official
`compute_scores.py`, with two differences: a number like 3.5 where a whole one is asked is wrong there by an exception,
here by a score of 0; and the first number of `math_calc` counts, which the official script skips for GPT-4 only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...metrics.infinitebench import OF_ONE
from ...tasks import Sample
from ..longbench.records import IDENTITY, TEXT, TEXTS, Kind, Record, shown
from .task import Hub, PublishedTask

_TABLE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "infinitebench.json").read_text("utf-8"))
_CHOICES = ("code_debug", "longbook_choice_eng")


def _is_value(value: Any) -> bool:
    return TEXT.accepts(value) or _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _one_or_several(what: str, accepts: Callable[[Any], bool]) -> Kind:
    return Kind(
        f"{what} or a list of such, at least one",
        lambda value: all(map(accepts, value)) and bool(value) if isinstance(value, list) else accepts(value),
    )


_WHOLE = _one_or_several("a whole number", _is_whole)
#: What the answers of a task are, where they are not texts or numbers of any kind.
_ANSWERS = {
    "math_find": _one_or_several("a number", _is_number),
    "code_run": _WHOLE,
    "math_calc": Kind(
        "a list of whole numbers, at least one, or a list of such lists",
        lambda value: (
            isinstance(value, list)
            and bool(value)
            and (_WHOLE.accepts(value) or all(isinstance(each, list) and _WHOLE.accepts(each) for each in value))
        ),
    ),
}
_OPTIONS = Kind("a list of four texts", lambda value: TEXTS.accepts(value) and len(value) == 4)
_REVISION = "90f0394333616266d9fe85824ceaf505093cbaa5"
#: Task -> metric.
_METRICS = {
    "passkey": "first_number",
    "number_string": "first_number",
    "kv_retrieval": "word_match",
    "longbook_sum_eng": "rouge_lsum",
    "longbook_choice_eng": "letter_or_text",
    "longbook_qa_eng": "qa_f1",
    "longbook_qa_chn": "character_f1_zh",
    "longdialogue_qa_eng": "name_match",
    "math_find": "number_found",
    "math_calc": "numbers_in_order",
    "code_run": "last_number",
    "code_debug": "letter_or_function",
}
_CALL = re.compile(r"func_[0-9]+\(-?[0-9]+\)")
_TARGET = re.compile(r"The .+ of")


def _sample(name: str, record: Record, index: int) -> Sample:
    before, _, after = _TABLE[name]["prompt"].partition("{context}")
    places = _places(name, record)
    return Sample(
        id=f"infinite_{name}/{record.get('id', index)}",
        task=f"infinite_{name}",
        context=before.format(**places) + record["context"],
        question=after.format(**places),
        answers=_answers(name, record),
        max_new_tokens=_TABLE[name]["max_new_tokens"],
        metric=_METRICS[name],
    )


def _places(name: str, record: Record) -> dict[str, str]:
    """What the template has gaps for, besides the context."""
    asked = record["input"]
    places = {"input": asked, "question": asked}
    if name in _CHOICES:
        places |= {f"OPTION_{letter}": option for letter, option in zip("ABCD", record["options"], strict=True)}
    if name == "code_run":
        call = _found(_CALL, asked)
        places |= {"func_call": call, "func": call.partition("(")[0]}
    if name == "math_find":
        target = _found(_TARGET, asked).lower()[: -len(" of")]
        places["prefix"] = f"What is {target} in the following list?"
    return places


def _found(pattern: re.Pattern[str], asked: str) -> str:
    match = pattern.search(asked)
    if match is None:
        raise ValueError(f"{asked!r:.60} in 'input' does not say what is asked")
    return match.group()


def _answers(name: str, record: Record) -> tuple[str, ...]:
    answer = record["answer"]
    if name in _CHOICES:
        text, *letter = answer if isinstance(answer, list) else [answer]
        if text not in record["options"] or letter not in ([], *([each] for each in "ABCD")):
            raise ValueError(f"the answer {shown(answer)} is none of the options {shown(record['options'])}")
        return (text, *(letter or "ABCD"[record["options"].index(text)]))
    if name == "math_calc" and isinstance(answer[0], list):
        answer = answer[0]
    given = answer if isinstance(answer, list) else [answer]
    # Officially only the first counts there: a name, a number, a key.
    return tuple(map(str, given[:1] if _METRICS[name] in OF_ONE else given))


TASKS = tuple(
    PublishedTask(
        name=f"infinite_{name}",
        description=f"InfiniteBench, {name}: texts of 100,000 tokens and more, {metric}.",
        files=(f"{name}.jsonl",),
        hub=Hub(("xinrongzhang2022/InfiniteBench",), (f"{name}.jsonl",), _REVISION),
        without=f"get {name}.jsonl of the dataset xinrongzhang2022/InfiniteBench and give --data-dir its folder",
        columns={
            "context": TEXT,
            "input": TEXT,
            "answer": _ANSWERS.get(name, _one_or_several("a text or a number", _is_value)),
        }
        | ({"options": _OPTIONS} if name in _CHOICES else {}),
        optional={"id": IDENTITY},
        prompt=_TABLE[name]["prompt"],
        sample=partial(_sample, name),
    )
    for name, metric in _METRICS.items()
)
