"""A whole run: what its folder lacks is computed, by one process or by several, then summarised and drawn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RowsFailed
from ..models.environment import model_facts
from ..models.loading import check_ids, load_model
from ..options.run_file import NAME, as_run_file
from ..options.settings import TextSettings
from ..progress import LISTENER, Progress, Reading, Watch
from ..store.checks import Key, row_key
from ..store.results import ROWS, ResultFolder, Row, make_folder, settings_differences, write_whole
from .facts import place_facts
from .meaning import meanings
from .plans import Plan, Share, plan_tasks, plan_texts
from .processes.child import is_child
from .processes.children import Children, default_workers
from .processes.distributed import Team, join
from .requests import Request
from .variants import empty_caches

#: What a row that was finished last is called.
_NAMES = ("task", "length", "policy", "budget")
#: Facts that a command takes over from the last one with the same settings.
_KEPT = ("digests", "versions", "commit", "plugins", "hardware", "seconds")


@dataclass(frozen=True)
class Outcome:
    """A run after its last job.

    Attributes:
        path: the folder where it was written.
        rows: all finished rows, in order.
        missing: number of rows that should be there and are not.
        others: number of rows that other shards are to bring.
        failures: reasons, and the number of rows that are missing for each.
        notes: what is worth knowing of the folder.
    """

    path: Path
    rows: list[Row]
    missing: int
    others: int
    failures: list[tuple[str, int]]
    notes: list[str]


def evaluate(request: Request[Any], watch: Watch, say: Callable[[str], None] = lambda text: None) -> Outcome | None:
    """Answer every question, or predict every text, under every policy and budget.

    Args:
        request: the run.
        watch: told of progress.
        say: told what a reader has to know of the data, before anything is computed.

    Returns:
        None in worker processes, and in all processes of a launcher but the main one.
    """
    settings = request.settings
    team = join(settings, request.options.shard)
    plan = (plan_texts if isinstance(settings, TextSettings) else plan_tasks)(request, team)
    for note in plan.notes:
        say(note)
    count = (request.options.workers or default_workers(settings, plan.jobs)) if team.size == 1 else 1
    teams = [Team(rank, count, leads=rank == 0) for rank in range(count)] if count > 1 else [team]
    run = _Run(request, plan, teams, watch)
    with Children(request.output / NAME, count) as children:
        if count > 1 and not any(request.output.glob(ROWS)):
            # Nothing is there that they might not have to compute: they load the model while this process does.
            make_folder(request.output)
            run.write_run_file()
            children.start(range(2, count + 1))
        outcome = run.complete(children)
    if outcome is not None and not outcome.others:
        plan.finish(outcome.path, outcome.rows)
    return outcome


def missing(share: Share, finished: Set[Key]) -> list[tuple[Any, Set[Key]]]:
    """The jobs that have rows to compute, with the keys of all their rows."""
    return [(job, set(keys)) for job, keys in share if not finished >= set(keys)]


class _Run:
    """What one process does of a run.

    Args:
        teams: this process in its team, then those that it starts, each with a share.
    """

    folder: ResultFolder

    def __init__(self, request: Request[Any], plan: Plan, teams: Sequence[Team], watch: Watch) -> None:
        self.settings, self.output = request.settings, request.output
        self.plan, self.team, self.watch = plan, teams[0], watch
        self.shares = [plan.share(team) for team in teams]
        self.keys = plan.prompts.keys()
        self.failures: list[tuple[str, int]] = []
        self.started = time.perf_counter()
        self.begun: dict[Key, float] = {}
        self.notes: list[str] = []
        self.elsewhere = 0
        self.shows = self.team.is_main and not is_child()

    def write_run_file(self) -> None:
        """What repeats or continues this run, and what the processes read that it starts."""
        write_whole(self.output / NAME, as_run_file(self.settings, self.output).encode())

    def complete(self, children: Children) -> Outcome | None:
        """Compute what the folder lacks of this process's jobs."""
        settings, plan, team = self.settings, self.plan, self.team
        model = load_model(settings)
        check_ids(model, plan.highest, settings)
        decided = meanings(settings, model, empty_caches(model.config, settings, plan.variants))
        self.folder = ResultFolder(self.output, decided, row_key, plan.prompts.get)
        self._begin(model)
        self._compute(model, children)
        self.failures = team.meet(self.failures)
        if is_child():
            print(json.dumps(self.failures))
        return self._close() if self.shows else None

    def _begin(self, model: Any) -> None:
        """Write down what this run is."""
        folder = self.folder
        self.notes += settings_differences(folder)
        if self.shows:
            self.write_run_file()
            # Of the last command that asked under these settings: where its rows were computed.
            folder.meta = {name: fact for name, fact in folder.meta.items() if name in _KEPT}
            rows = {"finished": len(folder.rows), "wanted": len(self.keys)}
            facts = {"settings": self.settings.as_json(), **self.plan.facts, "failures": [], "rows": rows}
            if len(folder.rows) < len(self.keys):
                facts |= place_facts(self.team.size)
                self._compare_versions(facts["versions"])
            facts |= {"weights": folder.meanings[""]["weights"], "model": model_facts(model)}
            folder.write_meta({**facts, "workers": len(self.shares)})
        self.elsewhere = folder.lines_of_others()
        self._tell("")

    def _compare_versions(self, now: dict[str, Any]) -> None:
        """Note where the missing rows are computed by other versions than those that are there."""
        before = self.folder.meta.get("versions", now) if self.folder.rows else now
        changed = [f"{name} {before.get(name)} then, {now[name]} now" for name in now if before.get(name) != now[name]]
        if changed:
            self.notes.append(f"some rows are of an earlier run with other versions: {', '.join(changed)}")

    def _compute(self, model: Any, children: Children) -> None:
        """Do the jobs, some of them in other processes."""
        LISTENER.set(self._hear)
        finished = set(self.folder.rows)
        children.start(number for number, share in enumerate(self.shares[1:], 2) if missing(share, finished))
        for rows in self._rows(model, finished):
            self.folder.add(rows)
            row = rows[-1] if rows else {}
            self._tell(" ".join(str(row[name]) for name in _NAMES if row.get(name) is not None))
            children.check()
        self.failures += children.wait(lambda: self._tell("waiting for the other processes"))

    def _rows(self, model: Any, finished: Set[Key]) -> Iterator[list[Row]]:
        """Rows of this process's share that are not `finished`, as they come; what could not be computed is noted."""
        for job, keys in missing(self.shares[0], finished):
            try:
                yield from self.plan.run(model, self.plan.tokenizer, self.settings, job, finished & keys)
            except RowsFailed as error:
                self.failures.append((error.reason, len(error.keys)))

    def _close(self) -> Outcome:
        """Put everything together that is there."""
        folder, keys = self.folder, self.keys
        folder.read()
        ordered = [folder.rows[key] for key in keys if key in folder.rows]
        seconds = round(folder.meta.get("seconds", 0.0) + time.perf_counter() - self.started, 1)
        failures = [{"reason": reason, "rows": rows} for reason, rows in self.failures]
        facts = {"complete": len(ordered) == len(keys), "failures": failures}
        folder.write_meta({**facts, "rows": {"finished": len(ordered), "wanted": len(keys)}, "seconds": seconds})
        self.watch(Progress(len(ordered), len(keys)))
        mine = {key for share in self.shares for _, own in share for key in own}
        absent = len(mine - folder.rows.keys()) if self.team.is_shard else len(keys) - len(ordered)
        return Outcome(folder.path, ordered, absent, len(keys) - len(ordered) - absent, self.failures, self.notes)

    def _hear(self, reading: Reading) -> None:
        self.begun |= dict.fromkeys(reading.keys, reading.done / reading.total)
        self._tell(f"{reading.label}: {reading.done:,} of {reading.total:,} tokens")

    def _tell(self, last: str) -> None:
        total, folder = len(self.keys), self.folder
        finished = min(len(folder.rows) + folder.lines_of_others() - self.elsewhere, total)
        begun = sum(share for key, share in self.begun.items() if key not in folder.rows)
        self.watch(Progress(finished, total, last, min(begun, total - finished)))
