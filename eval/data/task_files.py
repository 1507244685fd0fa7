"""Tasks of your own: a file of records or a dataset, and options that say how a prompt is made and scored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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
_ANSWERS = ("answers", "answer", "outputs", "output", "target")
_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
#: Names of the field that asks, in records that have a field `context` and need no template.
_QUESTIONS = ("question", "input")


@dataclass(frozen=True)
class _Converter:
    """What makes samples of records."""

    name: str
    options: TaskFileOptions

    def __call__(self, record: Record, index: int, where: str) -> Sample:
        """The sample of a record.

        Raises:
            UserError: it has not what the template or the metric needs.
        """
        options = self.options
        context, _, question = (options.template or _usual(where, record)).partition(SPLIT)
        classes = record.get("all_classes")
        if options.metric == "classification" and not (classes and isinstance(classes, list)):
            raise UserError(f"{where} has no all_classes, the list of all classes, which classification needs")
        return Sample(
            id=f"{self.name}/{index}",
            task=self.name,
            context=_render(where, context, record),
            question=_render(where, question, record),
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
    options = options.but(template=_template(options.template))
    if (metric := options.metric) not in (None, *METRICS) and not is_library_metric(metric):
        raise UserError(f"unknown metric {metric!r} (--metric); choose from {', '.join(METRICS)}, or evaluate:NAME")
    name = Path(dataset.name if dataset else path).name.partition(".")[0]
    return FileTask(
        name=name,
        description=f"Records of your own: {path}.",
        convert=_Converter(name, options),
        prompt=options.template or "",
        own=path,
        metric=metric,
    )


def _template(typed: str | None) -> str | None:
    """What was typed, or what the file says that it names."""
    if typed is None:
        return None
    text = read_text("--template", Path(typed[1:])) if typed.startswith("@") else typed.replace("\\n", "\n")
    if not text.replace(SPLIT, "").strip():
        raise UserError("--template is empty, so every prompt would be")
    if text.count(SPLIT) > 1:
        raise UserError(
            f"--template has {SPLIT} more than once; what stands before it is compressed, what stands after it is the "
            "question"
        )
    return text


def _usual(where: str, record: Record) -> str:
    """The template of a record with a context and a question."""
    asks = next((name for name in _QUESTIONS if name in record), None)
    if "context" not in record or asks is None:
        raise UserError(
            f"{where} has the fields {', '.join(record)}: say how a prompt is made of them, for example --template "
            f"'{{{{ context }}}}{SPLIT}Question: {{{{ question }}}}'"
        )
    return f"{{{{ context }}}}{SPLIT}\n\nQuestion: {{{{ {asks} }}}}\nAnswer:"


def _render(where: str, template: str, record: Record) -> str:
    import jinja2

    try:
        text = _compiled(template).render(record)
        text.encode()  # half of a surrogate pair is no text to any tokenizer
        return text
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not Unicode ({error.reason} at character {error.start} of the prompt)") from error
    except Exception as error:  # a template is a program: it may fail in any way
        what = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{where}: the template fails: {what}; its fields are {', '.join(record)}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_shown)
    return environment.from_string(template)


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
