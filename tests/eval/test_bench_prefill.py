"""`paged-eviction bench --preset prefill`, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.bench.prefill import run as prefill
from hf_paged_eviction_eval.bench.prefill import tables as prefill_tables
from hf_paged_eviction_eval.bench.prefill.run import Case, PrefillSettings, cases, read_prompt
from hf_paged_eviction_eval.bench.shapes import SHAPES
from hf_paged_eviction_eval.commands import app

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a few tokens."""
    monkeypatch.setitem(SHAPES, "prefill", SHAPE)
    monkeypatch.setattr(prefill, "PrefillSettings", lambda **given: PrefillSettings(**{**SIZES, **given}))


SIZES: dict[str, Any] = {"lengths": (64, 128), "budget": 64, "chunk": 16, "chunks": (16, 32), "rounds": 1}


def run(folder: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["bench", "--preset", "prefill", "--output", str(folder), *more])
    assert result.exit_code == 0, result.output
    return str(result.output)


def test_a_stopped_run_goes_on_and_tables_follow_from_the_file(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path, "--contexts", "64")
    lines = (tmp_path / "results.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 7 and "seconds to the first token" in first
    # One row is missing, and another length is asked for.
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:-1]) + "\n", "utf-8")
    run(tmp_path)
    assert (tmp_path / "results.jsonl").read_text("utf-8").splitlines()[:6] == lines[:6]
    found = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert [row["length"] for row in found["rows"]] == [64] * 7 + [128] * 7
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in found["rows"])
    of = {(row["length"], row["cache"], row["chunk"]): row["seconds"] for row in found["rows"]}
    assert prefill_tables.over_length(found)[1][:4] == [
        "128",
        *(f"{of[128, cache, chunk]:.3g}" for cache, chunk in (("full", None), ("full", 16), ("paged_eviction", 16))),
    ]
    assert [line[0] for line in prefill_tables.over_chunks(found)] == ["16", "32"]
    assert [line[0] for line in prefill_tables.over_policies(found)] == list(PrefillSettings.policies)
    monkeypatch.setattr(prefill, "measure", None)
    run(tmp_path)


def test_the_smallest_chunk_that_is_as_fast_is_named() -> None:
    rows = [
        {"length": length, "cache": "a", "chunk": chunk, "seconds": seconds}
        for length, chunk, seconds in ((64, 8, 1.0), (128, 8, 1.3), (128, 16, 1.04), (128, 32, 1.0), (10**6, 16, 0.1))
    ]
    found = {"settings": {"policies": ["a"], "chunk": 16}, "rows": rows}
    assert prefill_tables.best_chunk(found) == 16
    assert prefill_tables.best_chunk({**found, "rows": []}) is None


def test_prompts_are_read_as_they_say() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    fed: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    settings = PrefillSettings(**SIZES)
    for case in cases(settings):
        fed.clear()
        seconds, cache = read_prompt(model, case, settings)
        assert seconds > 0 and sum(fed) == case.length == cache.get_seq_length()
        assert max(fed) == (case.chunk or case.length)
        held = cache.stats().held if isinstance(cache, PagedEvictionCache) else case.length
        assert held == (case.length if case.cache == "full" else 64)
        if case.cache != "full":
            assert cache.policy.label.partition("(")[0] == case.cache
    lengths = PrefillSettings().lengths
    assert len(set(cases(PrefillSettings()))) == 4 * 10 + 2 * 3 and lengths[0] == 2048 and lengths[-1] == 65536
    assert Case(65536, "full", None) in cases(PrefillSettings())


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--policy", "keydiff"], "--policy: not with --preset prefill"),
        (["--budgets", "64,128"], "takes one"),
        (["--model", "embedded"], "takes a shape"),
    ],
)
def test_what_the_preset_does_not_take(typed: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--preset", "prefill", "--output", str(tmp_path / "out"), *typed])
    assert result.exit_code == 2 and words in " ".join(result.output.split())
