"""The benchmark of continuous batching, in small."""

from __future__ import annotations

import json
from typing import Any

import pytest

import driving

pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)
serving = pytest.importorskip("hf_paged_eviction_eval.bench.serving", reason="the extra `eval` is not installed")

answering = pytest.importorskip(
    "hf_paged_eviction_eval.bench.serving.answering", reason="the extra `eval` is not installed"
)
make_manager = answering.make_manager
preset = pytest.importorskip("hf_paged_eviction_eval.bench.serving.preset", reason="the extra `eval` is not installed")

SMALL = serving.ServingSettings(
    budgets=(32,),
    block_size=4,
    requests=8,
    per_second=1e9,
    prompts=(16, 120),
    answers=(4, 40),
    pages=8,
    page_size=16,
    batch_tokens=40,
    chunk=32,
    shape={
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "eos_token_id": None,
    },
)


def begins_when_all_are_there(served: Any, settings: Any) -> Any:
    """A manager that answers nothing before the last request has come, however slowly they come."""
    manager = make_manager(served, settings)
    start, add, came = manager.start, manager.add_request, []

    def add_and_start(*given: Any, **more: Any) -> Any:
        came.append(add(*given, **more))
        if len(came) == settings.requests:
            start()
        return came[-1]

    vars(manager).update(start=lambda: None, add_request=add_and_start)
    return manager


def test_full_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "make_manager", begins_when_all_are_there)
    found = serving.run_serving(SMALL, say=lambda text: None)
    full, bounded = found["runs"]["full"], found["runs"]["budget 32"]
    assert bounded["live_most"] > full["live_most"]
    assert (bounded["preempted"], full["preempted"] > 0) == (0, True)
    for run in found["runs"].values():
        assert set(preset._COLUMNS) <= set(run)
        assert run["tokens_per_second"] > 0
        assert 0 <= run["first_token_median"] <= run["first_token_95"]
        assert run["steps"] >= max(arrival.answer for arrival in serving.trace(SMALL))
    answers = sum(arrival.answer for arrival in serving.trace(SMALL))
    seconds, rate, rounding = bounded["seconds"], bounded["tokens_per_second"], 0.006  # both are rounded to hundredths
    assert (seconds - rounding) * (rate - rounding) <= answers <= (seconds + rounding) * (rate + rounding)


def test_bookkeeping() -> None:
    found = serving.run_bookkeeping(SMALL, live=(1, 3), new=20, say=lambda text: None)
    assert list(found["by_live_requests"]) == ["1", "3"]
    assert all(0 < shares["share"] < 1 for shares in found["by_live_requests"].values())


def test_the_trace_is_the_same_each_time() -> None:
    assert serving.trace(SMALL) == serving.trace(SMALL)
    lengths = [len(arrival.prompt) for arrival in serving.trace(SMALL)]
    assert min(lengths) >= 16 and max(lengths) <= 120 and len(set(lengths)) > 4


def test_preset(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from hf_paged_eviction_eval.commands import app

    asked: list[Any] = []
    monkeypatch.setattr(preset, "ServingSettings", lambda **changes: asked.append(changes) or SMALL)
    row = dict.fromkeys(preset._COLUMNS, 1.5)
    monkeypatch.setattr(preset, "run_serving", lambda settings, say: {"settings": {}, "runs": {"budget 32": row}})
    monkeypatch.setattr(preset, "run_bookkeeping", lambda settings, say: {})
    words = ["bench", "--preset", "serving", "--budgets", "32,64", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert asked == [{"budgets": (32, 64), "device": "cpu"}]
    assert "budget 32" in result.stdout and "preempted" in result.stdout
    written = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert set(written) == {"settings", "runs", "bookkeeping", "environment"}
    again = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert again.exit_code == 2 and "--again" in again.stderr
    wrong = CliRunner().invoke(app, [*words, "--contexts", "64"], env={"COLUMNS": "120"})
    assert wrong.exit_code == 2 and "--contexts" in wrong.stderr
