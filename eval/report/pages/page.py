"""One HTML page with everything in it: no script, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tables.table import Table
from ..figures import Plot
from .examples import Example, cut

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        name: its anchor.
        plots: before the tables; drawn as they are taken, so that few are alive at a time.
    """

    name: str
    title: str
    tables: Sequence[Table] = ()
    plots: Iterable[Plot] = ()
    text: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.tables or self.text or self.plots)


@dataclass(frozen=True)
class Page:
    """What the template fills in.

    Attributes:
        headlines: what was found, label of the run and sentence.
        facts: short name and value, at the top.
        warnings: what is missing or odd.
        examples: per heading of a task.
        rules: how to read the numbers, term and explanation.
        metadata: per run, name and value of everything that its last command wrote down.
    """

    title: str
    headlines: Sequence[tuple[str, str]]
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    sections: Sequence[Section]
    examples: Sequence[tuple[str, Sequence[Example]]]
    rules: Sequence[tuple[str, str]]
    metadata: Sequence[tuple[str, Sequence[tuple[str, str]]]]


def render(page: Page) -> str:
    """The page; whatever stands in the results is shown as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cut"] = cut
    values: dict[str, Any] = {"page": page, "style": (_TEMPLATES / "style.css").read_text("utf-8")}
    return environment.get_template("page.html").render(values)
