"""The rows of a run: those that are missing are computed and written, by one process or by several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RowsFailed, UserError
from ..models.environment import model_facts
from ..models.loading import load
from ..options.run_file import NAME, as_run_file
from ..options.settings import Settings
from ..running.processes.distributed import Team
from ..running.processes.workers import LISTENER, Reading, RunJob, Workers, default_workers
from .facts import cost_facts, place_facts
from .growth import describe
from .results import KeyOf, ResultFolder, Row

Key = tuple[Any, ...]
#: What is done, and the keys of its rows that are finished already.
Job = tuple[Any, Set[Key]]


class Progress(NamedTuple):
    """How far a run is: rows finished, rows in all, what the last ones were about, and what unfinished ones have of a
    row together."""

    finished: int
    total: int
    last: str = ""
    begun: float = 0.0


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Work:
    """Everything that a run computes, and where.

    Attributes:
        settings: of the run; a folder of other settings is refused.
        output: folder of results.
        run: computes the rows of a job.
        key_of: tells rows apart.
        jobs: those of this process, each with the keys of its rows.
        keys: of the rows of all processes, in order.
        facts: for `run_meta.json`.
        known: those of what the folder may have already; one with other `tasks` or `texts` in it is refused.
        earlier: settings that the folder may have instead, if this run adds to it.
    """

    settings: Settings
    output: Path
    run: RunJob[Any, Any]
    key_of: KeyOf
    jobs: Sequence[tuple[Any, Sequence[Key]]]
    keys: Sequence[Key]
    facts: Mapping[str, Any]
    known: Mapping[str, Any]
    earlier: Settings | None = None

    def folder(self, part: str) -> ResultFolder:
        """Where a process writes; `part` names its file."""
        before = None if self.earlier is None else self.earlier.as_json()
        return ResultFolder(self.output, self.settings.as_json(), self.key_of, before, part)

    def missing(self, found: Set[Key]) -> list[Job]:
        """The jobs that have rows to compute."""
        return [(job, found & set(keys)) for job, keys in self.jobs if not found >= set(keys)]

    def compute(
        self, jobs: Sequence[Job], failures: list[tuple[str, int]], loaded: Callable[[Any], None] = lambda model: None
    ) -> Iterator[list[Row]]:
        """Rows as they are finished.

        Args:
            failures: gets the reason and the number of rows that could not be computed.
            loaded: told of the model.
        """
        if jobs:
            model, tokenizer = load(self.settings)
            loaded(model)
            for job, done in jobs:
                try:
                    yield from self.run(model, tokenizer, self.settings, job, done)
                except RowsFailed as error:
                    failures.append((error.reason, len(error.keys)))


@dataclass(frozen=True)
class Outcome:
    """A run after its last job.

    Attributes:
        folder: where it was written.
        rows: all finished rows, in order.
        missing: number of rows that should be there and are not.
        others: number of rows that other shards are to bring.
        failures: reasons, and the number of rows that are missing for each.
        notes: what was put right in the folder.
    """

    folder: ResultFolder
    rows: list[Row]
    missing: int
    others: int
    failures: list[tuple[str, int]]
    notes: list[str]


def complete(team: Team, work: Work, workers: int | None, watch: Watch) -> Outcome | None:
    """Compute what is missing in the folder of this process's jobs.

    Args:
        team: the processes of this run.
        workers: processes that share these jobs, this one among them; None chooses.
        watch: told of progress.

    Returns:
        None in all processes of a launched run but the main one.
    """
    if not team.writes:
        # This process holds a part of the model; the main one writes.
        for _ in work.compute(work.missing(team.same(set())), []):
            pass
        team.meet()
        return None
    run = _Run(team, work, watch)
    with run.folder.opened():
        run.begin()
        jobs = work.missing(team.same(set(run.folder.rows)))
        run.compute(jobs, (workers or default_workers(work.settings, len(jobs))) if team.size == 1 else 1)
    team.meet()
    return run.close() if team.is_main else None


class _Run:
    """What one process does of a run."""

    def __init__(self, team: Team, work: Work, watch: Watch) -> None:
        self.team, self.settings, self.work, self.watch = team, work.settings, work, watch
        self.folder = work.folder(team.part)
        self.keys = dict.fromkeys(work.keys)
        self.failures: list[tuple[str, int]] = []
        self.started = time.perf_counter()
        self.begun: dict[Key, float] = {}
        self.elsewhere = 0

    @property
    def finished(self) -> int:
        return sum(key in self.keys for key in self.folder.rows)

    def begin(self) -> None:
        """Write down what this run is."""
        folder, earlier = self.folder, self.work.earlier
        folder.notes += [describe(earlier, self.settings)] if earlier else []
        with folder.alone():
            self._refuse_other_prompts()
            folder.write_text(NAME, as_run_file(self.settings, folder.path))
            # Together: settings and facts of a folder that grows say the same at any moment.
            facts: dict[str, Any] = {"settings": self.settings.as_json(), **self.work.facts}
            if not folder.has_others:
                facts["failures"] = []
            if self.finished < len(self.keys):
                facts |= self._place() | {"rows": {"finished": self.finished, "wanted": len(self.keys)}}
            folder.write_meta(facts)
        self.elsewhere = folder.lines_of_others()
        self._tell("")

    def _refuse_other_prompts(self) -> None:
        for kind in ("tasks", "texts"):
            before, now = self.folder.meta.get(kind), self.work.known.get(kind)
            if before is not None and now is not None and before != now:
                changed = [name for name in now if before.get(name) != now[name]]
                raise UserError(
                    f"the data behind {self.folder.path} changed since it was begun: the prompts of "
                    f"{', '.join(changed)} are others now; choose another --output"
                )

    def _place(self) -> dict[str, Any]:
        """Where the missing rows are computed, and under `earlier` the different places of those that are there."""
        now = place_facts(self.team.size)
        before = {name: self.folder.meta[name] for name in now if name in self.folder.meta}
        if not (self.finished or self.folder.has_others) or not before or before == now:
            return now
        if before["versions"] != now["versions"]:
            pairs = ((name, before["versions"].get(name), version) for name, version in now["versions"].items())
            said = ", ".join(f"{name} {old} then, {new} now" for name, old, new in pairs if old != new)
            self.folder.notes.append(f"some rows are of an earlier run with other versions: {said}")
        if before.get("plugins", []) != now["plugins"]:
            self.folder.notes.append(
                "some rows are of an earlier run with other plugins, or with the same before a change"
            )
        return {**now, "earlier": [*self.folder.meta.get("earlier", []), before]}

    def compute(self, jobs: Sequence[Job], workers: int) -> None:
        """Do the jobs, some of them in other processes."""
        LISTENER.set(self._hear)
        mine, *others = [jobs[index::workers] for index in range(workers)]
        work = replace(self.work, jobs=(), keys=())
        shares = [(work, f"worker{number}", share) for number, share in enumerate(others, 1) if share]
        with Workers(_compute_share, shares) as started:
            for rows in self.work.compute(mine, self.failures, lambda model: self._note(model, workers)):
                self.folder.add(rows)
                self._tell(_label(rows))
                started.check()
            started.wait(lambda: self._tell("the other processes"))
        with self.folder.alone():
            seconds = time.perf_counter() - self.started if self.team.is_main else 0
            self.folder.write_meta({"seconds": round(self.folder.meta.get("seconds", 0.0) + seconds, 1)})
            note_failures(self.folder, self.failures)

    def _note(self, model: Any, workers: int) -> None:
        with self.folder.alone():
            self.folder.write_meta({"model": model_facts(model), "workers": workers})

    def close(self) -> Outcome:
        """Put everything together that is there."""
        folder, keys = self.folder, self.keys
        with folder.alone():
            folder.tidy()
            ordered = [folder.rows[key] for key in keys if key in folder.rows]
            whole = len(ordered) == len(keys)
            facts = {"complete": whole, "cache": cost_facts(ordered), **({"failures": []} if whole else {})}
            folder.write_meta({**facts, "rows": {"finished": len(ordered), "wanted": len(keys)}})
        self.watch(Progress(len(ordered), len(keys)))
        mine = {key for _, own in self.work.jobs for key in own} if self.team.is_shard else keys.keys()
        missing = len(mine - folder.rows.keys())
        failures = [(found["reason"], found["rows"]) for found in folder.meta["failures"]]
        return Outcome(folder, ordered, missing, len(keys) - len(ordered) - missing, failures, folder.notes)

    def _hear(self, reading: Reading) -> None:
        self.begun |= dict.fromkeys(reading.keys, reading.done / reading.total)
        self._tell(f"{reading.label}: {reading.done:,} of {reading.total:,} tokens")

    def _tell(self, last: str) -> None:
        total = len(self.keys)
        finished = min(self.finished + self.folder.lines_of_others() - self.elsewhere, total)
        begun = sum(share for key, share in self.begun.items() if key not in self.folder.rows)
        self.watch(Progress(finished, total, last, min(begun, total - finished)))


def _compute_share(work: Work, part: str, jobs: Sequence[Job]) -> None:
    """What one of several `Workers` does: jobs, into a file of its own."""
    failures: list[tuple[str, int]] = []
    with work.folder(part).opened() as folder:
        for rows in work.compute(jobs, failures):
            folder.add(rows)
        with folder.alone():
            note_failures(folder, failures)


def note_failures(folder: ResultFolder, failures: Sequence[tuple[str, int]]) -> None:
    """Write down why rows are missing, beside what other processes said."""
    found = [{"reason": reason, "rows": count} for reason, count in failures]
    folder.write_meta({"failures": [*folder.meta.get("failures", []), *found]})


def _label(rows: Sequence[Row]) -> str:
    row = rows[-1] if rows else {}
    return " ".join(str(row[name]) for name in ("task", "length", "policy", "budget") if row.get(name) is not None)
