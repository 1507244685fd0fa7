"""Lines of LongEval (Li et al. 2023), from the authors' own files: `evaluation/lines/testcases/N_lines.jsonl` of
https://github.com/DachengLi1/LongChat.

Prompt, 100 tokens to answer and score (the last whole number counts) are theirs. The task `longeval`, which needs no
files, imitates it. The topics of the same authors are judged by a model there, and are left out.
"""

from __future__ import annotations

from functools import partial

from .file_task import FileTask
from .records import COUNT, TEXT, Record
from .sample import Sample

_QUESTION = "Now the record is over."


def _convert(name: str, record: Record, index: int, where: str) -> Sample:
    context, mark, question = record["prompt"].rpartition(_QUESTION)
    if not mark:
        raise ValueError(f"its prompt has no {_QUESTION!r}")
    return Sample(
        id=f"{name}/{index}",
        task=name,
        context=context,
        question=mark + question,
        answers=(str(record["expected_number"]),),
        max_new_tokens=100,
        metadata={"lines": record["num_lines"]} if "num_lines" in record else {},
        metric="longeval",
        chat=True,
    )


TASKS = tuple(
    FileTask(
        name=f"longeval_{lines}_lines",
        description=f"LongEval: the number in one of {lines} lines, the authors' own records.",
        files=(f"{lines}_lines.jsonl", f"lines/testcases/{lines}_lines.jsonl"),
        without="get evaluation/lines/testcases of https://github.com/DachengLi1/LongChat, and give that folder as "
        "--data-dir",
        columns={"prompt": TEXT, "expected_number": COUNT},
        optional={"num_lines": COUNT},
        convert=partial(_convert, f"longeval_{lines}_lines"),
    )
    for lines in (200, 300, 400, 500, 600, 680)
)
