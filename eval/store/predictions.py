"""Files of predictions in one shape: of this package (`rows.*.jsonl`), of LongBench's `pred.py`, of LongBench v2, of
KVCache-Factory (`DATASET/METHOD.json`), of kvpress (`predictions.csv`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import ruler
from ..data.longbench import v2
from ..data.longbench.tasks import TASKS, LongBenchTask
from ..data.records import refuse_gzip
from ..errors import UserError
from ..metrics.thinking import without_thinking
from . import kvpress
from .results import ROWS, of_last, read_runs

_BOM = b"\xef\xbb\xbf"
_HUGE = 1e9
#: Of the tasks of RULER, as kvpress calls them.
_RULER = {name.removeprefix("ruler_data_"): metric for name, metric in ruler.METRICS.items()}
_KNOWN = ", ".join(name for name, task in TASKS.items() if not task.is_e)


@dataclass(frozen=True)
class Prediction:
    """One answer of a model, and what it is scored by.

    Attributes:
        place: file and line, for messages.
        text: as generated; of this package without the thinking.
        words: the `length` field of the LongBench record.
        metric: see `metrics.score_sample`.
        recorded: the score that stands in the file; None in files of `pred.py`.
        metadata: of the sample.
    """

    place: str
    text: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] | None
    words: int | None
    metric: str
    recorded: float | None
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Predictions that have one score: of one task and, in rows of this package, of one length, policy and budget.

    Attributes:
        source: the file, or the folder of a run.
        policy: of KVCache-Factory the method.
        longbench: the task's rules, if it is one of LongBench.
        repeated: lines that are equal to an earlier one.
        left_out: lines of later runs.
    """

    source: Path
    task: str
    length: int | None
    policy: str | None
    budget: str | None
    longbench: LongBenchTask | None
    predictions: tuple[Prediction, ...]
    repeated: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class _Line:
    path: Path
    number: int
    content: bytes
    row: dict[str, Any]
    unit: str = "line"

    @property
    def place(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"

    def texts(self, name: str) -> tuple[str, ...]:
        texts = self.field(name, list)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{self.place}: {name!r} must be a list of texts with at least one in it, not {_show(texts)}"
            )
        return tuple(texts)

    def name(self, name: str) -> str:
        """A text that tables and files can show."""
        value: str = self.field(name, str)
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise UserError(f"{self.place}: {name!r} has half a character in it: {_show(value)}")
        return value

    def length(self, name: str, *, needed: bool) -> int | None:
        """A whole number of words or tokens."""
        value: int | None = self.field(name, int, *([] if needed else [type(None)]))
        if value is not None and value < 0:
            raise UserError(f"{self.place}: {name!r} is {_show(value)}, it must be 0 or more")
        return value

    def score(self, name: str) -> float | None:
        """A finite number, if there is one."""
        value = self.field(name, float, int, type(None))
        if value is not None and not abs(value) < _HUGE:  # nor not-a-number
            raise UserError(f"{self.place}: {name!r} is {_show(value)}, it must be a number from 0 to 1")
        return None if value is None else float(value)

    def field(self, name: str, *kinds: type) -> Any:
        """A field of one of these types; `type(None)` among them lets it be absent."""
        value = self.row.get(name)
        if type(value) in kinds:
            return value
        if name not in self.row:
            raise UserError(f"{self.place} has no field {name!r}; its fields are: {', '.join(self.row) or 'none'}")
        raise UserError(f"{self.place}: {name!r} must be {_names(kinds)}, not {_show(value)}")


def read_groups(files: Sequence[Path], longbench_e: bool, keep_first_run: bool = False) -> list[Group]:
    """Groups of predictions in files that belong together, in the order of the lines.

    Args:
        files: of `runs`.
        longbench_e: what is named after a task of LongBench belongs to LongBench-E. Files in a folder `pred_e` (or one
            level below it) do so anyway.
        keep_first_run: of a file of `pred.py` with more lines than its task has samples, the first ones count.

    Raises:
        UserError: nothing is there, a line is damaged or repeated, or a task is unknown.
    """
    if files[0].suffix == ".csv":
        return _kvpress(files[0], longbench_e)
    lines = [line for file in files for line in _read(file)]
    if not lines:
        raise UserError(f"{files[0]} holds no predictions: the file is empty")
    if {"judge", "difficulty"} <= lines[0].row.keys():
        return [_official_v2(lines)]
    if "pred" in lines[0].row:
        return [_official(lines, longbench_e, keep_first_run)]
    if not {"task", "prediction"} & lines[0].row.keys() or "loss" in lines[0].row:
        raise UserError(
            f"{lines[0].place} is no prediction: a row has a field 'prediction', or 'pred' if pred.py wrote it"
        )
    source = files[0].parent if files[0].match(ROWS) else files[0]
    if files[0].match(ROWS):
        lines = _asked(source, lines)
    return list(_own(source, lines, longbench_e))


def _asked(folder: Path, lines: Sequence[_Line]) -> list[_Line]:
    """Those that have the settings of the last command in this folder, each row once."""
    is_asked = of_last(read_runs(folder)[0])
    names = ("task", "length", "policy", "budget", "id")
    found = {json.dumps([line.row.get(name) for name in names]): line for line in lines if is_asked(line.row)}
    return list(found.values())


def runs(path: Path) -> list[list[Path]]:
    """Files that belong together: one each, but for the parts of a run that was stopped, or of one task.

    Args:
        path: a file, a folder of a run, a folder of files of `pred.py`, one per task and named after it, or a folder
            of such folders, one per model.

    Raises:
        UserError: nothing is there.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: give files of predictions or the folders that hold them")
    found = _of_folder(path) if path.is_dir() else [[path]]
    if not found:
        found = [files for folder in sorted(path.iterdir()) if folder.is_dir() for files in _of_folder(folder)]
    if not found:
        raise UserError(f"{path} holds no predictions: no .jsonl file, here or one level below")
    return found


def _of_folder(folder: Path) -> list[list[Path]]:
    rows = sorted(folder.glob(ROWS))
    if rows:
        return [rows]
    found = sorted(folder.glob("*.jsonl")) or sorted(folder.glob(kvpress.NAME))
    if not found and folder.name in TASKS:  # of KVCache-Factory, which writes its scores beside the predictions
        found = [file for file in sorted(folder.glob("*.json")) if file.name not in ("metrics.json", "run_meta.json")]
    return [[file] for file in found]


def _read(path: Path) -> Iterator[_Line]:
    try:
        with path.open("rb") as file:  # lines end at newlines only: str.splitlines would cut at U+2028 too
            for number, content in enumerate(file, 1):
                if number == 1:
                    refuse_gzip(str(path), content)
                    content = content.removeprefix(_BOM)
                half = path.match(ROWS) and content[:1] == b"{" and content[-1:] not in b"\n}"  # of a process that died
                if content.strip() and not half:
                    yield _Line(path, number, content.strip(), _row(f"{path}, line {number}", content))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _row(place: str, content: bytes) -> dict[str, Any]:
    try:
        row = json.loads(content.decode())
    except json.JSONDecodeError as error:
        cut = "" if content.endswith(b"\n") else " (the line was cut off)"
        raise UserError(f"{place}, column {error.colno} is not JSON: {error.msg}{cut}; {_REPAIR}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: {error.reason} at byte {error.start + 1}; {_REPAIR}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}; {_REPAIR}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is not a row of a prediction but {_show(row)}; {_REPAIR}")
    return row


_REPAIR = "delete this line, or write the file anew"


def _official(lines: Sequence[_Line], longbench_e: bool, keep_first_run: bool) -> Group:
    path = lines[0].path
    in_e = longbench_e or "pred_e" in (path.absolute().parent.name, path.absolute().parent.parent.name)
    by_method = path.suffix == ".json" and path.stem not in TASKS
    task = _task(path.absolute().parent.name if by_method else path.stem, in_e)
    if task is None:
        raise UserError(
            f"{path}: a file of predictions, or of KVCache-Factory its folder, has the name of its task; the tasks "
            f"are: {_KNOWN}"
        )
    read = len(lines)
    lines = lines[: task.samples] if keep_first_run else lines
    repeated = _refuse_second_run(lines, task)
    predictions = [_unscored(line, task.metric, task.is_e) for line in lines]
    source, method = (path.parent.parent, path.stem) if by_method else (path, None)
    return Group(source, task.name, None, method, None, task, tuple(predictions), repeated, read - len(lines))


def _unscored(line: _Line, metric: str, in_e: bool) -> Prediction:
    return Prediction(
        place=line.place,
        text=line.field("pred", str),
        answers=line.texts("answers"),
        all_classes=line.texts("all_classes") if line.row.get("all_classes") else None,
        words=line.length("length", needed=in_e),
        metric=metric,
        recorded=None,
        metadata={},
    )


def _kvpress(path: Path, longbench_e: bool) -> list[Group]:
    """A file of kvpress: tasks of LongBench, of LongBench-E where the name of its folder begins so, or of RULER."""
    lines = [_Line(path, number, b"", row, "row") for number, row in kvpress.rows(path)]
    if not lines:
        raise UserError(f"{path} holds no predictions: the file is empty")
    names = [folder.name.split("__") for folder in path.absolute().parents[:2]]
    in_e = longbench_e or any(parts[0] == "longbench-e" for parts in names)
    groups: dict[str, list[_Line]] = {}
    for line in lines:
        groups.setdefault(str(line.row["task"]).removesuffix("-e"), []).append(line)
    found: list[Group] = []
    for name, rows in groups.items():
        task, metric = _task(name, in_e), _RULER.get(name)
        if task is None and metric is None:
            raise UserError(f"{path}: task {name!r} of kvpress has no metric here; known are RULER's and: {_KNOWN}")
        predictions = [
            _unscored(line, task.metric if task else str(metric), task is not None and task.is_e) for line in rows
        ]
        kept = {line.row["compression_ratio"] for line in rows}
        press = next((parts[-2] for parts in names if len(parts) > 3), None)
        share = _share_kept(kept.pop()) if len(kept) == 1 else None
        found.append(
            Group(path, task.name if task else f"ruler_data_{name}", None, press, share, task, tuple(predictions))
        )
    return found


def _share_kept(ratio: str | None) -> str | None:
    """The budget: kvpress says what share it evicts."""
    try:
        return f"{100 * (1 - float(ratio or '')):.4g}%"
    except ValueError:
        return None


def _official_v2(lines: Sequence[_Line]) -> Group:
    """A result file of LongBench v2."""
    seen: dict[str, _Line] = {}
    for line in lines:
        first = seen.setdefault(line.field("_id", str), line)
        if first is not line:
            raise UserError(f"{line.place} repeats the question of line {first.number}; delete one of them")
    predictions = [
        Prediction(
            place=line.place,
            text=_response(line),
            answers=(line.field("answer", str),),
            all_classes=None,
            words=None,
            metric="multiple_choice",
            recorded=float(line.field("judge", bool, int)),
            metadata={name: line.field(name, str) for name in ("difficulty", "length")},
        )
        for line in lines
    ]
    return Group(lines[0].path, v2.NAME, None, None, None, None, tuple(predictions))


def _response(line: _Line) -> str:
    """What the model said; where only the letter was kept, a sentence that says it."""
    if line.row.get("response") is not None:
        return str(line.field("response", str))
    letter = line.field("pred", str, type(None))
    return "" if letter is None else f"The correct answer is ({letter})"


def _task(name: str, in_e: bool) -> LongBenchTask | None:
    """The task of LongBench, or of LongBench-E; None for any other."""
    if name in TASKS and in_e and not TASKS[name].is_e and f"{name}_e" not in TASKS:
        raise UserError(f"task {name!r} is not one of LongBench-E")
    return TASKS.get(f"{name}_e" if in_e and not name.endswith("_e") else name)


def _refuse_second_run(lines: Sequence[_Line], task: LongBenchTask) -> int:
    """How many lines repeat an earlier one. A few are two samples by chance: `pred.py` writes no name of the sample.

    Raises:
        UserError: more than one in fifty does, or the task has fewer samples: `pred.py` appends to the file of an
            earlier run.
    """
    first: dict[bytes, int] = {}
    places = [(line.number, first.setdefault(line.content, line.number)) for line in lines]
    repeated = [(number, earlier) for number, earlier in places if number != earlier]
    why = (
        "pred.py appends to the file of an earlier run, so these are probably several runs: keep the lines of one, or "
        "say --keep-first-run"
    )
    if len(repeated) > len(lines) // 50:
        shown = ", ".join(f"{number} (as {earlier})" for number, earlier in repeated[:5])
        more = ", ..." if len(repeated) > 5 else ""
        raise UserError(
            f"{lines[0].path}: {len(repeated)} of {len(lines)} lines repeat an earlier one: lines {shown}{more}; {why}"
        )
    if len(lines) > task.samples:
        raise UserError(f"{lines[0].path} has {len(lines)} lines, but {task.name} {task.samples} samples; {why}")
    return len(repeated)


def _own(source: Path, lines: Sequence[_Line], longbench_e: bool) -> Iterator[Group]:
    seen: dict[tuple[Any, ...], _Line] = {}
    groups: dict[tuple[str, int | None, str, str], list[Prediction]] = {}
    for line in lines:
        group = _group_key(line)
        key = (*group, line.field("id", str))
        if key in seen:
            raise UserError(
                f"{line.place} repeats line {seen[key].number} of {seen[key].path} (same task, length, policy, budget "
                "and id): delete one of them, or run the same `paged-eviction eval` again, which puts it right"
            )
        seen[key] = line
        groups.setdefault(group, []).append(_own_prediction(line))
    for (task, length, policy, budget), predictions in groups.items():
        rules = _task(task, longbench_e)
        if rules is None and longbench_e:
            raise UserError(f"{source}: task {task!r} is not one of LongBench-E")
        name = rules.name if rules else task
        yield Group(source, name, length, policy, budget, rules, tuple(predictions))


def _group_key(line: _Line) -> tuple[str, int | None, str, str]:
    return (
        line.name("task"),
        line.length("length", needed=False),
        line.name("policy"),
        line.name("budget"),
    )


def _answer(line: _Line) -> str:
    thinking = line.field("thinking", str, type(None)) if "thinking" in line.row else None
    said: str = line.field("prediction", str)
    return said if thinking is None else without_thinking(said, opened=True)[0]


def _own_prediction(line: _Line) -> Prediction:
    return Prediction(
        place=line.place,
        text=_answer(line),
        answers=line.texts("answers"),
        all_classes=line.texts("all_classes") if line.row.get("all_classes") else None,
        words=line.length("record_length", needed=False),
        metric=line.field("metric", str),
        recorded=line.score("score"),
        metadata=line.field("metadata", dict),
    )


def _names(kinds: Sequence[type]) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
    return " or ".join(names.get(kind, "null") for kind in kinds)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
