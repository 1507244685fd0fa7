"""Parts of pages that are made of the code and of measured results, each time the pages are built.

A line `<!-- generate: NAME ARGUMENT -->` in a page stands for the MyST text that the generator of that name returns.
Nothing is written into the tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import allocator_pages
import command_pages
import comparison_table
import measured
import peers_tables
import policy_pages
import prefill_tables
import recall_tables
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

MARKER = re.compile(r"^<!-- generate: ([a-z-]+)(?: ([^\n]+?))? -->$", re.MULTILINE)
GENERATORS: dict[str, Callable[[str], str]] = {
    "allocators": allocator_pages.sections,
    "calibrated": policy_pages.calibrated,
    "commands": command_pages.sections,
    "comparison": comparison_table.page,
    "decode": measured.decode,
    "endless-text": measured.endless_text,
    "lazy-reuse": measured.lazy_reuse,
    "peers": peers_tables.peers,
    "policies": policy_pages.sections,
    "policy-table": policy_pages.overview,
    "positions": measured.positions,
    "prefill-time": prefill_tables.prefill_time,
    "recall": recall_tables.recall,
    "recall-bytes": recall_tables.same_bytes,
    "recall-shape": recall_tables.shape,
    "replacement": recall_tables.replacement,
    "recent-tokens": measured.recent_tokens,
}


def fill(text: str) -> str:
    """Replace all markers of a page."""
    return MARKER.sub(lambda found: GENERATORS[found[1]](found[2] or ""), text)


def _fill_page(app: Sphinx, name: str, content: list[str]) -> None:
    try:
        content[0] = fill(content[0])
    except KeyError as error:
        raise ExtensionError(f"{name}: there is no generator {error}") from error


def _pages_with_markers(app: Sphinx, env: BuildEnvironment, *changed: set[str]) -> list[str]:
    """Those are read anew in every build: what they are made of is not in their file."""
    return [name for name in env.found_docs if MARKER.search(env.doc2path(name).read_text("utf-8"))]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill_page)
    app.connect("env-get-outdated", _pages_with_markers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
