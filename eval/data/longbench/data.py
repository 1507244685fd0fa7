"""The samples of a task from wherever its records are, and digests of what they were made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from ...errors import UserError
from ...options.settings import TaskSettings
from ...tasks import Sample
from . import v2
from .hub import download
from .records import (
    COUNT,
    TEXT,
    TEXTS,
    TEXTS_OR_NULL,
    Kind,
    Located,
    Record,
    check,
    parse,
    texts_like,
)
from .sources import Source, dataset_rows, local_source, zip_source
from .tasks import TASKS, LongBenchTask

REPOSITORIES = ("zai-org/LongBench", "THUDM/LongBench")
ARCHIVE = "data.zip"
REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"

#: Of the official files that were at hand.
SHA256 = {
    "multi_news": "f8817c00af317c2d7f81128f334bcfe5780c6c2a515d5c96811aa0ddf8b5ee6b",
    "multifieldqa_zh": "e5b4fd1a437c53c1c9e4e31eda7a259110b06d14be79c3ec455008c11fb9fab5",
    "passage_retrieval_zh": "d71c1f71f9fee4c2108f822e9c58ac3cef94db47902c40ddfe168ecb5aab3cc0",
}

COLUMNS: dict[str, Kind] = {
    "_id": TEXT,
    "input": TEXT,
    "context": TEXT,
    "answers": TEXTS,
    "length": COUNT,
    "all_classes": TEXTS_OR_NULL,
}
#: Where a metric can do less than that.
_NARROWER: dict[str, dict[str, Kind]] = {
    "classification": {"all_classes": TEXTS},
    "retrieval": {"answers": texts_like("Paragraph 7", r"Paragraph \d")},
    "retrieval_zh": {"answers": texts_like("段落7", r"段落\d")},
}
#: In the official files too, but nothing here depends on them.
OPTIONAL: dict[str, Kind] = {"dataset": TEXT, "language": TEXT}


def load_samples(task: str, settings: TaskSettings) -> list[Sample]:
    """The first `settings.limit` samples of a task (None: all), in the order of its file.

    Raises:
        UserError: the data cannot be found, or a record of it is not one.
    """
    records = load_records(task, settings)[: settings.limit]
    if task == v2.NAME:
        return [v2.to_sample(record) for record in records]
    return [to_sample(TASKS[task], record) for record in records]


def load_records(task: str, settings: TaskSettings) -> list[Record]:
    """All records of a task, checked."""
    values: Iterable[Located]
    if _named_dataset(settings):
        rows = _rows(task, settings)
        values = ((f"{settings.dataset}, {task}, row {number}", row) for number, row in enumerate(rows, 1))
    else:
        values = parse(_source(task, settings))
    if task == v2.NAME:
        return check(values, v2.COLUMNS)
    return check(values, COLUMNS | _NARROWER.get(TASKS[task].metric, {}), OPTIONAL)


def data_note(task: str, settings: TaskSettings) -> str | None:
    """What tells the records of a task from the official ones; None for those, and where nothing can tell.

    Raises:
        UserError: they say themselves that they are of another task.
    """
    records = load_records(task, settings)
    official = v2.SAMPLES if task == v2.NAME else TASKS[task].samples
    if task != v2.NAME:
        said = sorted({str(record["dataset"]) for record in records if record.get("dataset")})
        if wrong := [name for name in said if name not in (task, TASKS[task].base)]:
            where = settings.data_dir or settings.dataset
            raise UserError(
                f"{task}: the records in {where} say that they are of {wrong[0]!r}; give the file its own name, or "
                "read it by --task-file"
            )
    if len(records) != official:
        return f"{task}: {len(records)} records, the official file has {official}: not a score of LongBench's {task}"
    digest = SHA256.get(task)
    if digest is not None and not _named_dataset(settings) and data_digest(task, settings) != digest:
        return f"{task}: as many records as the official file, and others: not a score of LongBench's {task}"
    return None


def data_digest(task: str, settings: TaskSettings) -> str:
    """SHA-256 of the file that a task is read from; of its rows as JSON for a dataset that was named."""
    if _named_dataset(settings):
        rows = json.dumps(_rows(task, settings), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(rows.encode("utf-8", "surrogatepass")).hexdigest()
    return _source(task, settings).sha256


def prompt_digest(task: str) -> str:
    """SHA-256 of the template of a task."""
    return hashlib.sha256((v2.PROMPT if task == v2.NAME else TASKS[task].prompt).encode()).hexdigest()


def to_sample(task: LongBenchTask, record: Record) -> Sample:
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


def _named_dataset(settings: TaskSettings) -> bool:
    if settings.data_dir is not None and settings.dataset is not None:
        raise UserError("--data-dir and --dataset both say where the records are: give one of them")
    return settings.dataset is not None and settings.dataset not in (*REPOSITORIES, *v2.REPOSITORIES)


def _rows(task: str, settings: TaskSettings) -> Sequence[Record]:
    config, split = (None, "train") if task == v2.NAME else (task, "test")
    return dataset_rows(str(settings.dataset), config, split, settings.dataset_revision)


def _source(task: str, settings: TaskSettings) -> Source:
    names = v2.FILES if task == v2.NAME else (f"{task}.jsonl",)
    if settings.data_dir is not None:
        return local_source(settings.data_dir, names)
    revision = settings.dataset_revision
    if task == v2.NAME:
        path = download(v2.REPOSITORIES, v2.HUB_FILE, revision or v2.REVISION)
        return Source(str(path), path.read_bytes())
    return zip_source(download(REPOSITORIES, ARCHIVE, revision or REVISION), names)
