"""A shared prefill and a batch change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hf_paged_eviction import available_policies
from hf_paged_eviction_eval import runner
from hf_paged_eviction_eval.prompts import Batch, make_batches
from hf_paged_eviction_eval.runner import BatchRun, batch_keys, row_key, until_end, variants
from hf_paged_eviction_eval.settings import TaskSettings
from hf_paged_eviction_eval.tasks import Sample

SETTINGS = TaskSettings(
    policies=tuple(available_policies()),
    budgets=("10%", "60%", "full"),
    block_size=4,
    tasks=("passkey",),
    lengths=(200,),
    samples=3,
    batch_size=3,
)


def make_batch(lengths: tuple[int, ...], window: int = 20, new_tokens: tuple[int, ...] = (6, 9, 12)) -> Batch:
    """Prompts of random tokens; a row's own limit on the answer."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 600, (length,), generator=generator).tolist() for length in lengths]
    samples = [
        Sample(str(index), "passkey", "", "", ("1",), new_tokens[index % len(new_tokens)])
        for index in range(len(lengths))
    ]
    return Batch("passkey", max(lengths), window, tuple(samples), tuple(map(tuple, prompts)))


def predictions(model: Any, tokenizer: Any, batch: Batch, settings: TaskSettings = SETTINGS) -> list[list[str]]:
    run = BatchRun(model, tokenizer, settings, batch)
    return [run.predict(variant) for variant in variants(settings)]


@pytest.mark.parametrize("window", [1, 20])
def test_shared_prefill_gives_what_separate_prefills_give(
    model: Any, tokenizer: Any, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch((200, 171, 90), window)
    shared = predictions(model, tokenizer, batch)
    monkeypatch.setattr(runner, "can_share", lambda cache: False)
    assert predictions(model, tokenizer, batch) == shared


def test_a_row_does_not_depend_on_its_batch(model: Any, tokenizer: Any) -> None:
    batch = make_batch((200, 171, 90))
    together = predictions(model, tokenizer, batch)
    for index in range(3):
        alone = replace(batch, samples=(batch.samples[index],), prompts=(batch.prompts[index],))
        assert predictions(model, tokenizer, alone) == [[row[index]] for row in together]


def test_eviction_is_felt(model: Any, tokenizer: Any) -> None:
    full, *small = predictions(model, tokenizer, make_batch((200, 171, 90)), replace(SETTINGS, budgets=("full", "10%")))
    assert any(answers != full for answers in small)


def test_model_with_sliding_layers_is_read_again_for_every_cache(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config).double().eval()
    settings = replace(SETTINGS, policies=("paged_eviction", "recency"))
    batch = make_batch((120, 90))
    together = predictions(model, tokenizer, batch, settings)
    alone = replace(batch, samples=batch.samples[1:], prompts=batch.prompts[1:])
    assert predictions(model, tokenizer, alone, settings) == [[row[1]] for row in together]


def test_rows_that_are_there_are_skipped(model: Any, tokenizer: Any) -> None:
    settings = replace(SETTINGS, policies=("recency",))
    batch = make_batch((80, 60))
    keys = batch_keys(settings, batch)
    rows = [row for rows in BatchRun(model, tokenizer, settings, batch).rows(set()) for row in rows]
    assert [row_key(row) for row in rows] == keys
    missing = {keys[0], keys[-1]}
    again = [row for rows in BatchRun(model, tokenizer, settings, batch).rows(set(keys) - missing) for row in rows]
    assert again == [row for row in rows if row_key(row) in missing]


def test_answer_ends_at_the_first_end_token() -> None:
    assert until_end([5, 6, 1, 7], {1, 2}) == [5, 6]
    assert until_end([5, 6], set()) == [5, 6]


def test_questions_stay_out_of_compression(tokenizer: Any) -> None:
    settings = replace(SETTINGS, tasks=("passkey", "kv_recall"), lengths=(600,), samples=2)
    for batch in make_batches(settings, tokenizer):
        for sample, prompt in zip(batch.samples, batch.prompts, strict=True):
            question = tokenizer(sample.question)["input_ids"]
            assert len(question) <= batch.window < len(prompt)
            assert tokenizer.decode(prompt) == sample.prompt
    aware = make_batches(replace(settings, question_aware=True), tokenizer)
    assert {batch.window for batch in aware} == {1}
