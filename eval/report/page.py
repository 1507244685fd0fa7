"""The report of one or many runs: tables, plots, and a page in Markdown that shows them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pandas import concat, json_normalize
from rich.console import Console

from ..console import say
from ..errors import UserError
from .means import curves
from .plots import pictures, save
from .runs import Run, load_runs
from .table import Table, markdown
from .tables import measure_tables, score_tables, text_table

#: What the last command of a run wrote down that decides its numbers.
_FACTS = ("settings", "versions", "hardware", "model", "weights")


def run_report(folders: list[Path], output: Path | None) -> None:
    """Read result folders and write tables, plots and a page.

    Args:
        folders: each written by `paged-eviction eval --output`.
        output: where to; `report` in the first folder if not given.

    Raises:
        UserError: a folder is absent or damaged, none has answers, or the output cannot be written.
    """
    notes: list[str] = []
    runs = load_runs(folders, notes)
    notes += [note for run in runs for note in run.notes]
    target = output or runs[0].folder / "report"
    try:
        write_report(runs, target, notes)
    except OSError as error:
        raise UserError(f"cannot write to {target}: {error.strerror or error}; choose another --output") from error
    console = Console(stderr=True)
    for note in notes:
        say(console, f"note: {note}")
    say(console, f"written to {target}: report.md, tables/ (CSV), plots/ (SVG)")


def write_report(runs: Sequence[Run], target: Path, notes: Sequence[str] = ()) -> None:
    """Write everything into the folder `target`."""
    for folder in ("tables", "plots"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    models = dict.fromkeys(str(run.meta.get("settings", {}).get("model", "")) for run in runs)
    title = ", ".join(filter(None, models)) or runs[0].folder.name
    lines = [f"# Cache eviction: {markdown(title)}", "", *(f"> {markdown(note)}\n" for note in notes)]
    frame, texts = concat([run.frame for run in runs]), concat([run.texts for run in runs])
    tables = [*score_tables(frame), *text_table(curves(texts)), *measure_tables(frame), *differences_of(runs)]
    for table in tables:
        (target / "tables" / f"{table.name}.csv").write_text(table.csv(), "utf-8", errors="backslashreplace")
        lines.append(table.markdown())
    for name, caption, figure in pictures(runs):
        save(figure, target / "plots" / f"{name}.svg")
        lines.append(f"![{markdown(caption)}](plots/{name}.svg)\n")
    (target / "report.md").write_text("\n".join(lines), "utf-8", errors="backslashreplace")


def differences_of(runs: Sequence[Run]) -> Iterator[Table]:
    """In which settings, versions and hardware several runs differ; what one run is stands in its `run.*.json`."""
    facts = [json_normalize({name: run.meta.get(name) for name in _FACTS}).map(_text) for run in runs]
    frame = concat(facts, ignore_index=True).fillna("").T.set_axis([run.label for run in runs], axis=1)
    frame = frame[frame.nunique(axis=1) > 1].rename_axis("what")
    if len(frame):
        yield Table("facts", "Where the runs differ", frame)


def _text(fact: Any) -> str:
    text = ", ".join(map(str, fact)) if isinstance(fact, list) else "" if fact is None else str(fact)
    return text if len(text) <= 120 else f"{text[:117]}..."
