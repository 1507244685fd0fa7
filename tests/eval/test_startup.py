"""What needs no model starts at once: nothing of torch or transformers is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from transformers import AttentionInterface

import hf_paged_eviction
from hf_paged_eviction import library
from hf_paged_eviction_eval.caches.spelling import check_spelling
from hf_paged_eviction_eval.commands import COMMANDS
from hf_paged_eviction_eval.options.base import flag
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from invoking import run
from report_rows import VARIANTS, make_row

#: The last line of its output: which of the heavy packages were imported.
_HEAVY = "print('heavy', *sorted({'torch', 'transformers', 'datasets', 'accelerate'} & {*sys.modules}))\n"
#: What other packages register has to be imported to be listed.
_ALONE = """
from importlib import metadata
every = metadata.entry_points
metadata.entry_points = lambda **wanted: [entry for entry in every(**wanted) if entry.dist.name == "hf_paged_eviction"]
"""
_COMMANDS = f"""{_ALONE}
import json, sys
import matplotlib.figure
matplotlib.figure.Figure.savefig = lambda figure, file, **how: None  # pictures take seconds
from hf_paged_eviction_eval.commands import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
{_HEAVY}"""


def python(
    code: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_commands_without_a_model_import_no_torch(tmp_path: Path) -> None:
    rows = [
        make_row(task, variant, index) for task in ("qasper", "gov_report") for variant in VARIANTS for index in (0, 1)
    ]
    (tmp_path / "rows.0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    words = [["--version"], ["tasks"], ["score", str(tmp_path)], ["report", str(tmp_path)]]
    done = python(_COMMANDS, json.dumps(words))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy"
    assert "longbench_v2" in done.stdout


def test_help_fits_80_columns() -> None:
    words = [["--help"], *([name, "--help"] for name in COMMANDS if not name.startswith("fit-"))]
    done = python(_COMMANDS, json.dumps(words), environment={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "heavy"
    assert sum(line.startswith("usage: ") for line in lines) == len(words)
    examples = "  paged-eviction ", "  accelerate ", "    --", "  cache = "  # in one piece, to be copied
    assert [line for line in lines if len(line) > 80 and not line.startswith(examples)] == []
    for name in map(flag, EvalOptions.offered()):
        assert any(f" {name} " in f"{line} ".replace(",", " ") for line in lines), name


def test_the_package_alone_imports_no_torch() -> None:
    imports = "hf_paged_eviction, hf_paged_eviction.layer.stats, hf_paged_eviction_eval.options.settings"
    done = python(f"import sys, {imports}\n{_HEAVY}")
    assert done.stdout == "heavy\n", done.stderr


def test_every_name_is_there_when_it_is_taken() -> None:
    assert set(hf_paged_eviction.__all__) == {*library.__all__, "__version__"}
    for name in library.__all__:
        vars(hf_paged_eviction).pop(name, None)
        assert getattr(hf_paged_eviction, name) is getattr(library, name)
    assert hf_paged_eviction.policies is sys.modules["hf_paged_eviction.policies"]  # type: ignore[attr-defined]
    assert "PagedEvictionCache" in vars(hf_paged_eviction), "asked again each time"
    assert "paged_eviction" in AttentionInterface()
    for wrong in ("PagedEvictionCash", "__wrapped__"):
        with pytest.raises(AttributeError, match=wrong):
            getattr(hf_paged_eviction, wrong)


def test_every_policy_is_listed() -> None:
    shown = run("policies").output
    assert all(name in shown for name in hf_paged_eviction.available_policies()) and "arXiv 2509.04377" in shown


def test_a_misspelt_policy_is_refused_before_torch_is_imported() -> None:
    done = python(
        "import sys\n"
        "from hf_paged_eviction_eval.cli import main\n"
        "sys.argv = ['paged-eviction', 'eval', '--policies', 'full,snapvk(window=8)@ada_kv']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "unknown policy snapvk, did you mean 'snapkv'?" in done.stderr


def test_names_that_are_no_misspelling_pass() -> None:
    assert check_spelling("auto,full,all,hybrid(keydiff, recency),observed@heads,snapkv(window=8),'quoted',zzz") is None
