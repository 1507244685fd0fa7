"""Tasks of your own: a file of records, with a template and a metric if it needs them, or a YAML file that says it all.

Records with the fields `context`, `question`, `answers`, `metric` and `max_new_tokens` are what every suite comes to,
see `Sample`, and need no template.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..metrics.library import is_library_metric
from ..metrics.score import METRICS
from ..options.base import File
from ..options.evaluate import TaskFileOptions
from ..options.files import read_text
from ..options.run_file import read_mapping, validated
from .file_task import FileTask
from .records import COUNT_OR_NULL, IDENTITY, OBJECT, POSITIVE, TEXT, TEXTS, TEXTS_OR_NULL, TRUTH, Kind, Record, checked
from .sample import Sample
from .sources import DATASETS, own_dataset

if TYPE_CHECKING:
    from jinja2 import Template

#: In a template: what stands before is compressed, what stands after is the question.
SPLIT = "|||"
_ANSWERS = ("answers", "answer", "outputs", "output", "target")
_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_QUESTION = "|||\n\nQuestion: {{ question }}\nAnswer:"
#: Templates for records with these fields, and the metric that goes with each.
_USUAL = {
    ("ctxs", "question"): (
        "Answer the question from these documents; most of them have nothing to do with it.\n\n"
        "{% for each in ctxs %}Document [{{ loop.index }}] (Title: {{ each.title }}) {{ each.text }}\n{% endfor %}"
        + _QUESTION,
        "string_match_part",
    ),
    ("context", "question"): ("{{ context }}" + _QUESTION, "qa_f1"),
    ("context", "input"): ("{{ context }}" + _QUESTION.replace("question", "input"), "qa_f1"),
}
#: The record that every suite is turned into, and what it may have besides.
SCHEMA: dict[str, Kind] = {
    "context": TEXT,
    "question": TEXT,
    "answers": TEXTS,
    "metric": TEXT,
    "max_new_tokens": POSITIVE,
}
OPTIONAL: dict[str, Kind] = {
    **{"id": IDENTITY, "all_classes": TEXTS_OR_NULL, "length": COUNT_OR_NULL, "metadata": OBJECT},
    **dict.fromkeys(("chat", "stop_at_newline", "first_line"), TRUTH),
    **dict.fromkeys(("cue", "system"), TEXT),
}


class TaskFile(TaskFileOptions):
    """What makes samples of records: options, and what a YAML file may say besides.

    Attributes:
        name: what `--tasks`, rows and tables call the task.
        data: the file of records: JSON lines, a JSON list, CSV or Parquet, perhaps gzipped. Or a dataset,
            `datasets:ID`, on the Hub or in a folder, see `place_of_dataset`.
    """

    name: str
    data: File
    chat: bool = True
    stop_at_newline: bool = False
    first_line: bool = False

    def convert(self, record: Record, index: int, where: str) -> Sample:
        """The sample of a record.

        Raises:
            UserError: it has not what the template or the metric needs.
        """
        identity = f"{self.name}/{index}"
        if self.template is None and record.keys() >= SCHEMA.keys():
            return self._as_it_is(record, identity, where)
        template, usual = (self.template, "qa_f1") if self.template is not None else _usual(where, record)
        context, _, question = template.partition(SPLIT)
        return Sample(
            id=identity,
            task=self.name,
            context=_render(where, context, record),
            question=_render(where, question, record),
            answers=_answers(where, record, self.answers),
            max_new_tokens=self.max_new_tokens or 64,
            metric=self.metric or usual,
            all_classes=_classes(where, record, self.metric),
            chat=self.chat,
            stop_at_newline=self.stop_at_newline,
            first_line=self.first_line,
        )

    def _as_it_is(self, record: Record, identity: str, where: str) -> Sample:
        checked((where, record), self.name, SCHEMA, OPTIONAL)
        metric = self.metric or record["metric"]
        _check_metric(where, metric)
        fields = {name: record[name] for name in OPTIONAL if name in record} | {
            "id": str(record.get("id", identity)),
            "answers": tuple(record["answers"]) if self.answers is None else _answers(where, record, self.answers),
            "all_classes": _classes(where, record, metric),
            "max_new_tokens": self.max_new_tokens or record["max_new_tokens"],
        }
        return Sample(task=self.name, context=record["context"], question=record["question"], metric=metric, **fields)


def read_task(path: Path, options: TaskFileOptions) -> FileTask:
    """The task of a file; options count more than what a YAML file says.

    Raises:
        UserError: there is no such file, or what it says cannot be used.
    """
    if not path.is_file() and not own_dataset(path):
        raise UserError(f"--task-file {path}: no such file; a dataset is written {DATASETS}ID")
    typed = {name: value for name, value in options.common(TaskFileOptions).items() if value is not None}
    if template := typed.get("template"):
        is_file = template.startswith("@")
        typed["template"] = read_text("--template", Path(template[1:])) if is_file else template.replace("\\n", "\n")
    task = _from_yaml(path) if path.suffix in (".yaml", ".yml") else TaskFile(name=_name_of(path), data=path)
    task = task.but(**typed)
    if not task.name or task.name != Path(task.name).name or "\\" in task.name:
        raise UserError(f"{path}: the task cannot be called {task.name!r}: give it a name without slashes")
    if task.template is not None and not task.template.replace(SPLIT, "").strip():
        raise UserError(f"{path}: the template is empty, so every prompt would be")
    if task.template is not None and task.template.count(SPLIT) > 1:
        raise UserError(
            f"{path}: the template has {SPLIT} more than once; what stands before it is compressed, what stands "
            "after it is the question"
        )
    if task.metric is not None:
        _check_metric(str(path), task.metric, also=is_library_metric)
    if not own_dataset(task.data) and not task.data.name.removesuffix(".gz").endswith(_FORMATS):
        raise UserError(f"{task.data}: records are .jsonl, .json, .csv or .parquet, perhaps with .gz behind")
    return FileTask(
        name=task.name,
        description=f"Of a plugin: {path}.",
        convert=task.convert,
        prompt=task.template or "",
        own=task.data,
        metric=task.metric,
    )


#: Files with tasks that `--tasks` may name, by the name of the task.
REGISTERED: dict[str, Path] = {}


def register_task_file(path: str | Path) -> None:
    """Make the task of a file one that `--tasks` may name; for a module of `--plugin`.

    Args:
        path: as of `--task-file`: records, or a YAML file that says all of it.

    Raises:
        UserError: there is no such file, or a file of another task has the name.
    """
    place = Path(path) if own_dataset(Path(path)) else Path(path).resolve()
    name = read_task(place, TaskFileOptions()).name
    if REGISTERED.setdefault(name, place) != place:
        raise UserError(f"{path}: the task {name!r} is registered from {REGISTERED[name]} already")


def _from_yaml(path: Path) -> TaskFile:
    content = read_mapping("--task-file", path, TaskFile.model_fields)
    if "data" not in content:
        raise UserError(f"{path} has no `data:`, the file of records; it may have {', '.join(TaskFile.model_fields)}")
    task = validated(path, TaskFile, {"name": path.stem, **content})
    if own_dataset(task.data):
        return task
    if not (data := path.parent / task.data).is_file():
        raise UserError(f"{path}: data: no such file: {data}")
    return task.but(data=data)


def _name_of(path: Path) -> str:
    """What a task is called: the file without its endings, or the last part of a dataset's name."""
    dataset = own_dataset(path)
    return Path(dataset.name if dataset else path).name.partition(".")[0]


def _check_metric(where: str, metric: str, also: Callable[[str], bool] = lambda metric: False) -> None:
    if metric not in METRICS and not also(metric):
        raise UserError(
            f"{where}: unknown metric {metric!r}; choose from {', '.join(METRICS)}, or write evaluate:NAME (--metric)"
        )


def _usual(where: str, record: Record) -> tuple[str, str]:
    for fields, template_and_metric in _USUAL.items():
        if record.keys() >= set(fields):
            return template_and_metric
    raise UserError(
        f"{where} has the fields {', '.join(record)}: say how a prompt is made of them, for example --template "
        f"'{{{{ context }}}}{SPLIT}Question: {{{{ question }}}}'"
    )


def _render(where: str, template: str, record: Record) -> str:
    import jinja2

    try:
        text = _compiled(template).render(record)
        text.encode()  # half of a surrogate pair is no text to any tokenizer
        return text
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not Unicode ({error.reason} at character {error.start} of the prompt)") from error
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the template cannot be read, line {error.lineno}: {error.message}") from error
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


def _classes(where: str, record: Record, metric: str | None) -> tuple[str, ...] | None:
    classes = record.get("all_classes")
    if metric == "classification" and not (classes and isinstance(classes, list)):
        raise UserError(f"{where} has no all_classes, the list of all classes, which classification needs")
    return tuple(classes) if classes else None


def _answers(where: str, record: Record, field: str | None) -> tuple[str, ...]:
    names = _ANSWERS if field is None else (field,)
    name = next((key for key in names if record.get(key) is not None), None)
    if name is None:
        raise UserError(f"{where} has no {' or '.join(names)}; its fields are {', '.join(record)} (--answers FIELD)")
    values = record[name] if isinstance(record[name], list) else [record[name]]
    if not values or not all(isinstance(value, str | int | float) for value in values):
        raise UserError(f"{where}: {name!r} must be a text or a list of texts")
    return tuple(map(str, values))
