"""MATH-500 (Lightman et al. 2023, arXiv 2305.20050) and AIME 2025: long answers to short questions.

What is evicted here is the model's own reasoning, so these tasks say what a budget costs while decoding. Neither has an
official prompt. Ours is the problem and one line that asks for a boxed answer, as makers of reasoning models recommend;
the answer is compared with the right one by the library `math-verify`. Answers may have 32,768 tokens, or what
`--max-new-tokens` says: an answer that was cut off counts as wrong.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired

from .file_task import FileTask, Hub
from .records import IDENTITY, TEXT, Record, columns_of
from .sample import Sample

INSTRUCTION = "\n\nReason step by step, and put your final answer within \\boxed{}."
_ANSWER = Annotated[TEXT, Field(pattern=r"\S")] | int
_MORE = {"unique_id": NotRequired[IDENTITY], "subject": NotRequired[TEXT], "level": NotRequired[TEXT | float]}


def _convert(task: str, column: str, record: Record, index: int, where: str) -> Sample:
    return Sample(
        id=f"{task}/{record.get('unique_id', index)}",
        task=task,
        context=record[column],
        question=INSTRUCTION,
        answers=(str(record["answer"]),),
        max_new_tokens=32_768,
        metadata={name: record[name] for name in ("subject", "level") if name in record},
        metric="math_verify",
        chat=True,
    )


def _task(name: str, column: str, **more: Any) -> FileTask:
    return FileTask(
        name=name,
        columns=columns_of(name, {column: TEXT, "answer": _ANSWER, **_MORE}),
        prompt=INSTRUCTION,
        convert=partial(_convert, name, column),
        **more,
    )


TASKS = (
    _task(
        "math500",
        "problem",
        description="MATH-500: 500 problems, long answers; what a budget costs while decoding.",
        files=("math500.jsonl", "MATH-500/test.jsonl", "test.jsonl"),
        hub=Hub(("HuggingFaceH4/MATH-500",), ("test.jsonl",), "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"),
        without="get test.jsonl of the dataset HuggingFaceH4/MATH-500 and put it into --data-dir as math500.jsonl",
    ),
    _task(
        "aime2025",
        "question",
        description="AIME 2025: 30 problems, very long answers; what a budget costs while decoding.",
        files=("aime2025.jsonl", "aime25.jsonl"),
        hub=Hub(
            ("opencompass/AIME2025",),
            ("aime2025-I.jsonl", "aime2025-II.jsonl"),
            "a6ad95f611d72cf628a80b58bd0432ef6638f958",
        ),
        without="get both files of the dataset opencompass/AIME2025 and put them, one after the other, into --data-dir "
        "as aime2025.jsonl",
    ),
)
