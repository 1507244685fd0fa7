"""The report of one or many runs: tables, plots, and a page in Markdown that shows them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console

from ..console import say
from ..errors import UserError
from ..tables.formats import markdown, to_csv, to_markdown
from ..tables.plot_style import save
from ..tables.table import Table
from .figures import plots
from .measures import agreement_table, course_table, efficiency_tables, text_table
from .runs import Run, load_runs
from .scores import score_tables

FILES = "report.md, tables/ (CSV), plots/ (SVG)"
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
    say(console, f"written to {target}: {FILES}")


def write_report(runs: Sequence[Run], target: Path, notes: Sequence[str] = ()) -> None:
    """Write everything into the folder `target`."""
    for folder in ("tables", "plots"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    models = dict.fromkeys(str(run.meta.get("settings", {}).get("model", "")) for run in runs)
    title = ", ".join(filter(None, models)) or runs[0].folder.name
    lines = [f"# Cache eviction: {markdown(title)}", "", *(f"> {markdown(note)}\n" for note in notes)]
    for table in tables(runs):
        (target / "tables" / f"{table.name}.csv").write_text(to_csv(table), "utf-8", errors="backslashreplace")
        lines.append(to_markdown(table))
    for name, caption, figure in plots(runs):
        file = f"plots/{name}.svg"
        save(figure, target / file)
        lines.append(f"![{markdown(caption)}]({file})\n")
    (target / "report.md").write_text("\n".join(lines), "utf-8", errors="backslashreplace")


def tables(runs: Sequence[Run]) -> Iterator[Table]:
    """All that have a number."""
    yield from score_tables(runs)
    yield from filter(None, (course_table(runs), text_table(runs), agreement_table(runs)))
    yield from efficiency_tables(runs)
    yield from filter(None, [differences_of(runs)])


def differences_of(runs: Sequence[Run]) -> Table | None:
    """In which settings, versions and hardware several runs differ; what one run is stands in its `run.*.json`."""
    facts = [_flat({name: run.meta.get(name) for name in _FACTS}) for run in runs]
    names = dict.fromkeys(name for fact in facts for name in fact)
    lines = {name: [fact.get(name, "") for fact in facts] for name in names}
    lines = {name: values for name, values in lines.items() if len(set(values)) > 1}
    if not lines:
        return None
    frame = DataFrame.from_dict(lines, orient="index", columns=[run.label for run in runs], dtype=object)
    return Table("facts", "Where the runs differ", frame.rename_axis("what"))


def _flat(content: Any, name: str = "") -> dict[str, str]:
    """Nested content with dotted names, as text."""
    if isinstance(content, dict) and content:
        parts = [_flat(value, f"{name}.{key}" if name else str(key)) for key, value in content.items()]
        return {key: value for part in parts for key, value in part.items()}
    text = ", ".join(map(str, content)) if isinstance(content, list) else "" if content is None else str(content)
    return {name: text if len(text) <= 120 else f"{text[:117]}..."}
