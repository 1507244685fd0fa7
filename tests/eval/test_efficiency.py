"""Costs are measured where they arise, and what can be counted is counted right."""

import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from batches import all_rows, make_batch
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.efficiency import PeakMemory, Stopwatch, evicted_tokens, kv_bytes, timed_updates

CPU = torch.device("cpu")
SETTINGS = TaskSettings(
    policies=("paged_eviction", "recency"), budgets=("40", "full"), block_size=4, tasks=("passkey",)
)


@pytest.mark.parametrize("question", [0, 16])
@pytest.mark.parametrize("share", [True, False])
def test_counts_of_a_run(model: Any, question: int, share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    settings = SETTINGS.but(question_aware=not question, share_prefill=share)
    batch = make_batch((100, 70), question, new_tokens=(9, 9))
    monkeypatch.setattr("batches.IdTokenizer.eos_token_id", None)
    for row in all_rows(model, settings, batch):
        cost, held = row["efficiency"], row["prompt_tokens"] + 8
        assert row["new_tokens"] == 9 and cost["decode_steps"] == 8 and cost["batch_rows"] == 2
        assert cost["decode_seconds"] > 0 and cost["prefill_seconds"] > 0
        assert cost["shared_prefill"] is share
        per_token = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, width, bytes
        if row["policy"] == "full":
            assert cost["evicted_tokens"] == 0
            assert cost["kv_bytes"] == per_token * 108  # the pads of a batch are held too
        else:
            assert cost["evicted_tokens"] == 2 * (held - 40)
            assert cost["kv_bytes"] == per_token * 40
        if share:
            assert cost["peak_bytes"] is None
        else:
            assert cost["peak_bytes"] is None or cost["peak_bytes"] > 10 * 2**20


def test_a_prompt_that_ends_at_once_decodes_nothing(model: Any) -> None:
    row = all_rows(model, SETTINGS, make_batch((30,), new_tokens=(1,)))[0]
    assert row["new_tokens"] == 1 and row["efficiency"]["decode_steps"] == 0


def test_update_time_is_what_the_cache_takes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedEvictionCache(model.config, budget=16, block_size=4)
    plain = PagedEvictionCache.update

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(PagedEvictionCache, "update", slow)
    watch = Stopwatch(CPU)
    with timed_updates(cache) as spent, torch.no_grad():
        model(torch.arange(2, 30)[None], **{CACHE_ARGUMENT: cache})
    assert 0.02 <= spent.seconds < watch.lap()
    assert "update" not in vars(cache)


def test_costs_of_rows_are_their_own(model: Any) -> None:
    cache = PagedEvictionCache(model.config, budget=16, block_size=4)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :15] = 0
    with torch.no_grad():
        model(torch.arange(2, 42).repeat(2, 1), attention_mask=mask, **{CACHE_ARGUMENT: cache})
    assert evicted_tokens(cache, 2) == [2 * 24, 2 * 9]
    full = DynamicCache(config=model.config)
    assert evicted_tokens(full, 3) == [0, 0, 0] and kv_bytes(full) == 0


def test_peak_memory_is_the_peak_since_it_was_asked_for() -> None:
    before = PeakMemory(CPU).bytes()
    if before is None:
        pytest.skip("this system does not reset the peak of a process")
    size = 200 * 2**20
    memory = PeakMemory(CPU)
    block = torch.ones(size, dtype=torch.uint8)
    del block
    peak = memory.bytes()
    assert peak is not None and peak > before + size // 2
    assert (PeakMemory(CPU).bytes() or 0) < peak - size // 2
