"""The notebooks run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_paged_eviction_eval import embedded

nbclient = pytest.importorskip("nbclient", reason="the extra `dev` is not installed")
pytest.importorskip("ipykernel", reason="no kernel to run notebooks")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.skipif(not (embedded.path() / "config.json").exists(), reason="no embedded model in this checkout")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
