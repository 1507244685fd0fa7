"""Continuous batching of a real model."""

import os
from pathlib import Path
from typing import Any

import pytest

import driving

pytest.importorskip("pydantic", reason="the extra `eval` is not installed")

from hf_paged_eviction_eval.data import texts
from hf_paged_eviction_eval.models import loading
from hf_paged_eviction_eval.options.settings import TaskSettings

FILE = os.environ.get(
    "PAGED_EVICTION_REAL_MODEL",
    str(Path(__file__).parents[2] / "results" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"),
)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not Path(FILE).exists(), reason=f"no model at {FILE}: make real"),
    pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED),
]


def test_requests_of_a_batch_are_answered_as_alone() -> None:
    if FILE.endswith(".gguf"):
        pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    model, tokenizer = loading.load(TaskSettings(policies=(), budgets=("full",), tasks=("passkey",), model=FILE))
    ids = [token for text in texts.read_texts(())[:3] for token in tokenizer(text.content).input_ids][:2210]
    prompts = [ids[:300], ids[1000:1090], ids[2000:]]
    options: dict[str, Any] = {"budget": 128, "block_size": 16, "policy": "keydiff"}
    chunk = 64
    with driving.batching(model, driving.pool(40, tokens=chunk + 8), prefill_chunk_size=chunk, **options) as turned:
        turned.run({0: [lambda batching, at=at: batching.add(str(at), prompts[at], 20) for at in range(len(prompts))]})
        answers = [turned.answers[str(at)] for at in range(len(prompts))]
    expected = [driving.alone(model, prompt, 20, prefill_chunk_size=chunk, **options) for prompt in prompts]
    assert answers == expected
