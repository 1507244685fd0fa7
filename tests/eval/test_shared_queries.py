"""Policies that need queries answer from a shared reading what they would answer from their own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
from batches import VOCABULARY, all_rows, make_batch, without_costs
from hf_paged_eviction import make_policy
from hf_paged_eviction.attention.weights import Attention, Logits
from hf_paged_eviction.policies.attention.h2o import H2O
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction.queries.observer import Queries
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.prefill import can_share, feed, pad_left, replay
from hf_paged_eviction_eval.running.recording import Memory, RecordingCache, shows_queries
from hf_paged_eviction_eval.running.variants import make_cache, variants
from policy_kinds import NAMES

CURIOUS = tuple(name for name in NAMES if make_policy(name).needs.queries)
SETTINGS = TaskSettings(
    policies=CURIOUS,
    budgets=("10%", "60%", "full"),
    block_size=4,
    tasks=("passkey",),
    attn_implementation=PAGED_EVICTION,
)
LENGTHS = (150, 131, 70)
#: One for each kind of statistics; below all of them are replayed.
OF_EACH_KIND = ("h2o", "snapkv", "lazy_eviction", "expected_attention", "compactor", "kvzip")


@pytest.mark.each_value_once
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("question", [0, 20])
def test_a_shared_prefill_gives_the_rows_of_separate_runs(showing: Any, question: int, heads: Any) -> None:
    settings = SETTINGS.but(policies=OF_EACH_KIND, budgets=("10%", "full"), question_aware=not question, heads=heads)
    batch = make_batch(LENGTHS, question, length=150)
    shared = all_rows(showing, settings, batch)
    apart = all_rows(showing, settings.but(share_prefill=False), batch)
    assert without_costs(shared) == without_costs(apart)
    probed = {"kvzip"}  # read the prompt by themselves
    for row in shared:
        assert row["efficiency"]["shared_prefill"] is (row["policy"] not in probed)
    assert not any(row["efficiency"]["shared_prefill"] for row in apart)
    assert len({row["prediction"] for row in shared if row["budget"] == "10%"}) > 3


def test_allocators_share_too(showing: Any) -> None:
    policies = ("h2o@cake", "snapkv@d2o", "keydiff@pyramid", "h2o@ada_kv", "recency")
    settings = SETTINGS.but(policies=policies, budgets=("20%", "full"), question_aware=False)
    batch = make_batch(LENGTHS, 20, length=150)
    shared = all_rows(showing, settings, batch)
    assert without_costs(shared) == without_costs(all_rows(showing, settings.but(share_prefill=False), batch))
    assert all(row["efficiency"]["shared_prefill"] for row in shared)


@pytest.mark.parametrize("policy", CURIOUS)
def test_replay_leaves_the_statistics_that_reading_leaves(showing: Any, policy: str) -> None:
    ids, mask = pad_left([prompt.context for prompt in make_batch((41, 30, 37)).prompts], torch.device("cpu"))
    settings = SETTINGS.but(policies=(policy,), budgets=("24",))
    variant = variants(settings)[0]
    source = RecordingCache(showing.config)
    feed(showing, ids, mask, source)
    queries = source.stop()
    for rows, width in (([0, 1, 2], 41), ([2, 1], 37)):
        part = mask[rows][:, -width:]
        read = make_cache(showing, settings, variant, 24, part.shape[1], part)
        feed(showing, ids[rows][:, -width:], part, read)
        replayed = make_cache(showing, settings, variant, 24, part.shape[1], part)
        replay(source, replayed, torch.tensor(rows), width, queries)
        for ours, expected in zip(replayed.layers, read.layers, strict=True):
            assert ours.positions.tolist() == expected.positions.tolist()
            assert ours.observed.keys() == expected.observed.keys()
            for name, values in expected.observed.items():
                torch.testing.assert_close(ours.observed[name], values, rtol=1e-5, atol=1e-6)


def test_what_is_recorded(showing: Any) -> None:
    ids, mask = pad_left([prompt.context for prompt in make_batch((20, 17)).prompts], torch.device("cpu"))
    whole, in_parts = RecordingCache(showing.config), RecordingCache(showing.config)
    plain = DynamicCache(config=showing.config)
    expected = feed(showing, ids, mask, plain)
    assert torch.equal(feed(showing, ids, mask, whole), expected)
    for start, stop in ((0, 9), (9, 15), (15, 16), (16, 20)):
        logits = feed(showing, ids[:, start:stop], mask[:, :stop], in_parts)
    torch.testing.assert_close(logits, expected)
    full, part = whole.stop(), in_parts.stop()
    feed(showing, ids[:, :1], torch.cat([mask, mask[:, -1:]], dim=1), whole)
    assert whole.stop()[0].query.shape == full[0].query.shape == (2, 4, 20, 8)
    for index in range(2):
        torch.testing.assert_close(part[index].query, full[index].query)
        assert torch.equal(full[index].key, plain.layers[index].keys)
    assert can_share(whole) and full[0].logits.scaling == pytest.approx(8**-0.5)


def test_without_need_nothing_is_recorded(showing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingCache, "__init__", None)
    settings = SETTINGS.but(policies=("recency", "keydiff"))
    assert all(row["efficiency"]["shared_prefill"] for row in all_rows(showing, settings, make_batch((40,))))


def test_latent_attention_reads_for_every_policy_that_needs_queries() -> None:
    model = models.build("deepseek_v3", PAGED_EVICTION, vocab_size=VOCABULARY)
    model.generation_config.eos_token_id = 1
    assert not shows_queries(model)
    settings = SETTINGS.but(policies=("h2o", "recency"), budgets=("20%", "full"))
    batch = make_batch((60, 45), length=60)
    together = all_rows(model, settings, batch)
    apart = [row for one in batch.prompts for row in all_rows(model, settings, replace(batch, prompts=(one,)))]
    assert without_costs(together) == without_costs(apart)
    shared = {row["policy"]: row["efficiency"]["shared_prefill"] for row in together}
    assert shared == {"full": True, "recency": True, "h2o": False}


@pytest.mark.parametrize("agreement", [False, True])
def test_a_prompt_is_observed_once_for_all_budgets(showing: Any, agreement: bool, monkeypatch: Any) -> None:
    counts: list[int] = []
    observe = H2O.observe

    def counting(self: H2O, statistics: Any, attention: Any) -> Any:
        counts.append(attention.queries.shape[2])
        return observe(self, statistics, attention)

    monkeypatch.setattr(H2O, "observe", counting)
    policies = ("h2o", "h2o@pyramid", "caote(h2o)")
    settings = SETTINGS.but(policies=policies, budgets=("10%", "30%", "60%", "full"), agreement=agreement)
    batch = make_batch(LENGTHS, length=150, new_tokens=(2,))
    shared = without_costs(all_rows(showing, settings, batch))
    # Two layers; "h2o" and "caote(h2o)" do not know of each other.
    assert counts.count(150) == 4
    counts.clear()
    apart = without_costs(all_rows(showing, settings.but(share_prefill=False), batch))
    assert counts.count(150) == 2 * 9
    for ours, expected in zip(shared, apart, strict=True):
        assert (ours.pop("agreement") is None) is (expected.pop("agreement") is None)
        assert ours == expected


def test_a_memory_keeps_nothing_of_queries_it_does_not_know() -> None:
    query = torch.randn(2, 4, 6, 8)
    memory = Memory([Queries(query, torch.randn(2, 2, 6, 8), Logits(1.0))])
    policy = H2O()
    positions = torch.arange(6).expand(2, 2, 6)
    empty = {name: torch.zeros(2, 2, 6) for name in policy.needs.token_statistics}
    for queries in (query, query.clone(), query[:, :, 2:], query[:1].clone().expand(2, -1, -1, -1)):
        positions_asked = torch.arange(6)[-queries.shape[2] :].expand(2, -1)
        attention = Attention(queries, torch.randn(2, 2, 6, 8), positions_asked, positions, Logits(1.0))
        first, again = (memory.observe(policy.observe, empty, attention) for _ in range(2))
        expected = policy.observe(empty, attention)
        assert all(torch.equal(first[name], values) for name, values in expected.items())
        assert all(torch.equal(again[name], values) for name, values in expected.items())
    assert len(memory._found) == 2
