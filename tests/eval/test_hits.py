"""The hit rate is what a direct computation with eager attention and the cache alone gives, in padded batches too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import all_rows, make_batch, without_costs
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.data.prompting.prompts import Prompt
from hf_paged_eviction_eval.options.evaluate import EvalOptions
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.report.figures import hits_over_layers
from hf_paged_eviction_eval.report.measures import hit_table
from hf_paged_eviction_eval.report.runs import load_runs
from hf_paged_eviction_eval.running import requests
from report_rows import FULL, make_row, values, write_run

MOST = 12
SETTINGS = TaskSettings(
    policies=("keydiff", "recency", "snapkv(window=8)@ada_kv"),
    budgets=("48", "full"),
    tasks=("passkey",),
    block_size=8,
    heads="separate",
    hit_rate=MOST,
)


@pytest.fixture(scope="module")
def eager() -> Any:
    model, _ = embedded.load()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def showing() -> Any:
    model, _ = embedded.load()
    model.set_attn_implementation(PAGED_EVICTION)
    return model


def rates_by_hand(eager: Any, showing: Any, prompt: Prompt, policy: str, answer: list[int]) -> dict[str, list[float]]:
    """Nothing of the harness: the model's own attention weights, and what a cache of one row says that it holds."""
    name, _, allocator = policy.partition("@")
    read = [*prompt.context, *prompt.question]
    with torch.no_grad():
        weights = eager(torch.tensor([read + answer[:-1]]), output_attentions=True, use_cache=False).attentions
        cache = PagedEvictionCache(
            showing.config, budget=48, policy=name, allocator=allocator or "uniform", block_size=8, heads="separate"
        )
        showing(torch.tensor([list(prompt.context)]), **{CACHE_ARGUMENT: cache})
        if prompt.question:
            showing(torch.tensor([list(prompt.question)]), **{CACHE_ARGUMENT: cache})
    rates = {}
    for index, (paid, layer) in enumerate(zip(weights, cache.layers, strict=True)):
        heads = layer.positions.shape[1]
        paid = paid[0].unflatten(0, (heads, -1)).mean(1)[:, len(read) :, : len(read)].sum(1)
        best = [set(paid[head].argsort(descending=True)[:MOST].tolist()) for head in range(heads)]
        held = [set(layer.positions[0, head].tolist()) for head in range(heads)]
        rates[str(index)] = [len(top & here) / MOST for top, here in zip(best, held, strict=True)]
    return rates


@pytest.mark.parametrize("question", [0, 9])
def test_rows_say_what_a_direct_computation_gives(eager: Any, showing: Any, question: int) -> None:
    batch = make_batch((120, 90, 71), question, new_tokens=(6, 4, 1), length=None)
    settings = SETTINGS.but(question_aware=not question)
    rows = all_rows(showing, settings, batch)
    answers = {row["id"]: list(map(int, row["prediction"].split())) for row in rows if row["policy"] == "full"}
    prompts = {prompt.sample.id: prompt for prompt in batch.prompts}
    seen = set()
    for row in rows:
        answer = answers[row["id"]]
        if row["policy"] == "full" or len(answer) == 1:  # the last token of an answer is never fed
            assert row["hit_rate"] is None
            continue
        expected = rates_by_hand(eager, showing, prompts[row["id"]], row["policy"], answer)
        assert row["hit_rate"].keys() == expected.keys()
        for layer, rates in expected.items():
            assert row["hit_rate"][layer] == pytest.approx(rates, abs=1e-4)
            seen.update(rates)
    assert len(seen) > 4 and max(seen) > 0.6 and min(seen) < 0.3


def test_rates_depend_on_nothing_but_the_prompt(showing: Any) -> None:
    settings = SETTINGS.but(policies=("keydiff", "oracle"), question_aware=False)
    batch = make_batch((120, 71), 9, (3,), length=None)
    together = all_rows(showing, settings, batch)
    unshared = all_rows(showing, settings.but(share_prefill=False), batch)
    apart = [row for one in batch.prompts for row in all_rows(showing, settings, replace(batch, prompts=(one,)))]
    assert without_costs(together) == without_costs(unshared) == without_costs(apart)
    rates_of = {row["policy"]: row["hit_rate"] for row in together if row["id"] == "0"}
    # At least as many as any other policy holds: the oracle keeps what will be attended to.
    assert all(sum(rates) >= sum(rates_of["keydiff"][layer]) for layer, rates in rates_of["oracle"].items())
    plain_rows = without_costs(all_rows(showing, settings.but(hit_rate=None), batch))
    assert [row | {"hit_rate": None} for row in without_costs(together)] == plain_rows  # it changes nothing else


def test_the_command_line_asks_for_queries() -> None:
    options = EvalOptions(policies="keydiff", budgets="25%", hit_rate=32)
    settings = requests.task_settings(options)
    assert settings.hit_rate == 32 and settings.attn_implementation == PAGED_EVICTION
    with pytest.raises(Exception, match=r"--hit-rate.*--attn-implementation"):
        requests.task_settings(EvalOptions(policies="keydiff", hit_rate=32, attn_implementation="sdpa"))


def test_the_report_shows_means_by_layer(tmp_path: Path) -> None:
    paged = ("keydiff", "256")
    rows = [
        make_row("qasper", paged, 0, hit_rate={"0": [1.0, 0.5], "1": [0.5, 0.0]}),
        make_row("qasper", paged, 1, hit_rate={"0": [1.0, 0.5], "1": [1.0, 0.5]}),
        make_row("qasper", paged, 2, hit_rate=None),
        make_row("qasper", FULL, 2),
    ]
    runs = load_runs([write_run(tmp_path, rows)])
    assert values(hit_table(runs)) == [("256", "keydiff", 62.5, 50.0, "1", 25.0)]
    plot = hits_over_layers(runs[0])
    assert plot is not None
    full, held = (line.get_xydata().tolist() for line in plot.figure.axes[0].get_lines())
    assert full == [[0, 100], [1, 100]] and held == [[0, 75], [1, 50]]
