"""What the site does to the pages, which are written for GitHub: notebooks, links that lead out, navigation."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
SOURCE, TARGET = DOCS.parent / "notebooks", DOCS / "notebooks"
SUFFIXES = (".ipynb", ".png", ".svg")
#: The pages by reader; a page that is not here is a warning of Sphinx, which is an error.
NAVIGATION = {
    "Use": ("notebooks/quickstart", "guide", "footguns", "serving", "vllm"),
    "Choose": ("choosing", "real_models", "results"),
    "Evaluate": ("evaluate", "longbench", "cli"),
    "Understand": ("how_it_works", "few_bits", "endless_text", "comparison"),
    "Reference": tuple(f"reference/{name}" for name in ("policies", "allocators", "families", "api")),
    "Contribute": ("own_policy", "map", "correctness"),
}
_NOTEBOOK = re.compile(r"\]\(\.\./(notebooks/[\w/]+)\.(ipynb|png|svg)")
#: Links that lead out of the pages, from a folder of them or from above.
_OUTSIDE = {depth: re.compile(r"\[([^\]]+)\]\((?:\.\./){" + str(depth) + r"}[^)]+\)") for depth in (1, 2)}


def copy_notebooks(app: Sphinx) -> None:
    """Make `docs/notebooks`, which git ignores, the same as `notebooks`; what has not changed is not touched."""
    wanted = {path.relative_to(SOURCE): path for path in SOURCE.rglob("*") if path.suffix in SUFFIXES}
    for name, path in wanted.items():
        target = TARGET / name
        if not target.exists() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for path in TARGET.rglob("*"):
        if path.is_file() and path.relative_to(TARGET) not in wanted:
            path.unlink()


def for_the_site(app: Sphinx, name: str, content: list[str]) -> None:
    """Notebooks lie beside the pages here; other files of the repository are named without a link."""
    if name.startswith("notebooks/"):
        return
    content[0] = _OUTSIDE[1 + name.count("/")].sub(r"\1", _NOTEBOOK.sub(r"](\1.\2", content[0]))
    if name == "index":
        content[0] += "".join(_toctree(caption, pages) for caption, pages in _navigation().items())


def _navigation() -> dict[str, tuple[str, ...]]:
    shown = {page for pages in NAVIGATION.values() for page in pages}
    notebooks = sorted(f"notebooks/{path.stem}" for path in SOURCE.glob("*.ipynb"))
    return {**NAVIGATION, "Notebooks": tuple(page for page in notebooks if page not in shown)}


def _toctree(caption: str, pages: tuple[str, ...]) -> str:
    return "\n\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", for_the_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
