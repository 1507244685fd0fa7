"""Agreement with the full cache, against loops over the model's own forward."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from batches import all_rows, make_batch, said, without_costs
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.agreement import divergence, recorded_logits
from hf_paged_eviction_eval.running.variants import batch_keys

SETTINGS = TaskSettings(
    policies=("paged_eviction", "keydiff"), budgets=("20%", "full"), block_size=4, tasks=("passkey",), agreement=True
)


@torch.no_grad()
def logits_along(model: Any, prompt: Any, cache: Any, answer: list[int]) -> torch.Tensor:
    """`[answer, vocabulary]`, before each token of an answer that is fed one token at a time."""
    for part in (prompt.context, prompt.question):
        if part:
            logits = model(torch.tensor([part]), **{CACHE_ARGUMENT: cache}).logits[0, -1]
    rows = [logits]
    for token in answer[:-1]:
        rows.append(model(torch.tensor([[token]]), **{CACHE_ARGUMENT: cache}).logits[0, -1])
    return torch.stack(rows)


def expected_agreement(model: Any, prompt: Any, policy: str, tokens: int, full: list[int], predicted: list[int]) -> Any:
    cache = PagedEvictionCache(model.config, budget=tokens, block_size=4, policy=policy)
    ours = logits_along(model, prompt, cache, full).log_softmax(-1)
    expected = logits_along(model, prompt, DynamicCache(config=model.config), full).log_softmax(-1)
    same = sum(index < len(predicted) and predicted[index] == token for index, token in enumerate(full))
    kl = (expected.exp() * (expected - ours)).sum(-1).mean()
    return {"identical": same / len(full), "kl": float(kl)}


@pytest.mark.parametrize(("question", "share"), [(0, False), (15, True)])
def test_agreement_is_that_of_plain_loops(model: Any, question: int, share: bool) -> None:
    settings = SETTINGS.but(question_aware=not question, share_prefill=share)
    batch = make_batch((90, 75, 40), question)
    rows = all_rows(model, settings, batch)
    tokens = {(row["policy"], row["budget"], row["id"]): list(map(int, row["prediction"].split())) for row in rows}
    seen = set()
    for row in rows:
        full = tokens["full", "full", row["id"]]
        if row["policy"] == "full":
            assert row["agreement"] == {"identical": 1.0, "kl": 0.0}
            continue
        prompt, predicted = batch.prompts[int(row["id"])], tokens[row["policy"], row["budget"], row["id"]]
        expected = expected_agreement(model, prompt, row["policy"], row["budget_tokens"], full, predicted)
        assert row["agreement"] == pytest.approx(expected, abs=1e-5)
        seen.add(row["agreement"]["identical"])
    assert len(seen) > 1
    without = all_rows(model, settings.but(agreement=False), batch)
    assert all(row["agreement"] is None for row in without)
    assert [row["prediction"] for row in rows] == [row["prediction"] for row in without]


def test_a_forced_answer_follows_the_full_cache(model: Any) -> None:
    """Against one forward over the full cache's answer, on a cache of its own."""
    settings = SETTINGS.but(question_aware=False, teacher_forced=True)
    batch = make_batch((90, 75, 40), 15)
    rows = all_rows(model, settings, batch)
    full = {row["id"]: list(map(int, row["prediction"].split())) for row in rows if row["policy"] == "full"}
    shares = set()
    for row in rows:
        if row["policy"] == "full":
            continue
        prompt, answer = batch.prompts[int(row["id"])], full[row["id"]]
        logits = []
        for cache in (
            PagedEvictionCache(model.config, budget=row["budget_tokens"], block_size=4, policy=row["policy"]),
            DynamicCache(config=model.config),
        ):
            with torch.no_grad():
                for part in filter(None, (prompt.context, prompt.question)):
                    last = model(torch.tensor([part]), **{CACHE_ARGUMENT: cache}).logits[:, -1:]
                rest = model(torch.tensor([answer]), **{CACHE_ARGUMENT: cache}).logits[:, :-1]
            logits.append(torch.cat([last, rest], dim=1)[0].log_softmax(-1))
        ours, full_logits = logits
        predicted = ours.argmax(-1).tolist()
        kl = (full_logits.exp() * (full_logits - ours)).sum(-1).mean()
        share = sum(map(int.__eq__, predicted, answer)) / len(answer)
        assert row["agreement"] == pytest.approx({"identical": share, "kl": float(kl)}, abs=1e-5)
        assert (
            list(map(int, row["prediction"].split()))
            == predicted[: (predicted.index(1) if 1 in predicted else len(predicted)) + 1]
        )
        shares.add(share)
    assert len(shares) > 1


def test_full_rows_that_are_there_are_compared_with_again(model: Any) -> None:
    settings = SETTINGS.but(question_aware=False)
    batch = make_batch((60, 44), 15)
    rows = without_costs(all_rows(model, settings, batch))
    done = {key for key in batch_keys(settings, batch) if key.policy == "full" or key.id == "1"}
    again = without_costs(all_rows(model, settings, batch, done))
    expected = [row for row in rows if row["policy"] != "full" and row["id"] == "0"]
    for ours, expected_row in zip(again, expected, strict=True):
        assert ours.pop("agreement") == pytest.approx(expected_row.pop("agreement"), abs=1e-5)
        assert ours == expected_row


def test_divergence_in_nats() -> None:
    full = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).log()
    expected = torch.tensor([0.5 * log(2) + 0.5 * log(2 / 3), log(2), 0.0])
    torch.testing.assert_close(divergence(full, other), expected)
    assert divergence(other[:1], torch.tensor([[1.0, 0.0, 0.0]]).log()).isinf()
    # In half precision the sums are still taken in float32.
    assert divergence(full[2:].half(), other[2:].half()).dtype == torch.float32


def test_nothing_stays_on_the_model(model: Any) -> None:
    all_rows(model, SETTINGS, make_batch((40,)))
    assert not model._forward_hooks
    with recorded_logits(model, False) as logits:
        model(torch.tensor([[3]]))
    assert logits == []


@pytest.mark.each_value_once
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("question", [0, 15])
def test_an_answer_may_end_where_it_is_right(model: Any, question: int, forced: bool) -> None:
    """Row by row what the whole answer says up to the first token that makes it right; divergence from that alone."""
    settings = SETTINGS.but(question_aware=not question, teacher_forced=forced, policies=("paged_eviction",))
    batch = make_batch((90, 75, 40), question)
    whole = said(all_rows(model, settings, batch))
    full = [whole["full", "full", id].split() for id in "012"]
    wanted = full[0][0], f"{full[1][2]} {full[1][3]}", "nothing"
    prompts = [
        replace(prompt, sample=replace(prompt.sample, metric="string_match_all", answers=(answer,)))
        for prompt, answer in zip(batch.prompts, wanted, strict=True)
    ]
    rows = all_rows(model, settings.but(stop_when_right=True), replace(batch, prompts=tuple(prompts)))
    ends = {row["id"]: row["new_tokens"] for row in rows if row["policy"] == "full"}
    assert ends == {"0": 1, "1": 4, "2": len(full[2])}
    for row in rows:
        id, free = row["id"], whole[row["policy"], row["budget"], row["id"]].split()
        if forced and row["policy"] != "full":
            assert row["new_tokens"] <= ends[id]
            continue
        prefixes = [" ".join(free[:count]) for count in range(1, len(free) + 1)]
        right = next((prefix for prefix in prefixes if wanted[int(id)] in prefix), prefixes[-1])
        assert row["prediction"] == right and row["score"] == float(wanted[int(id)] in right)
