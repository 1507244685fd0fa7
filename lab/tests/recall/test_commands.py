"""Commands under a disposal that takes part in attention."""

from pathlib import Path
from typing import Any

import pytest
import torch

from batches import all_rows, make_batch, without_costs
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches.policy_names import attention_for, needs_queries
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.options.settings import TaskSettings
from hf_paged_eviction_eval.running.prefill import feed, pad_left, replay
from hf_paged_eviction_eval.running.recording import RecordingCache
from hf_paged_eviction_lab.recall import traffic
from invoking import run

RECALL = "recall(blocks=1)"


@pytest.mark.parametrize("disposal", ["recall(blocks=1, keep=0.5, layers=2)"])
def test_one_reading_gives_the_rows_of_separate_runs(showing: Any, disposal: str) -> None:
    settings = TaskSettings(
        policies=("keydiff", "recency"),
        budgets=("20%", "full"),
        block_size=4,
        tasks=("passkey",),
        attn_implementation=PAGED_EVICTION,
        disposal=disposal,
        question_aware=False,
    )
    batch = make_batch((150, 71), 20, length=150)
    shared = all_rows(showing, settings, batch)
    apart = all_rows(showing, settings.but(share_prefill=False), batch)
    assert without_costs(shared) == without_costs(apart)
    assert all(row["efficiency"]["shared_prefill"] for row in shared)
    dropped = all_rows(showing, settings.but(disposal="drop"), batch)
    assert [row["prediction"] for row in dropped] != [row["prediction"] for row in shared]
    for row, other in zip(shared, dropped, strict=True):
        cost, without, recalls = row["efficiency"], other["efficiency"], row["policy"] != "full"
        assert (cost["kv_bytes"] > without["kv_bytes"]) == recalls  # vectors of blocks lie beside the slots


@pytest.mark.parametrize("disposal", [RECALL, "recall(blocks=2, keep=0.4)"])
def test_replay_leaves_what_reading_leaves(showing: Any, disposal: str) -> None:
    """The same tokens in the slots and in host memory, and the same look at the prompt."""
    ids, mask = pad_left([prompt.context for prompt in make_batch((61, 50, 57)).prompts], torch.device("cpu"))
    source = RecordingCache(showing.config)
    feed(showing, ids, mask, source)
    queries = source.stop()
    caches = [
        PagedEvictionCache(showing.config, 24, block_size=4, disposal=disposal, attention_mask=mask) for _ in "ab"
    ]
    read, replayed = caches
    feed(showing, ids, mask, read)
    replay(source, replayed, torch.arange(3), 61, queries)
    for ours, expected in zip(replayed.layers, read.layers, strict=True):
        assert ours.positions.tolist() == expected.positions.tolist()
        one, other = ({**action.stored, "looked": action._looked} for action in (ours.action, expected.action))
        assert torch.allclose(one["states"], other["states"], atol=1e-6)
        assert one["stored"].tolist() == other["stored"].tolist()
        assert (one["looked"] is None) == (other["looked"] is None)
        assert one["looked"] is None or torch.equal(one["looked"], other["looked"])


def test_the_attention_implementation_that_is_needed() -> None:
    assert needs_queries("keydiff", RECALL) and not needs_queries("keydiff", "drop")
    assert attention_for(["keydiff"], None, RECALL) == PAGED_EVICTION
    assert attention_for(["keydiff"], None) is attention_for([], None, RECALL) is None
    with pytest.raises(UserError, match=r"recall\(blocks=1\)"):
        attention_for(["keydiff"], "sdpa", RECALL)
    with pytest.raises(UserError, match="--disposal"):
        attention_for(["keydiff"], None, "recal")


def test_a_context_under_recall(tmp_path: Path) -> None:
    """What `compress --disposal recall` has written is loaded with its disposal."""
    text = tmp_path / "text.txt"
    text.write_text("The code of the red door is 5128. " + "Nothing happens here. " * 60, "utf-8")
    context = tmp_path / "context.safetensors"
    how = ["--budget", "96", "--policy", "keydiff", "--disposal", "recall(blocks=2)"]
    run("compress", "--text", text, "--output", context, *how)
    cache = PagedEvictionCache.load(context, embedded.load(attn_implementation=PAGED_EVICTION)[0].config)
    assert cache.stats().mean_held == 96 and traffic(cache).host_bytes > 0
