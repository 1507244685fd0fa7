"""Tasks of your own: a file of records or a dataset, and options that say how a prompt is made and scored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..metrics.library import is_library_metric
from ..metrics.score import METRICS
from ..options.evaluate import TaskFileOptions
from ..options.files import read_text
from .file_task import FileTask
from .records import Record
from .sample import Sample
from .sources import DATASETS, own_dataset

if TYPE_CHECKING:
    from jinja2 import Template

#: In a template: what stands before is compressed, what stands after is the question.
SPLIT = "|||"
#: Of records with a context and a question, which need no other.
_USUAL = "{{ context }}" + SPLIT + "\n\nQuestion: {{ question if question is defined else input }}\nAnswer:"
_EXAMPLE = f"--template '{{{{ context }}}}{SPLIT}Question: {{{{ question }}}}'"
_ANSWERS = ("answers", "answer", "outputs", "output", "target")
_FORMATS = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class _Converter:
    """What makes samples of records, by the two parts of a template."""

    name: str
    options: TaskFileOptions
    context: Template
    question: Template

    def __call__(self, record: Record, index: int, where: str) -> Sample:
        """The sample of a record.

        Raises:
            UserError: it has not what the template or the metric needs.
        """
        options, classes = self.options, record.get("all_classes")
        if options.metric == "classification" and not (classes and isinstance(classes, list)):
            raise UserError(f"{where} has no all_classes, the list of all classes, which classification needs")
        try:
            context, question = self.context.render(record), self.question.render(record)
            (context + question).encode()  # half of a surrogate pair is no text to any tokenizer
        except Exception as error:  # a template is a program: it may fail in any way
            hint = "" if options.template else f"; say how a prompt is made of them, for example {_EXAMPLE}"
            raise UserError(
                f"{where}: the template fails: {_why(error)}; its fields are {', '.join(record)}{hint}"
            ) from error
        return Sample(
            id=f"{self.name}/{index}",
            task=self.name,
            context=context,
            question=question,
            answers=_answers(where, record, options.answers),
            max_new_tokens=options.max_new_tokens or 64,
            metric=options.metric or "qa_f1",
            all_classes=tuple(classes) if classes else None,
            chat=True,
        )


def read_task(path: Path, options: TaskFileOptions) -> FileTask:
    """The task of a file of records (JSON lines, a JSON list, CSV or Parquet, perhaps gzipped) or of `datasets:ID`.

    Raises:
        UserError: there is no such file, or the options cannot be used.
    """
    dataset = own_dataset(path)
    if not path.is_file() and not dataset:
        raise UserError(f"--task-file {path}: no such file; a dataset is written {DATASETS}ID")
    if not dataset and not path.name.removesuffix(".gz").endswith(_FORMATS):
        raise UserError(f"{path}: records are .jsonl, .json, .csv or .parquet, perhaps with .gz behind")
    options = options.but(template=_text(options.template))
    if (metric := options.metric) not in (None, *METRICS) and not is_library_metric(metric):
        raise UserError(f"unknown metric {metric!r} (--metric); choose from {', '.join(METRICS)}, or evaluate:NAME")
    name = Path(dataset.name if dataset else path).name.partition(".")[0]
    return FileTask(
        name=name,
        description=f"Records of your own: {path}.",
        convert=_Converter(name, options, *_parts(_USUAL if options.template is None else options.template)),
        prompt=options.template or "",
        own=path,
        metric=metric,
    )


def _text(typed: str | None) -> str | None:
    """What was typed as a template, or what the file says that it names."""
    if typed is None or not typed.startswith("@"):
        return typed and typed.replace("\\n", "\n")
    return read_text("--template", Path(typed[1:]))


def _parts(template: str) -> tuple[Template, ...]:
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
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_shown)
    context, _, question = template.partition(SPLIT)
    try:
        return environment.from_string(context), environment.from_string(question)
    except Exception as error:  # whatever its compiler raises
        raise UserError(f"--template: {_why(error)}") from error


def _why(error: Exception) -> str:
    name = type(error).__name__
    return str(error) if type(error).__module__.startswith("jinja2") else f"{name}: {error}"


def _shown(value: Any) -> Any:
    """What a template prints."""
    if value is None:
        raise ValueError("a field that it prints is null; write {{ field | default('', true) }} if that may be")
    return value


def _answers(where: str, record: Record, field: str | None) -> tuple[str, ...]:
    names = _ANSWERS if field is None else (field,)
    name = next((key for key in names if record.get(key) is not None), None)
    if name is None:
        raise UserError(f"{where} has no {' or '.join(names)}; its fields are {', '.join(record)} (--answers FIELD)")
    values = record[name] if isinstance(record[name], list) else [record[name]]
    if not values or not all(isinstance(value, str | int | float) for value in values):
        raise UserError(f"{where}: {name!r} must be a text or a list of texts")
    return tuple(map(str, values))
