"""`make gpu`: what becomes of steps, what a second call runs again, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import load

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with three steps of its own: fine, broken until a file is there, endless."""
    module = load(SCRIPT)
    fine = "import pathlib; pathlib.Path(r'{out}/summary.json').write_text('[1, 2]'); print('all is well')"
    broken = "import pathlib, sys; sys.exit('broken') if not pathlib.Path(r'{out}/mended').exists() else None"
    endless = "import time; print('going on', flush=True); time.sleep(600)"
    monkeypatch.setattr(module, "_environment", lambda folder: {"PYTHONPATH": ""})
    steps = tuple(
        module.Step(name, f"whether it is {name}", (sys.executable, "-c", code), minutes=minutes)
        for name, code, minutes in (("fine", fine, 5), ("broken", broken, 5), ("endless", endless, 0.002))
    )
    monkeypatch.setattr(module, "STEPS", steps)
    return module


def test_a_step_that_fails_or_hangs_stops_no_other_and_is_run_again(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", "--work", str(tmp_path), "--output", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    assert gpu.main([*words, "--steps"]) == 1
    report = json.loads((tmp_path / "out" / "gpu.json").read_text("utf-8"))
    assert {name: step["state"] for name, step in report["steps"].items()} == {
        "fine": "done",
        "broken": "failed",
        "endless": "stopped",
    }
    assert report["steps"]["fine"]["result"] == [1, 2] and report["steps"]["broken"]["last_lines"] == ["broken"]
    assert report["facts"]["dry_run"] and report["facts"]["versions"]["torch"]
    page = (tmp_path / "out" / "gpu.md").read_text("utf-8")
    assert "all is well" in page and "| broken | whether it is broken | failed |" in page and "dry run" in page
    assert str(ROOT) not in page and sys.executable not in page

    (tmp_path / "broken" / "mended").touch()
    capsys.readouterr()
    assert gpu.main([*words, "--steps"]) == 1
    output = capsys.readouterr().out
    assert "fine: done already" in output and "broken: done already" not in output
    again = json.loads((tmp_path / "out" / "gpu.json").read_text("utf-8"))["steps"]
    assert again["broken"]["state"] == "done" and again["fine"] == report["steps"]["fine"]


def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert load(SCRIPT).main(["--work", str(tmp_path)]) == 1
    assert "--dry-run" in capsys.readouterr().err


def test_every_benchmark_takes_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `paged-eviction bench` of the list is understood, as it is and in a dry run; nothing is measured."""
    from typer.testing import CliRunner

    from hf_paged_eviction_eval.bench import request
    from hf_paged_eviction_eval.commands import app

    requests: list[Any] = []
    monkeypatch.setattr(request, "run", lambda settings, *rest: requests.append(settings) or True)
    steps = [step for step in load(SCRIPT).STEPS if "bench" in step.command]
    for step in steps:
        for small in ((), step.small):
            words = [word.format(out=tmp_path, device="cpu") for word in (*step.command, *small)]
            result = CliRunner().invoke(app, words[words.index("bench") :])
            assert result.exit_code == 0, result.output
    assert len(requests) == 2 * len(steps) == 12
