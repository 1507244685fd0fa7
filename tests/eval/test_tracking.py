"""`--log-to`: a finished run is handed to a tracker by the tracker's own interface, and only when asked."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_paged_eviction_eval.commands import evaluate
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.store import tracking


class Tracker(ModuleType):
    """What wandb and trackio have in common, and what they were told."""

    def __init__(self, name: str, fails: str = "") -> None:
        super().__init__(name)
        self.fails = fails
        self.told: list[tuple[str, Any]] = []

    def init(self, **how: Any) -> Tracker:
        if self.fails:
            raise RuntimeError(self.fails)
        self.told.append(("init", how))
        return self

    def log(self, values: dict[str, Any]) -> None:
        self.told.append(("log", values))

    def finish(self) -> None:
        self.told.append(("finish", None))

    def Table(self, dataframe: Any) -> Any:  # noqa: N802
        return dataframe


def options(folder: Path, **how: Any) -> EvalOptions:
    return EvalOptions(
        tasks="passkey",
        length="160",
        limit=2,
        policies="recency",
        budgets="64,full",
        output=folder / "mine",
        workers=1,
        **how,
    )


def test_a_run_is_logged_once_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, other = Tracker("wandb"), Tracker("trackio")
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setitem(sys.modules, "trackio", other)
    assert evaluate.run(options(tmp_path, log_to="wandb"))
    assert other.told == []
    (first, how), (second, values), (last, _) = tracker.told
    assert (first, second, last) == ("init", "log", "finish")
    assert (how["project"], how["name"]) == ("paged-eviction", "mine")
    assert how["config"]["budgets"] == ["64", "full"] and "log_to" not in how["config"]
    assert values["accuracy/passkey/160/full/full"] == 1
    rows, summary = values["rows"], values["summary"]
    assert len(rows) == 4 and len(summary) == 2
    assert set(rows["budget"]) == {"64", "full"} and isinstance(rows["answers"][0], str)
    means = {f"{policy}/{budget}": value for policy, budget, value in summary[["policy", "budget", "accuracy"]].values}
    assert means == {key: values[f"accuracy/passkey/160/{key}"] for key in ("recency/64", "full/full")}
    # Nothing is left to compute, and it is logged again only where that is asked again.
    assert evaluate.run(options(tmp_path)) and len(tracker.told) == 3
    assert evaluate.run(options(tmp_path, log_to="trackio")) and len(tracker.told) == 3
    assert [what for what, _ in other.told] == ["init", "log", "finish"]
    assert other.told[1][1].keys() == values.keys()
    other.fails = "no API key\nlog in first"
    with pytest.raises(UserError, match=r"--log-to trackio: no API key; all rows are in .*mine, and the same command"):
        evaluate.run(options(tmp_path, log_to="trackio"))


def test_texts_are_logged_too() -> None:
    curve = tracking.Curve("keydiff", "25%", 64, 3.5, [3.5], 100)
    assert tracking.means([curve]) == {"perplexity/keydiff/25%": 3.5}


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *more: Any) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"--log-to trackio need trackio .*pip install 'hf_paged_eviction\[trackio\]'"):
        evaluate.run(options(tmp_path, log_to="trackio"))
    assert not (tmp_path / "mine").exists(), "told before anything is computed"
