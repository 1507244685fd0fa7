"""The rows of a run: those that are missing are computed and written, by one process or by several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..distributed import Team
from ..errors import UserError
from ..growth import describe
from ..run_file import NAME, as_run_file
from ..settings import Settings
from ..workers import LISTENER, Event, Failed, Loaded, Reading, RunJob, Workers, default_workers, run_jobs
from .facts import cost_facts, place_facts
from .results import KeyOf, ResultFolder, Row

Key = tuple[Any, ...]
#: Seconds between two writings of `run_meta.json`.
META_SECONDS = 30.0


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
        return ResultFolder(self.output, self.settings.as_json(), before, part)

    def missing(self, found: set[Key]) -> list[tuple[Any, set[Key]]]:
        """The jobs that have rows to compute, and the keys of the rows that they have already."""
        return [(job, found & set(keys)) for job, keys in self.jobs if not found.issuperset(keys)]


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
        for _ in run_jobs(work.run, work.settings, work.missing(team.same(set()))):
            pass
        team.meet()
        return None
    run = _Run(team, work, watch)
    with run.folder.held():
        jobs = work.missing(team.same(run.begin()))
        run.compute(jobs, (workers or default_workers(work.settings, len(jobs))) if team.size == 1 else 1)
    team.meet()
    return run.close() if team.is_main else None


class _Run:
    """What one process does of a run."""

    def __init__(self, team: Team, work: Work, watch: Watch) -> None:
        self.team, self.settings, self.work, self.watch = team, work.settings, work, watch
        self.folder = work.folder(team.part)
        self.notes = [describe(work.earlier, self.settings)] if work.earlier else []
        self.finished: set[Key] = set()
        self.failures: list[tuple[str, int]] = []
        self.total = len(work.keys)
        self.written = time.perf_counter()
        self.begun: dict[Key, float] = {}
        self.elsewhere = 0

    def begin(self) -> set[Key]:
        """Put the folder in order; the keys of its finished rows."""
        with self.folder.alone():
            self._refuse_other_prompts()
            rows, notes = self.folder.begin(self.work.key_of)
            self.notes += notes
            self.finished = rows.keys() & set(self.work.keys)
            self.folder.write_text(NAME, as_run_file(self.settings, self.folder.path))
            # Together: settings and facts of a folder that grows say the same at any moment.
            facts = {"settings": self.settings.as_json(), **self.work.facts}
            again: dict[str, Any] = {} if self.folder.has_others else {"failures": []}
            place = self._place() if len(self.finished) < self.total else {}
            self.folder.write_meta({**facts, **again, **place})
        self.elsewhere = self.folder.lines_of_others()
        self._tell("")
        return self.finished

    def _place(self) -> dict[str, Any]:
        """Where the missing rows are computed, and under `earlier` the different places of those that are there."""
        now = place_facts(self.team.size)
        before = {name: self.folder.meta[name] for name in now if name in self.folder.meta}
        if not (self.finished or self.folder.has_others) or not before or before == now:
            return now
        if before["versions"] != now["versions"]:
            pairs = ((name, before["versions"].get(name), version) for name, version in now["versions"].items())
            said = ", ".join(f"{name} {old} then, {new} now" for name, old, new in pairs if old != new)
            self.notes.append(f"some rows are of an earlier run with other versions: {said}")
        if before.get("plugins", []) != now["plugins"]:
            self.notes.append("some rows are of an earlier run with other plugins, or with the same before a change")
        return {**now, "earlier": [*self.folder.meta.get("earlier", []), before]}

    def _refuse_other_prompts(self) -> None:
        for kind in ("tasks", "texts"):
            before, now = self.folder.meta.get(kind), self.work.known.get(kind)
            if before is not None and now is not None and before != now:
                changed = [name for name in now if before.get(name) != now[name]]
                raise UserError(
                    f"the data behind {self.folder.path} changed since it was begun: the prompts of "
                    f"{', '.join(changed)} are others now; choose another --output"
                )

    def compute(self, jobs: Sequence[Any], workers: int) -> None:
        """Do the jobs, some of them in other processes."""
        self._write_meta(**({"workers": workers} if jobs else {}))
        LISTENER.set(self._hear)
        mine, *others = [jobs[index::workers] for index in range(workers)]
        work = replace(self.work, jobs=(), keys=())
        shares = [(work, f"worker{number}", share) for number, share in enumerate(others, 1) if share]
        with Workers(compute_share, shares) as started:
            for event in run_jobs(self.work.run, self.settings, mine):
                self._take(event)
                started.check()
                if time.perf_counter() - self.written > META_SECONDS:
                    self._write_meta()
            started.wait(lambda: self._tell("the other processes"))
        self._write_meta()

    def _take(self, event: Event) -> None:
        if isinstance(event, Loaded):
            self._write_meta(model=event.facts)
        elif isinstance(event, Failed):
            self.failures.append((event.reason, len(event.keys)))
        elif isinstance(event, Reading):
            self._hear(event)
        else:
            self.folder.append(event)
            self.finished.update(map(self.work.key_of, event))
            self._tell(_label(event))

    def _hear(self, reading: Reading) -> None:
        self.begun |= dict.fromkeys(reading.keys, reading.done / reading.total)
        self._tell(f"{reading.label}: {reading.done:,} of {reading.total:,} tokens")

    def close(self) -> Outcome:
        """Put everything together that is there."""
        with self.folder.alone():
            rows, notes = self.folder.tidy(self.work.key_of)
            self.finished = rows.keys() & set(self.work.keys)
            ordered = [rows[key] for key in self.work.keys if key in rows]
            whole = len(ordered) == self.total
            self._write_meta(complete=whole, cache=cost_facts(ordered), **({"failures": []} if whole else {}))
        self.watch(Progress(len(ordered), self.total))
        mine = {key for _, keys in self.work.jobs for key in keys} if self.team.is_shard else set(self.work.keys)
        missing = len(mine - self.finished)
        failures = [(found["reason"], found["rows"]) for found in self.folder.meta.get("failures", [])]
        others = self.total - len(ordered) - missing
        return Outcome(self.folder, ordered, missing, others, failures, [*self.notes, *notes])

    def _write_meta(self, **changes: Any) -> None:
        now = time.perf_counter()
        with self.folder.alone():
            before = self.folder.meta
            failures = [{"reason": reason, "rows": count} for reason, count in self.failures]
            self.folder.write_meta(
                {
                    "seconds": round(before.get("seconds", 0.0) + now - self.written, 1),
                    "rows": {"finished": len(self.finished), "wanted": self.total},
                    "failures": [*before.get("failures", []), *failures],
                    **changes,
                }
            )
        self.written, self.failures = now, []

    def _tell(self, last: str) -> None:
        elsewhere = self.folder.lines_of_others() - self.elsewhere
        finished = min(len(self.finished) + elsewhere, self.total)
        begun = sum(share for key, share in self.begun.items() if key not in self.finished)
        self.watch(Progress(finished, self.total, last, min(begun, self.total - finished)))


def compute_share(work: Work, part: str, jobs: Sequence[Any]) -> None:
    """What one of several `Workers` does: jobs, into a file of its own."""
    folder, failures = work.folder(part), []
    with folder.held():
        for event in run_jobs(work.run, work.settings, jobs):
            if isinstance(event, Failed):
                failures.append({"reason": event.reason, "rows": len(event.keys)})
            elif not isinstance(event, (Loaded, Reading)):
                folder.append(event)
        if failures:
            with folder.alone():
                folder.write_meta({"failures": [*folder.meta.get("failures", []), *failures]})


def _label(rows: Sequence[Row]) -> str:
    row = rows[-1] if rows else {}
    return " ".join(str(row[name]) for name in ("task", "length", "policy", "budget") if row.get(name) is not None)
