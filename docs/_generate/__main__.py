"""Write the parts of pages that are made of the code and of measured results.

    python docs/_generate            # or: make docs-pages

A page has them between `<!-- generated: NAME ARGUMENT -->` and `<!-- end -->`; a test says which of them are stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # which know the rows that they wrote
sys.path.append(str(Path(__file__).resolve().parents[2] / "serving"))  # a package of its own
import allocator_pages
import api_pages
import command_pages
import comparison_table
import endless_picture
import long_pages
import longbench_table
import measured
import memory_tables
import peers_tables
import pictures
import policy_pages
import policy_scores
import prefill_tables
import quality_picture
import real_tables
import speed_tables

DOCS = Path(__file__).resolve().parents[1]
PART = re.compile(r"^(<!-- generated: ([a-z-]+)(?: ([^\n]+?))? -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
GENERATORS: dict[str, Callable[[str], str]] = {
    "allocators": allocator_pages.sections,
    "api": api_pages.sections,
    "calibrated": policy_pages.calibrated,
    "commands": command_pages.sections,
    "comparison": comparison_table.page,
    "counts": policy_pages.counts,
    "decode": measured.decode,
    "endless-text": measured.endless_text,
    "heads-apart": real_tables.heads_apart,
    "lazy-reuse": measured.lazy_reuse,
    "long-answers": long_pages.long_answers,
    "long-front": long_pages.front,
    "long-rows": long_pages.long_rows,
    "long-ways": long_pages.long_ways,
    "longbench": longbench_table.longbench,
    "memory": memory_tables.memory,
    "peers": peers_tables.peers,
    "policies": policy_pages.sections,
    "policy-scores": policy_scores.policy_scores,
    "policy-table": policy_pages.overview,
    "policies-others": policy_pages.others,
    "positions": measured.positions,
    "peers-speed": speed_tables.speed,
    "prefill-time": prefill_tables.prefill_time,
    "published": real_tables.published,
    "recent-tokens": measured.recent_tokens,
    "update-times": measured.update,
}

#: Modules with the path of an image, and the function that draws it.
DRAWN = (quality_picture, speed_tables, endless_picture)


def fill(text: str) -> str:
    """A page with its generated parts made anew."""
    return PART.sub(lambda part: f"{part[1]}\n{GENERATORS[part[2]](part[3] or '')}\n\n{part[4]}", text)


def pages() -> Iterator[tuple[Path, str, str]]:
    """Each file with generated parts: its path, what stands there, and what should."""
    for drawn in DRAWN:
        yield drawn.IMAGE, drawn.IMAGE.read_text("utf-8") if drawn.IMAGE.exists() else "", pictures.svg(drawn.draw())
    for path in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("reference/*.md"))):
        text = path.read_text("utf-8")
        if PART.search(text):
            yield path, text, fill(text)


if __name__ == "__main__":
    for file, before, after in pages():
        if before != after:
            file.write_text(after, "utf-8")
            print(f"wrote {file.relative_to(DOCS.parent)}")
