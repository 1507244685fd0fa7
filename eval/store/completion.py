"""The rows of a run: those that are missing are computed and written, by one process or by several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..distributed import Team
from ..errors import UserError
from ..growth import describe
from ..run_file import NAME, as_run_file
from ..settings import Settings
from ..workers import LISTENER, Failed, Loaded, Reading, RunJob, default_workers, run_jobs
from . import lock
from .facts import cost_facts, place_facts
from .results import KeyOf, ResultFolder, Row
from .shards import Others, Shard, clear

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
        jobs: each with the keys of its rows.
        facts: for `run_meta.json`.
        known: those of what the folder may have already; one with other `tasks` or `texts` in it is refused.
        earlier: settings that the folder may have instead, if this run adds to it.
    """

    settings: Settings
    output: Path
    run: RunJob[Any, Any]
    key_of: KeyOf
    jobs: Sequence[tuple[Any, Sequence[Key]]]
    facts: Mapping[str, Any]
    known: Mapping[str, Any]
    earlier: Settings | None = None

    @property
    def keys(self) -> list[Key]:
        return [key for _, keys in self.jobs for key in keys]

    def missing(self, found: set[Key]) -> list[tuple[Any, set[Key]]]:
        """The jobs that have rows to compute, and the keys of the rows that they have already."""
        return [(job, found & set(keys)) for job, keys in self.jobs if not found.issuperset(keys)]


@dataclass(frozen=True)
class Outcome:
    """A run after its last job.

    Attributes:
        folder: where it was written.
        rows: all finished rows, in the order of the jobs.
        missing: number of rows that are not.
        failures: reasons, and the number of rows that are missing for each.
        notes: what was put right in the folder, and processes that died.
    """

    folder: ResultFolder
    rows: list[Row]
    missing: int
    failures: list[tuple[str, int]]
    notes: list[str]


def complete(team: Team, work: Work, workers: int | None, watch: Watch) -> Outcome | None:
    """Compute what is missing in the folder.

    Args:
        team: the processes of this run.
        workers: processes that this one starts; None chooses.
        watch: told of progress, in the main process.

    Returns:
        None in all processes but the main one.

    Raises:
        UserError: also for a mistake that the main process noticed.
    """
    lead = _Lead(team, work, watch) if team.is_main else None
    with ExitStack() as stack:
        found = team.agree(lambda: lead.begin(stack) if lead else set())
        jobs = team.share(work.missing(found))
        count = (workers or default_workers(work.settings, len(jobs))) if team.size == 1 else 1
        if lead:
            return lead.finish(jobs, count)
        if team.split:
            _follow(team, work, jobs)
        else:
            for _ in run_jobs(work.run, work.settings, jobs, 1):
                pass  # this process holds a part of the model; the main one writes
    return None


class _Lead:
    """The process that answers for the folder."""

    def __init__(self, team: Team, work: Work, watch: Watch) -> None:
        self.team, self.settings, self.work, self.watch = team, work.settings, work, watch
        earlier = work.earlier
        self.folder = ResultFolder(work.output, self.settings.as_json(), earlier.as_json() if earlier else None)
        self.others = Others(work.output, tuple(range(1, team.size)) if team.split else ())
        self.finished: set[Key] = set()
        self.notes = [describe(earlier, self.settings)] if earlier else []
        self.failures: list[tuple[str, int]] = []
        self.total = len(work.keys)
        self.started = self.written = time.perf_counter()
        self.before = 0.0
        self.begun: dict[Key, float] = {}

    def begin(self, stack: ExitStack) -> set[Key]:
        """Take the folder and put it in order; the keys of its finished rows."""
        stack.enter_context(lock.held(self.folder.path))
        clear(self.folder.path)
        self._refuse_other_prompts()
        rows, notes = self.folder.begin(self.work.key_of)
        self.notes += notes
        self.finished = rows.keys() & set(self.work.keys)
        self.before = self.folder.meta.get("seconds", 0.0)
        self.folder.write_text(NAME, as_run_file(self.settings, self.folder.path))
        # Together: settings and facts of a folder that grows say the same at any moment.
        facts = {"settings": self.settings.as_json(), **self.work.facts}
        self.folder.write_meta({**facts, **(self._place() if len(self.finished) < self.total else {})})
        self._tell("")
        return self.finished

    def _place(self) -> dict[str, Any]:
        """Where the missing rows are computed, and under `earlier` the different places of those that are there."""
        now = place_facts(self.team.size)
        before = {name: self.folder.meta[name] for name in now if name in self.folder.meta}
        if not self.finished or not before or before == now:
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

    def finish(self, jobs: Sequence[Any], workers: int) -> Outcome:
        """Do this process's jobs, wait for the others, put everything together."""
        if self.others.ranks:
            self.team.meet()
            self.team.agree(self.others.check)
        self._write_meta(workers=workers if jobs else None)
        LISTENER.set(self._hear)
        for event in run_jobs(self.work.run, self.settings, jobs, workers):
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
            if time.perf_counter() - self.written > META_SECONDS:
                self._write_meta()
        self._collect()
        return self._close()

    def _hear(self, reading: Reading) -> None:
        self.begun |= dict.fromkeys(reading.keys, reading.done / reading.total)
        self._tell(f"{reading.label}: {reading.done:,} of {reading.total:,} tokens")

    def _collect(self) -> None:
        notes = self.others.wait(lambda: self._tell("the other processes"))
        for rank in self.others.ranks:
            if rank in notes:
                self.failures += [(reason, count) for reason, count in notes[rank]["failures"]]
            else:
                self.notes.append(f"process {rank} of {self.team.size} died before it was done")

    def _close(self) -> Outcome:
        rows, notes = self.folder.merge(self.work.key_of)
        self.finished = rows.keys() & set(self.work.keys)
        self._tell("")
        ordered = [rows[key] for key in self.work.keys if key in rows]
        self._write_meta(
            complete=len(ordered) == self.total,
            failures=[{"reason": reason, "rows": count} for reason, count in self.failures],
            cache=cost_facts(ordered),
        )
        self.others.dismiss()
        return Outcome(self.folder, ordered, self.total - len(ordered), self.failures, [*self.notes, *notes])

    def _write_meta(self, **changes: Any) -> None:
        self.written = time.perf_counter()
        self.folder.write_meta(
            {
                **{name: value for name, value in changes.items() if value is not None},
                "seconds": round(self.before + self.written - self.started, 1),
                "rows": {"finished": len(self.finished), "wanted": self.total},
            }
        )

    def _tell(self, last: str) -> None:
        finished = min(len(self.finished) + self.others.finished_rows(), self.total)
        begun = sum(share for key, share in self.begun.items() if key not in self.finished)
        self.watch(Progress(finished, self.total, last, min(begun, self.total - finished)))


def _follow(team: Team, work: Work, jobs: Sequence[Any]) -> None:
    """A process that has jobs of its own and is not the main one."""
    failures: list[tuple[str, int]] = []
    with Shard(work.output, team.rank) as shard:
        team.meet()
        team.agree(lambda: None)
        for event in run_jobs(work.run, work.settings, jobs, 1):
            if isinstance(event, Failed):
                failures.append((event.reason, len(event.keys)))
            elif not isinstance(event, (Loaded, Reading)):
                shard.append(event)
        shard.finish({"failures": failures})


def _label(rows: Sequence[Row]) -> str:
    row = rows[-1] if rows else {}
    return " ".join(str(row[name]) for name in ("task", "length", "policy", "budget") if row.get(name) is not None)
