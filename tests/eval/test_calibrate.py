"""`paged-eviction calibrate`: windows of text, refusals, and a file that the evaluation takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_paged_eviction import PagedEvictionCache, register_weights, weights_digest
from hf_paged_eviction.learned.calibration import find_calibration, load_calibration
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches.defaults import one_cache
from hf_paged_eviction_eval.caches.fitting.reading import SHORTEST, cut, text_settings
from hf_paged_eviction_eval.commands import app
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.cache import OneCacheOptions
from hf_paged_eviction_eval.options.model import ModelOptions
from hf_paged_eviction_eval.tasks import library
from processes import raw_rows

TOKENIZER = embedded.load()[1]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_windows_follow_each_other_and_begin_as_texts_do() -> None:
    text = library.source("argparse")
    ids = TOKENIZER(text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = cut(TOKENIZER, [text], 401, 1200)
    assert [window.count for window in windows] == [401] * 3
    assert all(window.tokens[0, 0] == TOKENIZER.bos_token_id for window in windows)
    assert torch.cat([window.tokens[0, 1:] for window in windows]).tolist() == ids[:1200]


def test_short_ends_are_left_out_and_long_ones_kept() -> None:
    text = library.source("abc")
    count = len(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    windows = cut(TOKENIZER, [text, "too short", text], 1025, 10**6)
    ends = [length for length in (min(1024, count - start) for start in range(0, count, 1024)) if length >= SHORTEST]
    assert [window.count - 1 for window in windows] == ends * 2


def test_no_more_texts_are_read_than_it_takes() -> None:
    def texts() -> Any:
        yield library.source("argparse")
        raise AssertionError("one text was enough")

    assert len(cut(TOKENIZER, texts(), 513, 1024)) == 2


@pytest.mark.parametrize("texts", [[], ["short"], ["word " * 300]])
def test_too_little_text(texts: list[str]) -> None:
    with pytest.raises(UserError, match="too little text"):
        cut(TOKENIZER, texts, 1024, 10**6)


def test_a_window_that_is_too_short() -> None:
    with pytest.raises(UserError, match="at least 257"):
        cut(TOKENIZER, ["text"], 100, 1000)


def test_files_are_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text given"):
        text_settings([], 1024, ModelOptions())
    with pytest.raises(UserError, match=r"no such file: .*nothing\.txt"):
        text_settings([tmp_path / "nothing.txt"], 1024, ModelOptions())


@pytest.mark.parametrize("output", ["c.bin", "missing/c.safetensors"])
def test_an_output_that_cannot_be_written_is_refused_first(output: str, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("word " * 5000)
    result = run("--text", text, "--output", tmp_path / output)
    assert result.exit_code == 2
    assert "--output" in result.stderr
    assert not (tmp_path / output).exists()


def test_the_command_writes_a_file_that_the_evaluation_takes(tmp_path: Path) -> None:
    one, two, output = tmp_path / "one.py", tmp_path / "two.jsonl", tmp_path / "c.safetensors"
    one.write_text(library.source("argparse"))
    two.write_text(json.dumps({"text": library.source("inspect")}) + "\n")
    result = run("--text", one, two, "--output", output, "--tokens", 2400, "--window", 401)
    assert result.exit_code == 0, result.output
    assert "Spearman" in result.stdout
    calibration = load_calibration(output)
    assert list(calibration.layers) == [0, 1, 2, 3]
    assert calibration.facts["tokens"] == str(6 * 401)
    folder = tmp_path / "run"
    evaluated = CliRunner().invoke(
        app,
        f"eval --policies calibrated:{output},calibrated:embedded --budgets 25% --tasks passkey --length 256 --limit 2 "
        f"--workers 1 --output {folder}".split(),
    )
    assert evaluated.exit_code == 0, evaluated.output
    rows = raw_rows(folder)
    assert {row["policy"] for row in rows} == {f"calibrated:{output}", "calibrated:embedded"}


def test_without_a_file_it_is_found_by_the_models_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And without a text Python's documentation is read."""
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    result = run("--tokens", 800, "--window", 401)
    assert result.exit_code == 0, result.output
    assert "caches find it by the model's weights" in " ".join(result.stderr.split())
    model = embedded.load(attn_implementation="paged_eviction")[0]
    assert find_calibration(model.config) is None
    register_weights(model)
    found = find_calibration(model.config)
    assert found is not None and found.is_relative_to(tmp_path)
    assert PagedEvictionCache(model.config, budget=64).policy.label == f"observed:{found}"
    assert load_calibration(found).model["weights"] == weights_digest(model)


class _Options(ModelOptions, OneCacheOptions):
    pass


def test_a_command_takes_the_attention_that_serves_any_default() -> None:
    assert one_cache(_Options(budget="256")).attn_implementation == "paged_eviction"
    assert one_cache(_Options(budget="256", attn_implementation="sdpa")).attn_implementation == "sdpa"
    assert one_cache(_Options(budget="256", policy="keydiff")).policies == ("keydiff",)
