"""From the official records of LongBench and LongBench-E to samples."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired

from ..file_task import FileTask, Hub
from ..records import COUNT, TEXT, TEXTS, Record, columns_of
from ..sample import Sample
from .official import differences
from .tasks import TASKS, LongBenchTask

_COLUMNS = {
    "_id": TEXT,
    "input": TEXT,
    "context": TEXT,
    "answers": TEXTS,
    "length": COUNT,
    "all_classes": TEXTS | None,
    "dataset": NotRequired[TEXT],
    "language": NotRequired[TEXT],
}
#: Where a metric can do less than that.
_NARROWER: dict[str, dict[str, Any]] = {
    "classification": {"all_classes": TEXTS},
    "retrieval": {"answers": list[Annotated[TEXT, Field(pattern=r"Paragraph \d")]]},
    "retrieval_zh": {"answers": list[Annotated[TEXT, Field(pattern=r"段落\d")]]},
}
#: Of the official files that were at hand.
_SHA256 = {
    "multi_news": "f8817c00af317c2d7f81128f334bcfe5780c6c2a515d5c96811aa0ddf8b5ee6b",
    "multifieldqa_zh": "e5b4fd1a437c53c1c9e4e31eda7a259110b06d14be79c3ec455008c11fb9fab5",
    "passage_retrieval_zh": "d71c1f71f9fee4c2108f822e9c58ac3cef94db47902c40ddfe168ecb5aab3cc0",
}
_HUB = Hub(("zai-org/LongBench", "THUDM/LongBench"), ("data.zip",), "5e628be450b7e67fb7ae6e201bd6d8f7056f7672")


def to_sample(task: LongBenchTask, record: Record, index: int, where: str) -> Sample:
    """The sample of a record: the filled template, split after the record's context."""
    before, _, after = task.prompt.partition("{context}")
    classes = record["all_classes"]
    return Sample(
        id=record["_id"],
        task=task.name,
        context=before.format(**record) + record["context"],
        question=after.format(**record),
        answers=tuple(record["answers"]),
        max_new_tokens=task.max_new_tokens,
        metric=task.metric,
        all_classes=None if classes is None else tuple(classes),
        length=record["length"],
        chat=task.chat,
        stop_at_newline=task.stop_at_newline,
        first_line=task.first_line,
    )


FILE_TASKS = tuple(
    FileTask(
        name=name,
        description=task.description,
        files=(f"{name}.jsonl",),
        hub=_HUB,
        columns=columns_of(name, _COLUMNS | _NARROWER.get(task.metric, {})),
        prompt=task.prompt,
        official=partial(differences, name, task.samples, _SHA256.get(name), (name, task.base)),
        convert=partial(to_sample, task),
    )
    for name, task in TASKS.items()
)
