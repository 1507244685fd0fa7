"""The oracle's table is the attention really paid, and evicting by it loses least."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from batches import IdTokenizer, all_rows, make_batch, without_costs
from hf_paged_eviction import ScoreContext, available_policies
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval.caches.policy_names import choose_policies, needs_queries, split_list, split_name
from hf_paged_eviction_eval.data.prompting.prompts import Batch
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import TaskSettings, TextSettings
from hf_paged_eviction_eval.running import requests
from hf_paged_eviction_eval.running.generation import Generator
from hf_paged_eviction_eval.running.oracle import Oracle, look_ahead
from hf_paged_eviction_eval.running.prefill import Inputs
from hf_paged_eviction_eval.running.start import Reader
from hf_paged_eviction_eval.running.variants import make_cache, variants

LENGTHS = (90, 75, 52)
SETTINGS = TaskSettings(policies=("oracle", "random"), budgets=("20%", "full"), block_size=4, tasks=("passkey",))


def foresee(model: Any, settings: TaskSettings, batch: Batch, share: bool = True) -> tuple[Oracle, Inputs, list[str]]:
    reader = Reader(model, settings, Generator(model, IdTokenizer()))
    inputs = reader.inputs(batch.prompts, apart=True)
    source = reader.source(batch.prompts) if share else None
    limits = [prompt.sample.max_new_tokens for prompt in batch.prompts]
    answers = [row["prediction"] for row in all_rows(model, settings.but(policies=()), batch)]
    return look_ahead(reader, inputs, source, limits), inputs, answers


def eager_attention(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Per layer `[kv_heads, queries, tokens]`, the mean over the query heads of a KV head."""
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = eager(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    return [weights[0].float().unflatten(0, (model.config.num_key_value_heads, -1)).mean(1) for weights in attentions]


def context_at(positions: torch.Tensor, seen: list[int], layer: int) -> ScoreContext:
    states = torch.zeros(*positions.shape, 8)
    return ScoreContext(states, states, positions, torch.tensor(seen), layer)


# ---- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("question", [0, 13])
def test_scores_are_what_eager_attention_pays_from_then_on(showing: Any, question: int, share: bool) -> None:
    settings = SETTINGS.but(question_aware=not question)
    batch = make_batch(LENGTHS, question)
    oracle, _, answers = foresee(showing, settings, batch, share)
    assert oracle.first.tolist() == [length - question for length in LENGTHS]
    for row, prompt in enumerate(batch.prompts):
        answer = list(map(int, answers[row].split()))
        text = [*prompt.context, *prompt.question, *answer][:-1]
        attention = eager_attention(showing, text)
        first = len(prompt.context)
        for layer, weights in enumerate(attention):
            for seen in {first, first + 1, prompt.tokens, prompt.tokens + 2, len(text) - 1}:
                positions = torch.full((3, 2, len(text) + 1), -1)
                positions[row, :, 1:] = torch.arange(len(text))
                scores = oracle.score(context_at(positions, [seen] * 3, layer))
                torch.testing.assert_close(scores[row, :, 1:], weights[:, seen:].sum(1), rtol=1e-4, atol=1e-5)
                assert scores[row, :, 0].tolist() == [0, 0]


def test_after_the_end_the_last_token_decides_and_what_was_never_seen_scores_nothing() -> None:
    table = torch.tensor([[[[3.0, 2.0, 1.0, 0.0], [1.0, 2.0, 0.5, 0.0], [9.0, 9.0, 9.0, 9.0]]]])
    oracle = Oracle({0: table}, torch.tensor([2]), torch.tensor([1]))
    positions = torch.tensor([[[-1, 0, 1, 2, 4, 70]]])
    assert oracle.score(context_at(positions, [2], 0)).tolist() == [[[0, 3, 2, 1, 0, 0]]]
    for seen in (3, 50):
        assert oracle.score(context_at(positions, [seen], 0)).tolist() == [[[0, 1, 2, 0.5, 0, 0]]]
    assert oracle.score(context_at(positions, [0], 0)).tolist() == [[[0, 3, 2, 1, 0, 0]]]
    with pytest.raises(ValueError, match=r"1.*1.*about"):
        oracle.score(context_at(positions.expand(2, -1, -1), [3, 3], 0))


def test_answers_of_one_token_leave_nothing_to_foresee(showing: Any) -> None:
    batch = make_batch(LENGTHS, new_tokens=(1,))
    oracle, _, _ = foresee(showing, SETTINGS, batch)
    assert oracle.future == {}
    assert oracle.score(context_at(torch.zeros(3, 2, 5, dtype=torch.int64), [9] * 3, 0)).tolist() == [[[0] * 5] * 2] * 3
    rows = all_rows(showing, SETTINGS, batch)
    assert len({row["prediction"] for row in rows if row["id"] == "0"}) == 1


# ---- in a run ---------------------------------------------------------------------------------------------------


@pytest.mark.each_value_once
@pytest.mark.parametrize("question", [0, 20])
@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_rows_of_the_oracle_depend_on_nothing_but_the_prompt(showing: Any, question: int, heads: Any) -> None:
    settings = SETTINGS.but(budgets=("20%", "60%", "full"), question_aware=not question, heads=heads)
    batch = make_batch((*LENGTHS, 90), question, length=90)
    # Two questions about one context evict each for itself.
    twice = batch.prompts[0].context
    prompts = [*batch.prompts[:3], replace(batch.prompts[3], context=twice if question else batch.prompts[3].context)]
    batch = replace(batch, prompts=tuple(prompts))
    together = all_rows(showing, settings, batch)
    unshared = all_rows(showing, settings.but(share_prefill=False), batch)
    apart = [row for one in prompts for row in all_rows(showing, settings, replace(batch, prompts=(one,)))]
    assert without_costs(together) == without_costs(unshared) == without_costs(apart)
    assert len(together) == 20


def test_it_serves_with_agreement_and_allocators(showing: Any) -> None:
    policies = ("oracle", "oracle@cake", "oracle@ada_kv", "random@pyramid")
    settings = SETTINGS.but(policies=policies, agreement=True, budgets=("40%", "full"))
    rows = all_rows(showing, settings, make_batch(LENGTHS, 0, (6, 9, 12), length=90))
    assert {row["policy"] for row in rows} == {*policies, "full"}
    kl = {name: fmean(row["agreement"]["kl"] for row in rows if row["policy"] == name) for name in (*policies, "full")}
    assert kl["full"] == 0 < kl["oracle"] < kl["random@pyramid"]
    unshared = all_rows(showing, settings.but(share_prefill=False), make_batch(LENGTHS, 0, (6, 9, 12), length=90))
    for ours, expected in zip(without_costs(rows), without_costs(unshared), strict=True):
        assert ours.pop("agreement") == pytest.approx(expected.pop("agreement"), abs=1e-5)
        assert ours == expected


def test_names() -> None:
    assert split_name("h2o@cake") == ("h2o", "cake") and split_name("h2o") == ("h2o", "uniform")
    assert split_name("caote(h2o)@ada_kv") == ("caote(h2o)", "ada_kv")
    assert split_name("h2o@ada_kv(floor=0.5)") == ("h2o", "ada_kv(floor=0.5)")
    assert split_name("calibrated:./a@b/c.safetensors")[1] == "uniform"
    assert needs_queries("recency@pyramid(beta=2)") and not needs_queries("recency@uniform()")
    assert needs_queries("oracle") and needs_queries("recency@pyramid") and not needs_queries("recency@uniform")
    with pytest.raises(ValueError, match="Unknown allocator 'best'"):
        needs_queries("h2o@best")
    assert "oracle" not in available_policies()


def test_lists_of_names() -> None:
    assert split_list("h2o, hybrid(h2o, recency)@cake ,,caote(h2o)") == [
        "h2o",
        "hybrid(h2o, recency)@cake",
        "caote(h2o)",
    ]
    assert split_list(" , ") == [] and split_list("a),b") == ["a)", "b"]
    quoted = """calibrated:"both ' and ,.safetensors\""""
    for file in ("calibrated:'a, b (1).safetensors'", f"hybrid({quoted}, h2o)", "calibrated:'folder@v2/x=1, y'"):
        assert split_list(f"{file},tova, {file}@ada_kv") == [file, "tova", f"{file}@ada_kv"]
    assert choose_policies("oracle,full,oracle,snapkv(window=8),all") == ("oracle", "full", "snapkv(window=8)", "all")
    for wrong, message in {
        "orakle": "did you mean 'oracle'",
        "": "choose from",
        "h2o@best": "Unknown allocator 'best'",
        "h2o@ada_kv(flor=1)": "ada_kv has no parameter flor",
        "hybrid(h2o, recent)": "Unknown policy 'recent'",
        "hybrid(h2o": "Cannot read the policy",
        "keydif@cake": "did you mean 'keydiff'",
        "oracle(seed=1)": "Unknown policy 'oracle'",
        "@cake": "Unknown policy",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            choose_policies(wrong)


def test_the_command_line_takes_it() -> None:
    (request,) = requests.task_requests(EvalOptions(policies="oracle,recency@pyramid,caote(h2o),full"))
    assert request.settings.policies == ("oracle", "recency@pyramid", "caote(h2o)")
    assert request.settings.attn_implementation == PAGED_EVICTION
    with pytest.raises(UserError, match="only tasks have"):
        requests.text_request(EvalOptions(policies="oracle", budgets="64"))
    with pytest.raises(UserError, match=r"oracle.*queries"):
        requests.task_requests(EvalOptions(policies="oracle", attn_implementation="eager"))


def test_a_model_that_shows_nothing_is_refused(model: Any) -> None:
    with pytest.raises(UserError, match="are not available"):
        all_rows(model, SETTINGS, make_batch(LENGTHS))


def test_a_text_has_no_answer_to_look_ahead_to(showing: Any) -> None:
    settings = TextSettings(policies=("oracle",), budgets=("16",), files=(), block_size=4)
    with pytest.raises(UserError, match="only tasks have"):
        make_cache(showing, settings, variants(settings)[0], 16, torch.ones(1, 9))
