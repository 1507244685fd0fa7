"""`--plugin`: policies of one's own on the command line, in workers, and in what a run writes down."""

import hashlib
import sys
import textwrap
from pathlib import Path

import pytest

from hf_paged_eviction.policies import registry
from hf_paged_eviction_eval.caches import plugins
from hf_paged_eviction_eval.errors import UserError
from invoking import run
from processes import meta_of, rows_of
from registries import forget_after

CODE = """
    from hf_paged_eviction import EvictionPolicy, Needs, register_policy


    @register_policy("mine")
    class Mine(EvictionPolicy):
        \"\"\"Keeps what is oldest.\"\"\"

        needs = Needs(token_local=True)

        def score(self, context):
            return -context.positions.float()
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plugin registers, and that it was loaded, is forgotten after the test."""
    forget_after(monkeypatch, registry.POLICIES)
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))


def written(folder: Path, name: str = "mine_plugin.py", code: str = CODE) -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(code))
    return file


def test_a_run_with_a_file_and_two_workers(model_folder: str, tmp_path: Path) -> None:
    file, output = written(tmp_path), tmp_path / "out"
    words = f"eval --model {model_folder} --tasks passkey --policies mine,recency --limit 3 --length 200 --budgets 25%"
    run("--plugin", file, *words.split(), *f"--workers 2 --batch-size 1 --output {output}".split())
    assert {row["policy"] for row in rows_of(output)} == {"mine", "recency"}
    meta = meta_of(output)
    (facts,) = meta["plugins"]
    assert facts["module"].startswith("plugin_mine_plugin_") and facts["package"] is None
    assert facts["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_module_of_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "module_of_mine.py")
    assert "Keeps what is oldest" in run("--plugin", "module_of_mine", "policies").output
    assert "Keeps what is oldest" not in run("policies").output or plugins.plugin_names() == ["module_of_mine"]
    assert [fact["module"] for fact in plugins.plugin_facts()] == ["module_of_mine"]
    del sys.modules["module_of_mine"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("no_such_module_at_all", None, "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("nowhere.py", None, "there is no such file"),
        ("wrong.py", "1 +\n", "SyntaxError"),
        ("taken.py", CODE.replace('"mine"', '"keydiff"'), "The policy name 'keydiff' is taken by hf_paged_eviction"),
        ("stops.py", "import sys; sys.exit('no')\n", "SystemExit: no"),
    ],
)
def test_mistakes(tmp_path: Path, name: str, code: str | None, message: str) -> None:
    place = str(written(tmp_path, name, code)) if code else name
    with pytest.raises(UserError, match="--plugin") as caught:
        plugins.load_plugins([place])
    assert message in str(caught.value)
    assert plugins.plugin_names() == []
    assert "--plugin" in run("--plugin", place, "policies", status=2).output


def test_two_files_of_one_name_are_two(tmp_path: Path) -> None:
    for folder, policy in (("a", "one"), ("b", "two")):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, "same.py", CODE.replace('"mine"', f'"{policy}"'))
    plugins.load_plugins([str(tmp_path / "a/same.py"), str(tmp_path / "b/same.py"), str(tmp_path / "a/same.py")])
    assert {"one", "two"} <= set(registry.POLICIES.classes)
    assert len(plugins.plugin_names()) == len(plugins.plugin_facts()) == 2
