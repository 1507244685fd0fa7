"""Tasks of your own: a file of records with a template and a metric, or a YAML file that says all of it."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..metrics.library import is_library_metric
from ..metrics.score import METRICS
from ..options.evaluate import TaskFileOptions
from ..options.files import text_or_file
from ..tasks import Sample
from .longbench.records import Record, parse
from .longbench.sources import Source, dataset_rows

if TYPE_CHECKING:
    from jinja2 import Template

#: Before the name of a dataset.
DATASETS = "datasets:"
#: In a template: what stands before is compressed, what stands after is the question.
SPLIT = "|||"
_ANSWERS = ("answers", "answer", "outputs", "output", "target")
_KEYS = ("name", "data", "template", "metric", "max_new_tokens", "answers", "chat", "stop_at_newline", "first_line")
_TABLES = (".csv", ".parquet")
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


@dataclass(frozen=True)
class TaskFile:
    """One task.

    Attributes:
        name: what `--tasks`, rows and tables call it.
        data: the file of records: JSON lines, a JSON list, CSV or Parquet; JSON lines may be gzipped. Or a dataset,
            `datasets:NAME`, on the Hub or in a folder, see `_dataset`.
        template: of Jinja, over the fields of a record; None: by the names of the fields.
        metric: one of `METRICS`, or `evaluate:NAME`; None goes with the template.
        answers: field of the acceptable answers, a text or a list; None: the first of the usual names.
    """

    name: str
    data: Path
    template: str | None = None
    metric: str | None = None
    max_new_tokens: int = 64
    answers: str | None = None
    chat: bool = True
    stop_at_newline: bool = False
    first_line: bool = False

    @classmethod
    def read(cls, path: Path, options: TaskFileOptions) -> TaskFile:
        """The task of a file; options count more than what a YAML file says.

        Raises:
            UserError: there is no such file, or what it says cannot be used.
        """
        if not path.is_file() and not _is_dataset(path):
            raise UserError(f"--task-file {path}: no such file; a dataset is written {DATASETS}NAME")
        given = {name: value for name, value in options.common(TaskFileOptions).items() if value is not None}
        if "template" in given:
            given["template"] = _typed_template(given["template"])
        found = _from_yaml(path) if path.suffix in (".yaml", ".yml") else cls(_name_of(path), path)
        found = replace(found, **given)
        if not found.name or found.name != Path(found.name).name or "\\" in found.name:
            raise UserError(f"{path}: the task cannot be called {found.name!r}: give it a name without slashes")
        if found.template is not None and not found.template.replace(SPLIT, "").strip():
            raise UserError(f"{path}: the template is empty, so every prompt would be")
        if found.template is not None and found.template.count(SPLIT) > 1:
            raise UserError(
                f"{path}: the template has {SPLIT} more than once; what stands before it is compressed, what stands "
                "after it is the question"
            )
        if found.metric is not None and found.metric not in METRICS and not is_library_metric(found.metric):
            raise UserError(
                f"{path}: unknown metric {found.metric!r}; choose from {', '.join(METRICS)}, or write evaluate:NAME"
            )
        return found

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the records and of the template."""
        content = json.dumps(_dataset(self.data), default=str).encode() if _is_dataset(self.data) else None
        data = hashlib.sha256(self.data.read_bytes() if content is None else content).hexdigest()
        return {"data": data, "prompt": hashlib.sha256((self.template or "").encode()).hexdigest()}

    def samples(self, limit: int | None, labelled: bool = True) -> list[Sample]:
        """The first records as samples; all if None.

        Args:
            labelled: right answers are needed; else they are left out.

        Raises:
            UserError: a record has not what the template or the metric needs.
        """
        found: list[Sample] = []
        template, metric = self.template, self.metric
        for index, (where, record) in enumerate(_records(self.data)):
            if limit is not None and index == limit:
                break
            if not isinstance(record, dict):
                raise UserError(f"{where} is not a record")
            if template is None:
                template, usual = _usual(where, record)
                metric = metric or usual
            parts = [_render(where, part, record) for part in template.split(SPLIT)]
            classes = record.get("all_classes")
            if metric == "classification" and not (classes and isinstance(classes, list)):
                raise UserError(f"{where} has no all_classes, the list of all classes, which classification needs")
            found.append(
                Sample(
                    id=f"{self.name}/{index}",
                    task=self.name,
                    context=parts[0],
                    question=parts[1] if len(parts) > 1 else "",
                    answers=_answers(where, record, self.answers) if labelled else (),
                    max_new_tokens=self.max_new_tokens,
                    metric=metric or "qa_f1",
                    all_classes=tuple(classes) if classes else None,
                    chat=self.chat,
                    stop_at_newline=self.stop_at_newline,
                    first_line=self.first_line,
                )
            )
        if not found:
            raise UserError(f"{self.data} holds no record")
        return found


#: Files with tasks that `--tasks` may name, by the name of the task.
REGISTERED: dict[str, Path] = {}


def register_task_file(path: str | Path) -> None:
    """Make the task of a file one that `--tasks` may name; for a module of `--plugin`.

    Args:
        path: as of `--task-file`: records, or a YAML file that says all of it.

    Raises:
        UserError: there is no such file, or a file of another task has the name.
    """
    file = Path(path)
    found = TaskFile.read(file if _is_dataset(file) else file.resolve(), TaskFileOptions())
    place = file if _is_dataset(file) else file.resolve()
    if REGISTERED.setdefault(found.name, place) != place:
        raise UserError(f"{path}: the task {found.name!r} is registered from {REGISTERED[found.name]} already")


def _typed_template(typed: str) -> str:
    text = text_or_file("--template", typed)
    return text if typed.startswith("@") else text.replace("\\n", "\n")


def _from_yaml(path: Path) -> TaskFile:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or "data" not in content:
        raise UserError(f"{path} has no `data:`, the file of records; it may have {', '.join(_KEYS)}")
    wrong = [str(key) for key in content if key not in _KEYS]
    if wrong:
        raise UserError(f"{path}: unknown key {wrong[0]!r}; a task has {', '.join(_KEYS)}")
    kinds = {"max_new_tokens": int, "chat": bool, "stop_at_newline": bool, "first_line": bool}
    for key, value in content.items():
        kind = kinds.get(key, str)
        if type(value) is not kind or (isinstance(value, int) and kind is int and value < 1):
            raise UserError(f"{path}: {key}: {value!r} cannot be used: it must be a {kind.__name__}")
    named = content.pop("data")
    data = Path(named) if _is_dataset(Path(named)) else path.parent / named
    if not data.is_file() and not _is_dataset(data):
        raise UserError(f"{path}: data: no such file: {data}")
    return TaskFile(**{"name": path.stem, **content}, data=data)


def _is_dataset(path: Path) -> bool:
    return str(path).startswith(DATASETS)


def _name_of(path: Path) -> str:
    """What a task is called: the file without its endings, or the last part of a dataset's name."""
    name = str(path).removeprefix(DATASETS).partition(",")[0].partition("@")[0] if _is_dataset(path) else path.name
    return Path(name).name.partition(".")[0]


@lru_cache(maxsize=4)
def _dataset(path: Path) -> list[Record]:
    """All rows of `datasets:NAME`, `datasets:NAME,CONFIGURATION` or `datasets:NAME,CONFIGURATION,SPLIT`.

    NAME is a folder or an id on the Hub, perhaps with @REVISION; the split is "test" where there are several.
    """
    name, config, split, *rest = [*(word.strip() for word in str(path).removeprefix(DATASETS).split(",")), "", ""]
    if not name or any(rest):
        raise UserError(
            f"{path}: write {DATASETS}NAME, {DATASETS}NAME,CONFIGURATION or {DATASETS}NAME,CONFIGURATION,SPLIT"
        )
    name, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    return dataset_rows(name, config or None, split or "test", revision or None)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    if _is_dataset(path):
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(_dataset(path), 1))
        return
    try:
        content = path.read_bytes()
        name = path.name
        if name.endswith(".gz"):
            content, name = gzip.decompress(content), name.removesuffix(".gz")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if name.endswith(_TABLES):
        rows = _csv(path, content) if name.endswith(".csv") else _parquet(path, content)
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    elif name.endswith((".jsonl", ".json")):
        yield from parse(Source(str(path.with_name(name)), content))
    else:
        raise UserError(f"{path}: records are .jsonl, .json, .csv or .parquet, perhaps with .gz behind")


def _csv(path: Path, content: bytes) -> list[Record]:
    csv.field_size_limit(2**31 - 1)  # a context is longer than what the module takes for a field
    try:
        table = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        names, rows = list(table.fieldnames or ()), list(table)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not CSV in UTF-8: {error}") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path} has two columns {twice!r}")
    longer = next((number for number, row in enumerate(rows, 1) if None in row), None)
    if longer is not None:
        raise UserError(f"{path}, row {longer} has more fields than the {len(names)} columns: is a comma not quoted?")
    return rows


def _parquet(path: Path, content: bytes) -> list[Record]:
    import pyarrow.parquet as parquet

    try:
        rows: list[Record] = parquet.read_table(io.BytesIO(content)).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not Parquet: {error}") from error
    return rows


def _usual(where: str, record: Record) -> tuple[str, str]:
    for fields, found in _USUAL.items():
        if record.keys() >= set(fields):
            return found
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
    name = next((each for each in names if record.get(each) is not None), None)
    if name is None:
        raise UserError(f"{where} has no {' or '.join(names)}; its fields are {', '.join(record)} (--answers FIELD)")
    values = record[name] if isinstance(record[name], list) else [record[name]]
    if not values or not all(isinstance(value, str | int | float) for value in values):
        raise UserError(f"{where}: {name!r} must be a text or a list of texts")
    return tuple(map(str, values))
