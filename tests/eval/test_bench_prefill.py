"""`paged-eviction bench --preset prefill`, in small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction_eval.bench import presets, run
from hf_paged_eviction_eval.bench.prefill import Case, cases, read_prompt
from hf_paged_eviction_eval.bench.settings import Prefill
from hf_paged_eviction_eval.bench.shapes import SHAPES
from hf_paged_eviction_eval.commands import app
from processes import raw_rows

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL = Prefill(lengths=(64, 128), chunk=16, chunks=(16, 32), rounds=1)


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "prefill", SHAPE)
    monkeypatch.setitem(presets.PRESETS, "prefill", {**presets.PRESETS["prefill"], "prefill": SMALL})
    words = ["bench", "--preset", "prefill", "--output", str(tmp_path), "--budgets", "64"]

    def measured() -> list[dict[str, Any]]:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0 and "time to the first token" in result.output, result.output
        return raw_rows(tmp_path)

    lines = measured()
    assert len(lines) == 7 * 2
    (file,) = tmp_path.glob("rows.*")
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    assert len(measured()) == 7 * 2
    monkeypatch.setattr(run, "make_model", lambda *_: pytest.fail("loaded"))
    assert measured()[:13] == lines[:13]


def test_prompts_are_read_as_they_say() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    fed: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for case in cases(SMALL):
        fed.clear()
        seconds, cache = read_prompt(model, case, 64)
        assert seconds > 0 and sum(fed) == case.length == cache.get_seq_length()
        assert max(fed) == (case.chunk or case.length)
        held = cache.stats().largest_held if isinstance(cache, PagedEvictionCache) else case.length
        assert held == (case.length if case.cache == "full" else 64)
        if case.cache != "full":
            assert cache.policy.label.partition("(")[0] == case.cache
    assert model.config._attn_implementation == "sdpa"
    every = list(cases(Prefill()))
    assert len(set(every)) == len({case.key(1024) for case in every}) == 4 * 10 + 2 * 3
    assert every[0].length == 2048 and every[-1].length == 65536 and Case(65536, "full", None) in every
