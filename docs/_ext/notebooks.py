"""The committed notebooks and their pictures, copied to where Sphinx looks for pages. They are shown, not run."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
SOURCE, TARGET = DOCS.parent / "notebooks", DOCS / "notebooks"
SUFFIXES = (".ipynb", ".png", ".svg")


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


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", copy_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
