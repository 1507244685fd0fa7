"""What decides a row: each part of it gives another digest, and nothing else does."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.running import meaning
from hf_paged_eviction_eval.running.meaning import meanings, prompt_digest
from hf_paged_eviction_eval.running.requests import task_settings, text_request
from hf_paged_eviction_eval.running.variants import empty_caches, variants
from hf_paged_eviction_eval.store.results import settings_digest

MODEL = embedded.load(attn_implementation="paged_eviction")[0]


def found(**options: Any) -> dict[str, str]:
    settings = task_settings(EvalOptions(**{"tasks": "passkey", "device": "cpu", **options}))
    caches = empty_caches(MODEL.config, settings, variants(settings))
    return {policy: settings_digest(decided) for policy, decided in meanings(settings, MODEL, caches).items()}


def test_what_rows_tell_by_themselves_is_not_among_it() -> None:
    few = found(policies="recency", budgets="64")
    assert few == found(policies="recency,keydiff,h2o", budgets="25%,full", tasks="suite", length="300,400", limit=3)
    texts = [
        text_request(EvalOptions(text=[], device="cpu", policies="recency", positions=positions)).settings
        for positions in ("text", "text,cache")
    ]
    assert meanings(texts[0], MODEL, {}) == meanings(texts[1], MODEL, {})


@pytest.mark.parametrize(
    "change",
    [
        *({"block_size": 8}, {"seed": 1}, {"question_aware": False}, {"dtype": "bfloat16"}, {"positions": "cache"}),
        *({"bits": "4"}, {"sink_tokens": 4}, {"agreement": True, "budgets": "64,full"}, {"prefill_chunk_size": 32}),
    ],
)
def test_settings(change: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"policies": "recency", "budgets": "64"}
    assert found(**usual) != found(**usual | change)


def test_files_of_a_policy_decide_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(shutil.copy(embedded.calibration_path(), tmp_path / "a, b.safetensors"))
    wanted = {"policies": "recency,calibrated,graphkv(calibrated)", "budgets": "64", "profile": file}
    before, digest = found(**wanted), meaning.file_digest
    assert found(**wanted) == before and len(before) == 3
    settings = task_settings(EvalOptions(tasks="passkey", device="cpu", **wanted))
    decided = meanings(settings, MODEL, empty_caches(MODEL.config, settings, variants(settings)))
    assert decided["calibrated"]["files"] == {"a, b.safetensors": digest(file)}
    assert before[""] == found(policies="recency", budgets="64")[""], "what reads no profile does not depend on it"
    monkeypatch.setattr(meaning, "file_digest", lambda path: "changed" if str(path) == file else digest(path))
    after = found(**wanted)
    assert {policy for policy in before if before[policy] != after[policy]} == before.keys() - {""}


def test_a_default_is_what_it_came_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_PAGED_EVICTION_HOME", str(tmp_path))
    settings = task_settings(EvalOptions(tasks="passkey", device="cpu", policies="auto", budgets="64"))
    caches = empty_caches(MODEL.config, settings, variants(settings))
    assert meanings(settings, MODEL, caches)["auto"]["files"]["auto"]


def test_weights() -> None:
    before = found(policies="recency", budgets="64")
    weight = MODEL.model.layers[1].mlp.up_proj.weight
    original = weight.detach().clone()
    try:
        weight.data += 0.01
        assert found(policies="recency", budgets="64") != before
    finally:
        weight.data.copy_(original)
    assert found(policies="recency", budgets="64") == before


def test_prompts() -> None:
    from dataclasses import replace

    from batches import make_batch

    prompt = make_batch([40]).prompts[0]
    sample = prompt.sample
    others = [
        replace(prompt, context=(*prompt.context[:-1], 5)),
        replace(prompt, context=prompt.context[:-1], question=prompt.context[-1:]),
        replace(prompt, sample=replace(sample, answers=("other",))),
        replace(prompt, sample=replace(sample, metric="string_match_all")),
        replace(prompt, sample=replace(sample, max_new_tokens=sample.max_new_tokens + 1)),
    ]
    assert len({prompt_digest(other) for other in [prompt, *others]}) == 6
    assert prompt_digest(replace(prompt, sample=replace(sample, metadata={"depth": 1}))) == prompt_digest(prompt)
