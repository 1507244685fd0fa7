"""`paged-eviction score`: files of predictions are scored (again), without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pandas import DataFrame
from rich.console import Console

from ..console import say
from ..data.longbench import TASKS
from ..data.longbench.v2 import NAME as V2
from ..errors import UserError
from ..grouping import grouped
from ..metrics import METRICS, first_line_of, score_sample
from ..store.predictions import Group, Prediction, read_groups, runs
from .longbench import BUCKETS, E_TASKS, V2_GROUPS, aggregates, official, parts, task_score
from .means import Mean
from .runs import ends
from .table import Table, simple_table


@dataclass(frozen=True)
class TaskScore:
    """The score of one task. Rows of this package have one for each length, policy and budget.

    Attributes:
        source: the file, or the folder of a run.
        metric: see `metrics.score_sample`.
        samples: number of predictions.
        score: in percent, two digits, as LongBench rounds; None for LongBench-E, which has one per bucket only.
        groups: per bucket of LongBench-E or group of LongBench v2 in percent; None where nothing is in it.
        recorded: the same, of the scores that the rows contain; None for files of LongBench's `pred.py`.
        repeated: lines that are equal to an earlier one; they count, as in the official code.
        left_out: lines of later runs, with `keep_first_run`.
        differing: rows whose recorded score is another one; `differs` is the place of the first.
    """

    source: str
    task: str
    length: int | None
    policy: str | None
    budget: str | None
    metric: str | None
    samples: int
    score: float | None
    groups: dict[str, float | None] | None
    recorded: float | None
    repeated: int
    left_out: int
    differing: int
    differs: str | None


class Average(NamedTuple):
    """One number for several tasks of one run: of one folder, policy and budget."""

    source: str
    policy: str | None
    budget: str | None
    name: str
    value: float


def score_files(
    paths: Iterable[Path],
    *,
    longbench_e: bool = False,
    keep_first_run: bool = False,
    metrics: Sequence[str] = (),
    problems: list[str] | None = None,
) -> list[TaskScore]:
    """Score predictions of this package (`rows.*.jsonl`), of LongBench's `pred.py` (`<task>.jsonl`) or of LongBench v2
    (`<model>.jsonl`).

    Args:
        paths: files, folders that hold them, or trees of such folders, one per model.
        longbench_e: score by LongBench-E's buckets of length, even if a task does not end in `_e` and a file of
            `pred.py` is not in a folder `pred_e`.
        keep_first_run: see `read_groups`.
        metrics: names in `METRICS`, each of which gives a score; empty: the metric of each task.
        problems: gets a sentence for each file that is wrong, and the others are scored. None: the error is raised.

    Returns:
        One score per file of `pred.py`; of rows of this package, one per task, length, policy and budget.

    Raises:
        UserError: a file is absent, empty or damaged, has repeated rows, or its task is unknown.
    """
    task_scores: list[TaskScore] = []
    for files in (files for path in paths for files in runs(path)):
        try:
            groups = read_groups(files, longbench_e, keep_first_run)
            task_scores += [_score_group(group) for group in _measured(groups, metrics)]
        except UserError as error:
            if problems is None:
                raise
            problems.append(str(error))
    return task_scores


def _measured(groups: Iterable[Group], metrics: Sequence[str]) -> Iterator[Group]:
    """The groups; with `metrics` each once per metric, without the scores that were recorded for another one."""
    for group in groups:
        if not metrics:
            yield group
        for metric in metrics:
            others = (replace(answer, metric=metric, recorded=None) for answer in group.predictions)
            yield replace(group, predictions=tuple(others))


def _score_group(group: Group) -> TaskScore:
    scores = [_score(group, answer) for answer in group.predictions]
    recorded = [answer.recorded for answer in group.predictions if answer.recorded is not None]
    pairs = zip(group.predictions, scores, strict=True)
    differing = [
        answer.place for answer, score in pairs if answer.recorded is not None and abs(answer.recorded - score) > 1e-6
    ]
    whole, groups = _official_numbers(group, scores)
    return TaskScore(
        source=str(group.source),
        task=group.task,
        length=group.length,
        policy=group.policy,
        budget=group.budget,
        metric=group.predictions[0].metric,
        samples=len(scores),
        score=whole,
        groups=groups,
        recorded=None if whole is None else task_score(recorded),
        repeated=group.repeated,
        left_out=group.left_out,
        differing=len(differing),
        differs=differing[0] if differing else None,
    )


def _score(group: Group, prediction: Prediction) -> float:
    if prediction.metric not in METRICS:
        named = "null" if prediction.metric is None else repr(prediction.metric)
        raise UserError(
            f"{prediction.place}: 'metric' is {named}, which cannot be computed here; say "
            f"--metric with one of {', '.join(METRICS)}"
        )
    first_line = group.longbench is not None and group.longbench.first_line
    text = first_line_of(prediction.text) if first_line else prediction.text
    try:
        return score_sample(prediction.metric, text, prediction.answers, prediction.all_classes)
    except ValueError as error:
        raise UserError(f"{prediction.place}: {error}") from error


def _official_numbers(group: Group, scores: Sequence[float]) -> tuple[float | None, dict[str, float | None] | None]:
    """The number of the whole task, and those of its parts, where there are any."""
    in_e = group.task in E_TASKS
    if not in_e and group.task != V2:
        return task_score(scores), None
    for answer in group.predictions:
        _check_part(answer, in_e)
    columns = {
        "task": group.task,
        "score": scores,
        "record_length": [answer.words for answer in group.predictions],
        "metadata": [answer.metadata for answer in group.predictions],
    }
    numbers = official(parts(DataFrame(columns)), ["part"])
    groups = dict.fromkeys(BUCKETS if in_e else V2_GROUPS) | {part: mean.value for part, mean in numbers.items()}
    return None if in_e else task_score(scores), groups


def _check_part(prediction: Prediction, in_e: bool) -> None:
    if in_e and prediction.words is None:
        raise UserError(f"{prediction.place} has no length of the record, which decides the bucket of LongBench-E")
    for name in () if in_e else ("difficulty", "length"):
        if not isinstance(prediction.metadata.get(name), str):
            raise UserError(f"{prediction.place}: its metadata has no {name!r}, which LongBench v2 is reported by")


def means(scores: Iterable[TaskScore]) -> list[Average]:
    """The official aggregates of every run that has all the tasks they are over, each by the metric of the task."""
    official = [one for one in scores if one.task not in TASKS or one.metric == TASKS[one.task].metric]
    return [
        Average(*run, it.name, it.mean.value)
        for run, mine in grouped(official, lambda one: (_run(one), one.policy, one.budget)).items()
        for it in aggregates({one.task: Mean(one.score) for one in mine if one.score is not None})
        if it.mean is not None
    ]


def _run(score: TaskScore) -> str:
    """The folder of a run: `pred.py` writes a file per task into it."""
    return str(Path(score.source).parent) if score.policy is None else score.source


def run_score(
    paths: Sequence[Path],
    output: Path | None = None,
    *,
    metrics: Sequence[str] = (),
    **how: Any,
) -> bool:
    """Print the scores of files of predictions; write them as JSON too if `output` is given; whether all were scored.

    Args:
        how: the others of `score_files`.

    Raises:
        UserError: none could be, or the output cannot be written.
    """
    if unknown := [name for name in metrics if name not in METRICS]:
        raise UserError(f"unknown metric {unknown[0]!r} (--metric); choose from {', '.join(METRICS)}")
    problems: list[str] = []
    scores = score_files(paths, metrics=metrics, problems=problems, **how)
    if not scores:
        raise UserError(problems[0])
    console, averages = Console(), means(scores)
    score_table(scores).show(console)
    for mean in averages:
        name = ", ".join(part for part in (mean.source, mean.policy, mean.budget, mean.name) if part)
        say(console, f"{name}: {mean.value:.2f}")
    notes = [note for score in scores for note in _notes(score)] + [f"not scored: {problem}" for problem in problems]
    if output is not None:
        content = {"scores": [asdict(score) for score in scores], "means": [mean._asdict() for mean in averages]}
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, "utf-8")
        except OSError as error:
            raise UserError(f"cannot write {output}: {error.strerror or error}; choose another --output") from error
        notes.append(f"written to {output}")
    for note in notes:
        say(Console(stderr=True), note)
    return not problems


def _notes(score: TaskScore) -> Iterator[str]:
    if score.repeated:
        yield f"note: {score.source}: {score.repeated} lines are equal to an earlier one; they are counted"
    if score.left_out:
        yield f"note: {score.source}: {score.left_out} lines after the first {score.samples} were left out"
    if score.differs:
        yield (
            f"note: {score.source}: {score.differing} of {score.samples} rows of {score.task} have another score than "
            f"the one that is recorded, first {score.differs}"
        )


def score_table(scores: Sequence[TaskScore]) -> Table:
    """A line per score, in percent; columns that would be empty are left out."""
    told_apart = len({(it.task, it.length, it.policy, it.budget, it.metric) for it in scores}) == len(scores)
    brief = told_apart and len({_run(score) for score in scores}) < 2
    names = ["task", "length", "policy", "budget", "metric"] if brief else _NAMES
    groups = dict.fromkeys(name for score in scores for name in score.groups or ())
    columns = [*names, "samples", "score", "recorded"]
    sources = list(dict.fromkeys(score.source for score in scores))
    brief_names = dict(zip(sources, ends([Path(source) for source in sources]), strict=True))
    rows = (
        [*(getattr(score, name) for name in columns), *((score.groups or {}).get(name) for name in groups)]
        for score in (replace(score, source=brief_names[score.source]) for score in scores)
    )
    return simple_table("", [*columns, *groups], rows, head=len(names))


_NAMES = ["source", "task", "length", "policy", "budget", "metric"]
