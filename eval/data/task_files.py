"""Tasks of your own: a file of records or a dataset, and options that say how a prompt is made and scored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..metrics.library import is_library_metric
from ..metrics.score import METRICS
from ..options.evaluate import TaskFileOptions
from ..options.files import read_text
from .file_task import FileTask
from .records import Record
from .sample import Sample
from .sources import DATASETS, place_of_dataset

#: In a template: what stands before is compressed, what stands after is the question.
SPLIT = "|||"
#: Of records with a context and a question, which need no other.
_USUAL = "{{ context }}" + SPLIT + "\n\nQuestion: {{ question if question is defined else input }}\nAnswer:"
_EXAMPLE = f"--template '{{{{ context }}}}{SPLIT}Question: {{{{ question }}}}'"
_ANSWERS = ("answers", "answer", "outputs", "output", "target")
Parts = tuple[Callable[[Record], str], Callable[[Record], str]]
_FORMATS = (".jsonl", ".json", ".csv", ".parquet")


def read_task(path: Path, options: TaskFileOptions) -> FileTask:
    """The task of a file of records (JSON lines, a JSON list, CSV or Parquet, perhaps gzipped) or of `datasets:ID`.

    Raises:
        UserError: there is no such file, or the options cannot be used.
    """
    own = str(path)
    if own.startswith(DATASETS):
        path = Path(place_of_dataset(own).name)
    elif not path.is_file():
        raise UserError(f"--task-file {path}: no such file; a dataset is written {DATASETS}ID")
    elif not path.name.removesuffix(".gz").endswith(_FORMATS):
        raise UserError(f"{path}: records are .jsonl, .json, .csv or .parquet, perhaps with .gz behind")
    if (metric := options.metric) not in (None, *METRICS) and not is_library_metric(metric):
        raise UserError(f"unknown metric {metric!r} (--metric); choose from {', '.join(METRICS)}, or evaluate:NAME")
    template, name = options.template, path.name.partition(".")[0]
    if template and template.startswith("@"):
        template = read_text("--template", Path(template[1:]))
    elif template:
        template = template.replace("\\n", "\n")
    convert = partial(_sample, name, options, _parts(_USUAL if template is None else template))
    description = f"Records of your own: {own}."
    return FileTask(name, description, convert, prompt=template or "", own=own, metric=metric)


def _parts(template: str) -> Parts:
    """What makes the context, and the question.

    Raises:
        UserError: it is no template.
    """
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if not template.replace(SPLIT, "").strip():
        raise UserError("--template is empty, so every prompt would be")
    if template.count(SPLIT) > 1:
        raise UserError(f"--template has {SPLIT} more than once: the context stands before it, the question after it")
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    context, _, question = template.partition(SPLIT)
    try:
        return environment.from_string(context).render, environment.from_string(question).render
    except Exception as error:  # whatever its compiler raises
        raise UserError(f"--template: {type(error).__name__}: {error}") from error


def _sample(name: str, options: TaskFileOptions, parts: Parts, record: Record, index: int, where: str) -> Sample:
    """The sample of a record.

    Raises:
        UserError: it has not what the template or the metric needs.
    """
    classes = record.get("all_classes")
    if options.metric == "classification" and not (classes and isinstance(classes, list)):
        raise UserError(f"{where} has no all_classes, the list of all classes, which classification needs")
    try:
        # A field that is null is not there, so that no template prints "None".
        fields = {field: value for field, value in record.items() if value is not None}
        context, question = (part(fields) for part in parts)
        (context + question).encode()  # half of a surrogate pair is no text to any tokenizer
    except Exception as error:  # a template is a program: it may fail in any way
        hint = "" if options.template else f"; say how a prompt is made of them, for example {_EXAMPLE}"
        why = f"{type(error).__name__}: {error}; its fields are {', '.join(record)}{hint}"
        raise UserError(f"{where}: the template fails: {why}") from error
    return Sample(
        id=f"{name}/{index}",
        task=name,
        context=context,
        question=question,
        answers=_answers(where, record, options.answers),
        max_new_tokens=options.max_new_tokens or 64,
        metric=options.metric or "qa_f1",
        all_classes=tuple(classes) if classes else None,
        chat=True,
    )


def _answers(where: str, record: Record, field: str | None) -> tuple[str, ...]:
    names = _ANSWERS if field is None else (field,)
    name = next((key for key in names if record.get(key) is not None), None)
    if name is None:
        raise UserError(f"{where} has no {' or '.join(names)}; its fields are {', '.join(record)} (--answers FIELD)")
    values: list[Any] = record[name] if isinstance(record[name], list) else [record[name]]
    if not values or not all(isinstance(value, str | int | float) for value in values):
        raise UserError(f"{where}: {name!r} must be a text or a list of texts")
    return tuple(map(str, values))
