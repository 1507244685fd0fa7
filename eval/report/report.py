"""The report of one or many runs: tables, plots, and a page that holds them all."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..errors import UserError
from ..tables.formats import markdown, to_csv, to_latex, to_markdown
from ..tables.plot_style import save
from .comparison import flat
from .figures import Plot
from .missing import unfinished
from .pages.contents import sections
from .pages.examples import Example, examples
from .pages.headline import headlines
from .pages.page import Page, Section, render
from .rules import rules
from .runs import Run, load_runs

FILES = "report.html, report.md, tables/ (CSV, LaTeX), plots/ (SVG)"

#: What stands at the top of what the last command wrote down.
_FACTS = (
    "settings.block_size settings.heads settings.trust_remote_code settings.allow_pickle model.dtype "
    "model.attn_implementation model.parameters settings.max_length settings.question_aware hardware.cpu seconds "
    "versions.transformers versions.torch"
).split()


def run_report(folders: list[Path], output: Path | None) -> None:
    """Read result folders and write tables, plots and a page.

    Args:
        folders: each written by `paged-eviction eval --output`.
        output: where to; `report` in the first folder if not given.

    Raises:
        UserError: a folder is absent or damaged, none has answers, or the output cannot be written.
    """
    skipped: list[str] = []
    runs = load_runs(folders, skipped)
    target = output or runs[0].sources[0].folder / "report"
    try:
        page = write_report(runs, target, skipped)
    except OSError as error:
        raise UserError(f"cannot write to {target}: {error.strerror or error}; choose another --output") from error
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for warning in page.warnings:
        console.print(f"note: {warning}", markup=False)
    console.print(f"written to {target}: {FILES}", markup=False)


def write_report(runs: Sequence[Run], target: Path, notes: Sequence[str] = ()) -> Page:
    """Write everything into the folder `target`; returns what the page shows, the notes first."""
    for folder in ("tables", "plots"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    written = (_write_section(section, target) for section in sections(runs))
    shown = [section for section in written if not section.is_empty]
    names = [name for section in shown for name in (section.name, *(table.name for table in section.tables))]
    page = Page(
        title=_title(runs),
        headlines=headlines(runs),
        facts=_facts(runs),
        warnings=[*notes, *_warnings(runs)],
        sections=shown,
        examples=list(_examples(runs)),
        rules=rules(runs, names),
        metadata=[(str(source.folder), _entries(source.meta)) for run in runs for source in run.sources],
    )
    (target / "report.html").write_text(render(page), "utf-8", errors="backslashreplace")
    (target / "report.md").write_text(_markdown(page), "utf-8", errors="backslashreplace")
    return page


def _write_section(section: Section, target: Path) -> Section:
    """The section with its pictures, written like its tables."""
    for table in section.tables:
        for ending, make in (("csv", to_csv), ("tex", to_latex)):
            path = target / "tables" / f"{table.name}.{ending}"
            path.write_text(make(table), "utf-8", errors="backslashreplace")
    return replace(section, plots=[_written(plot, target) for plot in section.plots])


def _written(plot: Plot, target: Path) -> Plot:
    name = re.sub(r"[^\w.-]", "_", plot.name)
    file = target / "plots" / f"{name}.svg"
    save(plot.figure, file)
    source = "data:image/svg+xml;base64," + b64encode(file.read_bytes()).decode("ascii")
    panels = plot.figure.axes[0].get_gridspec().ncols
    return replace(plot, name=name, figure=None, panels=panels, source=source)


def _title(runs: Sequence[Run]) -> str:
    models = dict.fromkeys(str(source.settings.get("model", "")) for run in runs for source in run.sources)
    names = ", ".join(filter(None, models)) or runs[0].sources[0].folder.name
    return f"Cache eviction: {names}"


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    variants = [variant for run in runs for variant in run.variants]
    tasks = dict.fromkeys(task for run in runs for task in run.tasks)
    rows = sum(len(run.rows) + len(run.texts) for run in runs)
    facts = [flat(source.meta) for run in runs for source in run.sources]
    facts_shown = [
        ("Runs", "; ".join(run.label for run in runs) if len(runs) > 1 else ""),
        ("Tasks", str(len(tasks)) if len(tasks) > 6 else ", ".join(tasks)),
        ("Policies", ", ".join(dict.fromkeys(policy for policy, _ in variants))),
        ("Budgets", ", ".join(dict.fromkeys(budget for _, budget in variants))),
        ("Rows", str(rows)),
    ]
    for name in _FACTS:
        values = dict.fromkeys(str(fact[name]) for fact in facts if fact.get(name) is not None)
        facts_shown.append((name, ", ".join(values)))
    return [(label, value) for label, value in facts_shown if value]


def _warnings(runs: Sequence[Run]) -> list[str]:
    """What is missing or odd, under the label of the run where there are several."""
    warnings = []
    for run in runs:
        notes = [note for source in run.sources for note in source.notes]
        warnings += [f"{run.label}: {note}" if len(runs) > 1 else note for note in (*unfinished(run), *notes)]
    return warnings


def _examples(runs: Sequence[Run]) -> Iterator[tuple[str, Sequence[Example]]]:
    for run in runs:
        for task in run.tasks:
            if shown := examples(run, task):
                yield f"{run.label}: {task}" if len(runs) > 1 else task, shown


def _entries(meta: dict[str, object]) -> list[tuple[str, str]]:
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in flat(meta).items()
        if name
    ]


def _markdown(page: Page) -> str:
    lines = [f"# {markdown(page.title)}", ""]
    lines += [f"**{markdown(f'{label}: {sentence}' if label else sentence)}**\n" for label, sentence in page.headlines]
    lines += [f"- {name}: {markdown(value)}" for name, value in page.facts] + [""]
    lines += [f"> {markdown(warning)}\n" for warning in page.warnings]
    for section in page.sections:
        lines += [f"## {section.title}", "", *([f"{markdown(section.text)}\n"] if section.text else [])]
        lines += [f"![{markdown(picture.caption)}](plots/{picture.name}.svg)\n" for picture in section.plots]
        lines += map(to_markdown, section.tables)
    lines += ["## How to read this", "", *(f"- **{term}.** {markdown(text)}" for term, text in page.rules), ""]
    return "\n".join(lines)
