"""Run notebooks from top to bottom and write them with their outputs: `python notebooks/execute.py [FILE...]`.

Without files, all that lie next to this one. They run in an empty folder, as if nothing but the package were there.
What says more about this machine than about the notebook is left out: stderr, times of execution, widgets.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).parent
#: Seconds for one cell, on however busy a machine.
LIMIT = 1800


def run(notebook: Any, folder: Path) -> None:
    """Execute all cells in place, with `folder` as the working directory."""
    notebook.metadata.pop("widgets", None)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=resources).execute()


def clean(notebook: Any) -> None:
    """Leave out what changes from run to run, and note which sources these outputs are of."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _joined([output for output in cell.outputs if output.get("name") != "stderr"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "executed": digest(notebook),
    }


def _joined(outputs: list[Any]) -> list[Any]:
    """Text that was printed in several pieces is one output: where it was cut is chance."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def digest(notebook: Any) -> str:
    """Of the sources of all code cells."""
    sources = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def main() -> None:
    """Run those that were named, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        notebook, started = nbformat.read(path, as_version=4), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, Path(folder))
        clean(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
