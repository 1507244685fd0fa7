"""The rows of a run: those that are missing are computed and written, by one process or by several."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..caches.preparing import prepare_model
from ..errors import RowsFailed
from ..models.environment import model_facts
from ..models.loading import check_ids, load_model
from ..options.run_file import NAME, as_run_file
from ..options.settings import Settings
from ..progress import LISTENER, Progress, Reading, Watch
from ..store.checks import row_key
from ..store.results import ROWS, KeyOf, ResultFolder, Row, make_folder, settings_differences, write_whole
from .facts import place_facts
from .meaning import meanings
from .processes.child import is_child
from .processes.children import Children
from .processes.distributed import Team
from .variants import Variant, empty_caches

Key = tuple[Any, ...]
#: Jobs with the keys of their rows.
Share = Sequence[tuple[Any, Sequence[Key]]]


class RunJob(Protocol):
    """Runs one job and yields rows as they are finished, without those `done`.

    Of rows that take long it tells in between, see `progress.tell`.
    """

    def __call__(self, model: Any, tokenizer: Any, settings: Any, job: Any, done: Any, /) -> Iterator[list[Row]]: ...


@dataclass(frozen=True)
class Work:
    """Everything that a run computes, and where.

    Attributes:
        settings: of the run.
        config, tokenizer: of its model.
        output: folder of results.
        run: computes the rows of a job.
        key_of: tells rows apart.
        shares: the jobs of each process that this one answers for, its own first.
        prompts: the digest of what each row asks, in order, for all processes.
        variants: policies and budgets.
        facts: what else is written down of the run.
        highest: of all token ids that the model reads.
    """

    settings: Settings
    config: Any
    tokenizer: Any
    output: Path
    run: RunJob
    key_of: KeyOf
    shares: Sequence[Share]
    prompts: Mapping[Key, str]
    variants: Sequence[Variant]
    facts: Mapping[str, Any]
    highest: int

    def compute(self, model: Any, finished: Set[Key], failures: list[tuple[str, int]]) -> Iterator[list[Row]]:
        """Rows of this process's share that are not `found`, as they are finished; `failures` gets the reason and the
        number of rows that could not be computed."""
        for job, keys in missing(self.shares[0], finished):
            try:
                yield from self.run(model, self.tokenizer, self.settings, job, finished & keys)
            except RowsFailed as error:
                failures.append((error.reason, len(error.keys)))


#: What a row that was finished last is called.
_NAMES = ("task", "length", "policy", "budget")
#: Facts that a command takes over from the last one with the same settings.
_KEPT = ("digests", "versions", "commit", "plugins", "hardware", "seconds")


def missing(share: Share, finished: Set[Key]) -> list[tuple[Any, Set[Key]]]:
    """The jobs that have rows to compute, with the keys of all their rows."""
    return [(job, set(keys)) for job, keys in share if not finished >= set(keys)]


@dataclass(frozen=True)
class Outcome:
    """A run after its last job.

    Attributes:
        folder: where it was written.
        rows: all finished rows, in order.
        missing: number of rows that should be there and are not.
        others: number of rows that other shards are to bring.
        failures: reasons, and the number of rows that are missing for each.
        notes: what is worth knowing of the folder.
    """

    folder: ResultFolder
    rows: list[Row]
    missing: int
    others: int
    failures: list[tuple[str, int]]
    notes: list[str]


def complete(team: Team, work: Work, watch: Watch) -> Outcome | None:
    """Compute what the folder lacks of this process's jobs.

    Args:
        team: the processes of this run.
        watch: told of progress.

    Returns:
        None in all processes of a launched run but the main one, and in those that another one started.
    """
    with Children(work.output / NAME, len(work.shares)) as children:
        if len(work.shares) > 1 and not any(work.output.glob(ROWS)):
            # Nothing is there that they might not have to compute: they load the model while this process does.
            make_folder(work.output)
            write_run_file(work)
            children.start(range(2, len(work.shares) + 1))
        return _complete(team, work, watch, children)


def write_run_file(work: Work) -> None:
    """What repeats or continues this run, and what the processes read that it starts."""
    write_whole(work.output / NAME, as_run_file(work.settings, work.output).encode())


def _complete(team: Team, work: Work, watch: Watch, children: Children) -> Outcome | None:
    model = load_model(work.settings, config=work.config)
    prepare_model(model, work.settings.policies)
    check_ids(model, work.highest, work.settings)
    decided = meanings(work.settings, model, empty_caches(model.config, work.settings, work.variants))
    if not team.writes:
        # This process holds a part of the model; the main one writes.
        for _ in work.compute(model, team.same(set()), []):
            pass
        team.meet([])
        return None
    run = _Run(team, work, watch, ResultFolder(work.output, decided, work.key_of, work.prompts.get, row_key))
    run.begin(model)
    run.compute(model, children)
    run.failures = team.meet(run.failures)
    if is_child():
        print(json.dumps(run.failures))
    return run.close() if run.shows else None


class _Run:
    """What one process does of a run."""

    def __init__(self, team: Team, work: Work, watch: Watch, folder: ResultFolder) -> None:
        self.team, self.settings, self.work, self.watch, self.folder = team, work.settings, work, watch, folder
        self.keys = work.prompts.keys()
        self.failures: list[tuple[str, int]] = []
        self.started = time.perf_counter()
        self.begun: dict[Key, float] = {}
        self.notes: list[str] = []
        self.elsewhere = 0
        self.shows = team.is_main and not is_child()

    def begin(self, model: Any) -> None:
        """Write down what this run is."""
        folder = self.folder
        self.notes += settings_differences(folder)
        if self.shows:
            write_run_file(self.work)
            # Of the last command that asked under these settings: where its rows were computed.
            folder.meta = {name: fact for name, fact in folder.meta.items() if name in _KEPT}
            rows = {"finished": len(folder.rows), "wanted": len(self.keys)}
            facts = {"settings": self.settings.as_json(), **self.work.facts, "failures": [], "rows": rows}
            if len(folder.rows) < len(self.keys):
                facts |= self._place()
            facts |= {"weights": folder.meanings[""]["weights"], "model": model_facts(model)}
            folder.write_meta({**facts, "workers": len(self.work.shares)})
        self.elsewhere = folder.lines_of_others()
        self._tell("")

    def _place(self) -> dict[str, Any]:
        """Where the missing rows are computed."""
        now = place_facts(self.team.size)
        before = {name: self.folder.meta[name] for name in now if name in self.folder.meta}
        if not self.folder.rows or not before:
            return now
        if before["versions"] != now["versions"]:
            pairs = ((name, before["versions"].get(name), version) for name, version in now["versions"].items())
            differences = ", ".join(f"{name} {old} then, {new} now" for name, old, new in pairs if old != new)
            self.notes.append(f"some rows are of an earlier run with other versions: {differences}")
        return now

    def compute(self, model: Any, children: Children) -> None:
        """Do the jobs, some of them in other processes."""
        LISTENER.set(self._hear)
        finished = self.team.same(set(self.folder.rows))
        shards = (number for number, share in enumerate(self.work.shares[1:], 2) if missing(share, finished))
        children.start(shards)
        for rows in self.work.compute(model, finished, self.failures):
            self.folder.add(rows)
            row = rows[-1] if rows else {}
            self._tell(" ".join(str(row[name]) for name in _NAMES if row.get(name) is not None))
            children.check()
        self.failures += children.wait(lambda: self._tell("the other processes"))

    def close(self) -> Outcome:
        """Put everything together that is there."""
        folder, keys = self.folder, self.keys
        folder.read()
        ordered = [folder.rows[key] for key in keys if key in folder.rows]
        seconds = round(folder.meta.get("seconds", 0.0) + time.perf_counter() - self.started, 1)
        failures = [{"reason": reason, "rows": rows} for reason, rows in self.failures]
        facts = {"complete": len(ordered) == len(keys), "failures": failures}
        folder.write_meta({**facts, "rows": {"finished": len(ordered), "wanted": len(keys)}, "seconds": seconds})
        self.watch(Progress(len(ordered), len(keys)))
        mine = {key for share in self.work.shares for _, own in share for key in own}
        absent = len(mine - folder.rows.keys()) if self.team.is_shard else len(keys) - len(ordered)
        return Outcome(folder, ordered, absent, len(keys) - len(ordered) - absent, self.failures, self.notes)

    def _hear(self, reading: Reading) -> None:
        self.begun |= dict.fromkeys(reading.keys, reading.done / reading.total)
        self._tell(f"{reading.label}: {reading.done:,} of {reading.total:,} tokens")

    def _tell(self, last: str) -> None:
        total, folder = len(self.keys), self.folder
        finished = min(len(folder.rows) + folder.lines_of_others() - self.elsewhere, total)
        begun = sum(share for key, share in self.begun.items() if key not in folder.rows)
        self.watch(Progress(finished, total, last, min(begun, total - finished)))
