"""Predictions are those of a plain `generate`, and nothing about how they were computed changes them."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
from batches import NEWLINE, VOCABULARY, IdTokenizer, all_rows, make_batch, said, without_costs
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.data.prompting.prompts import Batch
from hf_paged_eviction_eval.data.sample import Sample
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.generation import end_tokens, pad_token, until_end
from hf_paged_eviction_eval.running.prefill import Inputs, pad_left
from hf_paged_eviction_eval.running.runner import run_batch
from hf_paged_eviction_eval.running.variants import batch_keys
from hf_paged_eviction_eval.store.checks import row_key

#: They look at keys and values, at keys, at places, and at nothing; the harness treats all policies alike.
POLICIES = ("paged_eviction", "keydiff", "streaming_llm", "random")
SETTINGS = TaskSettings(policies=POLICIES, budgets=("10%", "60%", "full"), block_size=4, tasks=("passkey",))
FEW = SETTINGS.but(policies=("paged_eviction", "keydiff"))
LENGTHS = (150, 131, 70)


def cache_of(model: Any, policy: str, tokens: int | None) -> Any:
    if tokens is None:
        return DynamicCache(config=model.config)
    return PagedEvictionCache(model.config, budget=tokens, block_size=4, policy=policy)


def alone(batch: Batch, index: int) -> Batch:
    return replace(batch, prompts=(batch.prompts[index],))


def answers_of(output: torch.Tensor, batch: Batch, ends: set[int]) -> list[str]:
    limits = [prompt.sample.max_new_tokens for prompt in batch.prompts]
    return [
        IdTokenizer().decode(until_end(tokens, limit, ends))
        for tokens, limit in zip(output.tolist(), limits, strict=True)
    ]


# ---- what is said -----------------------------------------------------------------------------------------------


@pytest.mark.each_value_once
@pytest.mark.parametrize("lengths", [(150,), LENGTHS])
@pytest.mark.parametrize("share", [True, False])
def test_the_whole_prompt_at_once_is_a_plain_generate(model: Any, lengths: tuple[int, ...], share: bool) -> None:
    batch = make_batch(lengths, length=150)
    predictions = said(all_rows(model, SETTINGS.but(share_prefill=share), batch))
    ids, mask = pad_left([prompt.context for prompt in batch.prompts], torch.device("cpu"))
    assert len(predictions) == len(lengths) * (1 + 2 * len(SETTINGS.policies))
    for policy, budget, tokens in [
        ("full", "full", None),
        *((policy, *size) for policy in SETTINGS.policies for size in (("10%", 16), ("60%", 92))),
    ]:
        cache = cache_of(model, policy, tokens)
        output = model.generate(
            ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        for index, expected in enumerate(answers_of(output[:, ids.shape[1] :], batch, {1})):
            assert predictions[policy, budget, str(index)] == expected


def test_chunked_prefill_is_that_of_generate(model: Any) -> None:
    batch = make_batch((90, 61), length=90)
    predictions = said(all_rows(model, FEW.but(prefill_chunk_size=17), batch))
    ids, mask = pad_left([prompt.context for prompt in batch.prompts], torch.device("cpu"))
    for policy in FEW.policies:
        output = model.generate(
            ids,
            attention_mask=mask,
            **{CACHE_ARGUMENT: cache_of(model, policy, 12)},
            max_new_tokens=9,
            do_sample=False,
            pad_token_id=0,
            prefill_chunk_size=17,
        )
        expected = answers_of(output[:, ids.shape[1] :], batch, {1})
        assert [predictions[policy, "10%", str(index)] for index in range(2)] == expected
    assert predictions != said(all_rows(model, FEW, batch))


@torch.no_grad()
def plain_agnostic(model: Any, prompt: Any, cache: Any, steps: int) -> str:
    """One row: the context, then the question, then greedy tokens, through nothing but the model's forward."""
    model(torch.tensor([prompt.context]), **{CACHE_ARGUMENT: cache})
    logits = model(torch.tensor([prompt.question]), **{CACHE_ARGUMENT: cache}).logits
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < steps and tokens[-1] != 1:
        logits = model(torch.tensor([tokens[-1:]]), **{CACHE_ARGUMENT: cache}).logits
        tokens.append(int(logits[0, -1].argmax()))
    return IdTokenizer().decode(tokens)


@pytest.mark.parametrize("share", [True, False])
def test_agnostic_answers_come_from_the_compressed_context(model: Any, share: bool) -> None:
    settings = FEW.but(question_aware=False, share_prefill=share)
    batch = make_batch(LENGTHS, question=13, length=150)
    predictions = said(all_rows(model, settings, batch))
    for policy, budget, tokens in [
        ("full", "full", None),
        *((policy, *size) for policy in FEW.policies for size in (("10%", 16), ("60%", 92))),
    ]:
        for index, prompt in enumerate(batch.prompts):
            expected = plain_agnostic(model, prompt, cache_of(model, policy, tokens), prompt.sample.max_new_tokens)
            assert predictions[policy, budget, str(index)] == expected
    assert any(predictions["keydiff", "10%", row] != predictions["full", "full", row] for row in "012")


# ---- what changes nothing ---------------------------------------------------------------------------------------


@pytest.mark.each_value_once
@pytest.mark.parametrize("question", [0, 20])
@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_a_shared_prefill_gives_the_rows_of_separate_runs(model: Any, question: int, heads: Any) -> None:
    settings = FEW.but(question_aware=not question, heads=heads)
    batch = make_batch(LENGTHS, question)
    shared = all_rows(model, settings, batch)
    apart = all_rows(model, settings.but(share_prefill=False), batch)
    assert without_costs(shared) == without_costs(apart)
    assert all(row["efficiency"]["shared_prefill"] for row in shared)
    assert not any(row["efficiency"]["shared_prefill"] for row in apart)
    single = all_rows(model, settings.but(policies=("keydiff",), budgets=("10%",)), batch)
    assert single and not any(row["efficiency"]["shared_prefill"] for row in single)


@pytest.mark.each_value_once
@pytest.mark.parametrize("question", [0, 20])
@pytest.mark.parametrize("length", [None, 150])
def test_a_row_does_not_depend_on_its_batch(model: Any, question: int, length: int | None) -> None:
    settings = FEW.but(question_aware=not question)
    batch = make_batch(LENGTHS, question, length=length)
    together = all_rows(model, settings, batch)
    apart = [row for index in range(3) for row in all_rows(model, settings, alone(batch, index))]
    assert without_costs(together) == without_costs(apart)


def test_shares_of_a_prompts_own_length_run_apart(model: Any) -> None:
    batch = make_batch(LENGTHS, question=10)
    rows = all_rows(model, FEW.but(question_aware=False), batch)
    held = {(row["budget"], row["id"]): row["budget_tokens"] for row in rows}
    # A share of what is compressed, in whole blocks of 4.
    assert held["60%", "0"] == 84 and held["60%", "1"] == 76 and held["60%", "2"] == 36
    assert {row["efficiency"]["batch_rows"] for row in rows if row["budget"] == "60%"} == {1}
    assert {row["efficiency"]["batch_rows"] for row in rows if row["budget"] == "full"} == {3}
    same = all_rows(model, FEW.but(question_aware=False), replace(batch, length=150))
    assert {row["budget_tokens"] for row in same if row["budget"] == "60%"} == {92}
    assert {row["efficiency"]["batch_rows"] for row in same} == {3}


@pytest.mark.parametrize("share", [True, False])
def test_equal_contexts_are_read_once(model: Any, share: bool) -> None:
    batch = make_batch((80, 80, 64, 80), question=16)
    first = batch.prompts[0].context
    prompts = [replace(prompt, context=first) if index != 2 else prompt for index, prompt in enumerate(batch.prompts)]
    batch = replace(batch, prompts=tuple(prompts))
    settings = FEW.but(question_aware=False, share_prefill=share)
    widths: list[tuple[int, int]] = []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, args, output: widths.append(tuple(args[0].shape)))
    try:
        together = all_rows(model, settings, batch)
    finally:
        hook.remove()
    contexts = [shape for shape in widths if shape[1] in (64, 48)]
    # The full cache, then two policies: at 10% both contexts get the smallest budget, at 60% each its own.
    assert contexts == ([(2, 64)] if share else [(2, 64)] + [(2, 64), (1, 64), (1, 48)] * 2)
    apart = [row for index in range(4) for row in all_rows(model, settings, alone(batch, index))]
    assert without_costs(together) == without_costs(apart)


@pytest.mark.parametrize("question", [0, 20])
def test_layers_with_a_window_share_a_reading(question: int) -> None:
    """Prompts longer and shorter than the window, rows alone and together, read once or by every cache: the same."""
    window = models.build("gemma3", vocab_size=VOCABULARY, sliding_window=32).double()
    window.generation_config.eos_token_id = 1
    settings = FEW.but(question_aware=not question, agreement=True, policies=("keydiff",), budgets=("10%", "full"))
    batch = make_batch((120, 90, 28), question)
    together = all_rows(window, settings, batch)
    apart = [row for index in range(3) for row in all_rows(window, settings, alone(batch, index))]
    unshared = all_rows(window, settings.but(share_prefill=False), batch)
    assert all(row["efficiency"]["shared_prefill"] for row in together)
    for others in (apart, unshared):
        for ours, other_row in zip(without_costs(together), without_costs(others), strict=True):
            assert ours["agreement"] == pytest.approx(other_row["agreement"], abs=1e-5)
            assert ours | {"agreement": None} == other_row | {"agreement": None}


# ---- rows that are there ----------------------------------------------------------------------------------------


def test_only_missing_rows_run(model: Any) -> None:
    settings = FEW.but(question_aware=False)
    batch = make_batch((80, 60), 10)
    keys = batch_keys(settings, batch)
    rows = all_rows(model, settings, batch)
    assert len(keys) == len(set(keys)) == 10 and {row_key(row) for row in rows} == set(keys)
    missing = {keys[0], keys[3], keys[-1]}
    again = all_rows(model, settings, batch, set(keys) - missing)
    assert without_costs(again) == without_costs([row for row in rows if row_key(row) in missing])


def test_nothing_runs_where_nothing_is_missing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch((80, 60))
    monkeypatch.setattr(model, "generate", None)
    for agreement in (False, True):
        settings = FEW.but(agreement=agreement)
        assert all_rows(model, settings, batch, batch_keys(settings, batch)) == []


# ---- stop rules -------------------------------------------------------------------------------------------------


def test_end_tokens_are_those_of_the_checkpoint_and_of_the_tokenizer(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(model.generation_config, "eos_token_id", [5, 6])
    assert end_tokens(model, IdTokenizer(), False) == {1, 5, 6}
    assert end_tokens(model, IdTokenizer(), True) == {1, 5, 6, NEWLINE}
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(IdTokenizer, "eos_token_id", None)
    assert end_tokens(model, IdTokenizer(), False) == set()
    assert len(said(all_rows(model, FEW, make_batch((30, 20))))) == 10


def test_an_answer_stops_at_its_first_end_or_its_limit() -> None:
    assert until_end([5, 6, 1, 7], 9, {1, 2}) == [5, 6, 1]
    assert until_end([5, 6, 1], 2, {1}) == [5, 6]
    assert until_end([5, 6], 9, set()) == [5, 6]
    assert pad_token([0, 2, 1]) == 3 and pad_token([4]) == 0


@pytest.mark.parametrize("place", [0, 3])
def test_rows_end_by_themselves(model: Any, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever token a row says at `place` is declared an end."""
    batch = make_batch(LENGTHS, new_tokens=(6, 1, 6))
    free = said(all_rows(model, FEW, batch))
    end = int(free["full", "full", "0"].split()[place])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [1, end])
    rows = all_rows(model, FEW, batch)
    for key, text in said(rows).items():
        words = free[key].split()
        at = words.index(str(end)) + 1 if str(end) in words else len(words)
        assert text.split() == words[:at]
    assert all(row["new_tokens"] == len(row["prediction"].split()) for row in rows)
    assert {row["new_tokens"] for row in rows if row["id"] == "1"} == {1}


def test_a_newline_ends_an_answer_but_never_begins_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FEW.but(policies=("keydiff",), budgets=("10%", "full"))
    batch = make_batch((90, 60))
    words = said(all_rows(model, settings, batch))["full", "full", "0"].split()
    newline = replace(
        batch, prompts=tuple(replace(p, sample=replace(p.sample, stop_at_newline=True)) for p in batch.prompts)
    )
    monkeypatch.setattr("batches.NEWLINE", int(words[2]))
    answer = said(all_rows(model, settings, newline))["full", "full", "0"]
    assert answer.split() == words[: words.index(words[2]) + 1]
    monkeypatch.setattr("batches.NEWLINE", int(words[0]))
    ids = torch.tensor([batch.prompts[0].context])
    expected = model.generate(
        ids, max_length=94, min_length=91, do_sample=False, pad_token_id=0, eos_token_id=[1, int(words[0])]
    )
    answer = said(all_rows(model, settings, newline))
    assert answer["full", "full", "0"] == IdTokenizer().decode(expected[0, 90:].tolist())
    mixed = said(all_rows(model, settings, replace(batch, prompts=(newline.prompts[0], batch.prompts[1]))))
    free = said(all_rows(model, settings, batch))
    assert all(text == (answer if key[2] == "0" else free)[key] for key, text in mixed.items())


def test_other_generation_settings_of_a_checkpoint_are_ignored_in_silence(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = make_batch((60, 40))
    before = said(all_rows(model, FEW, batch))
    others = {"max_length": 40, "cache_implementation": "static", "return_dict_in_generate": True, "num_beams": 2}
    others["stop_strings"] = ["1"]
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
    for name, value in {**others, **sampling}.items():
        monkeypatch.setattr(model.generation_config, name, value)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        assert said(all_rows(model, FEW, batch)) == before
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.records


def test_a_penalty_on_repetition_does_not_see_pads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(LENGTHS, new_tokens=(12,))
    settings = FEW.but(policies=("keydiff",), budgets=("10%", "full"))
    before = said(all_rows(model, settings, batch))
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 1.5)
    together = all_rows(model, settings, batch)
    apart = [row for index in range(3) for row in all_rows(model, settings, alone(batch, index))]
    assert without_costs(together) == without_costs(apart)
    assert said(together) != before


# ---- padding ----------------------------------------------------------------------------------------------------


def test_inputs_stand_together_at_the_question() -> None:
    batch = make_batch((9, 7, 9), question=3)
    prompts = (batch.prompts[0], replace(batch.prompts[1], question=(5,)), replace(batch.prompts[0], question=(8, 9)))
    inputs = Inputs.of(prompts, torch.device("cpu"))
    assert inputs.contexts == (prompts[0].context, prompts[1].context)
    assert inputs.spread is not None and inputs.spread.tolist() == [0, 1, 0]
    assert inputs.mask.tolist() == [[1] * 9, [0, 0, *[1] * 4, 0, 0, 1], [*[1] * 6, 0, 1, 1]]
    for ids, mask, prompt in zip(inputs.ids, inputs.mask, prompts, strict=True):
        assert tuple(ids[mask.bool()].tolist()) == prompt.context + prompt.question
    assert inputs.context_ids.shape == (2, 6)


def test_a_row_holds_what_a_report_needs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch((40,), all_classes=("a", "b"), length=None, metadata={"depth": 3}, metric="qa_f1_score")
    monkeypatch.setattr(Sample, "score", lambda sample, text: 0.25)
    row = next(iter(run_batch(model, IdTokenizer(), FEW, batch, set())))[0]
    expected = {"task": "passkey", "length": None, "policy": "full", "budget": "full", "budget_tokens": None}
    expected |= {"id": "0", "prompt_tokens": 40, "truncated": False, "chat": False, "answers": ["1"], "score": 0.25}
    expected |= {"all_classes": ["a", "b"], "metric": "qa_f1_score", "metadata": {"depth": 3}, "agreement": None}
    expected |= {"question_aware": True, "record_length": None, "block_size": 4}
    assert expected.items() <= row.items()
