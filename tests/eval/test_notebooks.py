"""The notebooks run from top to bottom, and what is committed is what a run gives."""

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval import embedded
from scripts import load

pytest.importorskip("nbclient", reason="the extra `dev` is not installed")
pytest.importorskip("ipykernel", reason="no kernel to run notebooks")
nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: A path of the machine that a notebook was run on.
LOCAL_PATH = re.compile(r"(?<![\w.])(/(work|home|root|tmp|Users|opt|mnt|var/folders)/\w|[A-Z]:\\\w)|site-packages")

#: Runs before the cells of a notebook: what it shows can be read.
CHECK_PICTURES = f"""
import sys

import matplotlib.pyplot as plt

sys.path.append({str(Path(__file__).parents[1] / "support")!r})
import legible


def checked_show(*args, show=plt.show, **kwargs):
    problems = [problem for number in plt.get_fignums() for problem in legible.of_figure(plt.figure(number))]
    assert not problems, problems
    return show(*args, **kwargs)


plt.show = checked_show
"""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[str]:
    """What a cell gives: printed text, or the types of what it displays."""
    kinds_seen = []
    for output in cell.outputs:
        kind = output.get("name") or output.get("ename") or " ".join(sorted(output.get("data", {})))
        if kind != "stderr" and (kind != "stdout" or kinds_seen[-1:] != ["stdout"]):
            kinds_seen.append(kind)
    return kinds_seen


def texts(notebook: Any) -> Iterator[str]:
    """All outputs that are text."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            data = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
            yield json.dumps([output.get("text", ""), data, output.get("traceback", "")])


@pytest.mark.notebooks
@pytest.mark.skipif(not (embedded.path() / "config.json").exists(), reason="no embedded model in this checkout")
@every_notebook
def test_it_runs_and_gives_the_kinds_of_output_that_are_committed(path: Path, tmp_path: Path) -> None:
    """In an empty folder: a notebook needs nothing but the package, and leaves nothing in the tree."""
    committed, notebook = read(path), read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(CHECK_PICTURES))
    load(FOLDER / "execute.py").run(notebook, tmp_path)
    del notebook.cells[0]
    for before, after in zip(code_cells(committed), code_cells(notebook), strict=True):
        assert kinds(after) == kinds(before), before.source


@every_notebook
def test_it_installs_the_package_where_it_is_missing_and_only_there(path: Path) -> None:
    installs = [cell for cell in code_cells(read(path))[:2] if "pip install" in cell.source]
    assert len(installs) == 1, "one of the first two code cells"
    assert "find_spec" in installs[0].source or "ImportError" in installs[0].source
    assert not installs[0].outputs, "it was run where the package is, so it had nothing to do"


@every_notebook
def test_committed_outputs_are_those_of_its_sources(path: Path) -> None:
    notebook = read(path)
    again = f"run: python notebooks/execute.py notebooks/{path.name}"
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), again
    assert notebook.metadata.get("executed") == load(FOLDER / "execute.py").digest(notebook), (
        f"its code was changed since; {again}"
    )


@every_notebook
def test_committed_outputs_are_fit_to_be_seen(path: Path) -> None:
    """Pictures, no errors and warnings, nothing about the machine."""
    notebook = read(path)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    pictures = {"image/png", "image/svg+xml"}
    assert any(pictures & output.get("data", {}).keys() for output in outputs), "no picture"
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not [cell for cell in notebook.cells if "execution" in cell.metadata], "times of execution"
    for text in texts(notebook):
        match = LOCAL_PATH.search(text)
        assert match is None, text[max(match.start() - 40, 0) : match.end() + 40]


@every_notebook
def test_links_between_notebooks_lead_somewhere(path: Path) -> None:
    for cell in read(path).cells:
        for target in re.findall(r"\]\(((?!https?:)[^)#]+)", cell.source if cell.cell_type == "markdown" else ""):
            assert (FOLDER / target).exists(), target


def shown_commands() -> list[str]:
    """`paged-eviction ...` in the shell blocks of all notebooks, without the launcher."""
    commands = {}
    for path in NOTEBOOKS:
        for cell in read(path).cells:
            blocks = re.findall(r"```bash\n(.*?)```", cell.source, re.DOTALL) if cell.cell_type == "markdown" else []
            for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
                command = re.fullmatch(r"\s*(paged-eviction|.* -m hf_paged_eviction_eval) (.*)", line)
                if command:
                    commands[" ".join(command.group(2).replace("$size", "16").split())] = None
    return list(commands)


@pytest.mark.parametrize("command", shown_commands())
def test_shown_commands_are_understood(command: str) -> None:
    """Options, tasks, policies and budgets exist; nothing is run."""
    from hf_paged_eviction_eval.commands import COMMANDS
    from hf_paged_eviction_eval.commands.parser import options_of, parser_of, read
    from hf_paged_eviction_eval.running.requests import task_request, text_request

    name, *words = [word for word in shlex.split(command, comments=True)]
    options = read(options_of(COMMANDS[name]), vars(parser_of(name, COMMANDS[name]).parse_args(words)))
    if name == "eval":
        # A text that is named stands for one of the reader's.
        assert text_request(options.but(text=[])) if options.text is not None else task_request(options)


@every_notebook
def test_names_that_it_imports_exist(path: Path) -> None:
    """Seen at once when a name moves; the notebooks themselves run in a step of their own."""
    trees = [ast.parse(re.sub(r"^( *)[%!].*", r"\1pass", cell.source, flags=re.M)) for cell in code_cells(read(path))]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").startswith("hf_paged_eviction")]
    assert ours
    missing = [
        f"{node.module}.{name.name}"
        for node in ours
        for name in node.names
        if not hasattr(importlib.import_module(node.module or ""), name.name)
    ]
    assert not missing
