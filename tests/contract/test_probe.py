"""`compress_by_probe`: what is scored is the attention of the probe, and nothing else of the probe remains."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.layer.scores import in_slots
from hf_paged_eviction.recipes.probe import compress_by_probe
from reference import Recorder, assert_exact

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
BLOCK = 4
PROBE = [11, 12, 13, 14, 15]
FAMILIES = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3", "gpt2", "gemma3"]


def room(model: Any, **settings: Any) -> PagedEvictionCache:
    defaults = {"budget": 64, "block_size": BLOCK, "policy": "kvzip", "heads": "separate"}
    return models.paged(model.config, **{**defaults, **settings})


def compress(model: Any, cache: PagedEvictionCache, ids: Tensor, mask: Tensor, budget: int, chunk: int = 16) -> None:
    compress_by_probe(model, cache, budget, ids, mask, probe_ids=PROBE, chunk_size=chunk)


def chunks_of(length: int, chunk: int) -> list[tuple[int, int]]:
    """Counted from the end."""
    spans, stop = [], length
    while stop > 0:
        spans.append((max(stop - chunk, 0), stop))
        stop -= chunk
    return spans


def eager_attention(family: str, text: Tensor) -> list[Tensor]:
    """Of one row, per layer `[query heads, queries, tokens]`."""
    with torch.no_grad():
        attentions = models.shared(family, "eager")(text[None], output_attentions=True, use_cache=False).attentions
    return [weights[0].float() for weights in attentions]


def probed(family: str, row: Tensor, chunk: int, heads: int, layer: int, mean: bool) -> Tensor:
    """Per KV head and context token, the largest weight (or the mean over all queries), by a plain loop."""
    length = len(row)
    best = torch.zeros(heads, length)
    queries = 0
    for start, stop in chunks_of(length, chunk):
        text = torch.cat([row, torch.tensor(PROBE), row[start:stop]])
        weights = eager_attention(family, text)[layer].unflatten(0, (heads, -1))
        for head in range(heads):
            for token in range(length):
                for query in range(length, len(text)):
                    paid = weights[head, :, query, token]
                    if mean:
                        best[head, token] += paid.mean()
                    else:
                        best[head, token] = max(best[head, token], paid.max())
        queries += len(text) - length
    return best / queries if mean else best


@pytest.mark.parametrize("chunk", [7, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_probes_attention(family: str, chunk: int) -> None:
    """The largest weight that a query of the probe, or of the repeated text, pays; the context's own do not count."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    rows = models.prompts([30, 17], seed=1)
    ids, mask = models.left_pad(rows)
    model = models.shared(family, OURS)
    cache = room(model)
    compress(model, cache, ids, mask, 64, chunk)  # nothing has to go: the statistics of all tokens are there
    for index, layer in cache.paged_layers:
        for at, row in enumerate(rows):
            expected = probed(family, row, chunk, layer.keys.shape[1], index, mean=False)
            attention = layer.observed["attention"][at, :, 30 - len(row) :]
            torch.testing.assert_close(attention, expected, rtol=1e-4, atol=2e-5)


def test_a_mean_counts_the_probes_queries_alone() -> None:
    rows = models.prompts([30, 17], seed=1)
    ids, mask = models.left_pad(rows)
    model = models.shared("llama", OURS)
    cache = room(model, policy="attention_mean")
    compress(model, cache, ids, mask, 64, 13)
    for index, layer in cache.paged_layers:
        scores = in_slots(layer.state, None)
        for at, row in enumerate(rows):
            expected = probed("llama", row, 13, 2, index, mean=True)
            torch.testing.assert_close(scores[at, :, 30 - len(row) :], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_statistics_remains(family: str, record: bool) -> None:
    """Where nothing has to go, the model goes on as if there had been no probe."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, OURS)
    ids, mask = models.left_pad(models.prompts([30, 17, 2], seed=1))
    probed, plain = room(model, record_past=record), modes.dynamic(model)
    compress(model, probed, ids, mask, 64)
    modes.forward(model, plain, ids, mask, 0, 30)
    assert probed.get_seq_length() == 30
    assert [layer.record_past for _, layer in probed.paged_layers] == [record] * len(probed.paged_layers)
    question = torch.stack(models.prompts([4] * 3, seed=2))
    ids, mask = torch.cat([ids, question], dim=1), modes.extend(mask, 4)
    answers = [modes.generate(model, cache, ids, mask, 12) for cache in (probed, plain)]
    assert torch.equal(*answers)


SETTINGS: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared": {"heads": "shared"},
    "ada_kv": {"allocator": "ada_kv"},
    "d2o": {"allocator": "d2o"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_do_not_depend_on_their_batch(name: str) -> None:
    model = models.shared("llama", OURS)
    rows = models.prompts([40, 33, 17, 3], seed=3)

    def held(chosen: list[Tensor]) -> list[Any]:
        cache = room(model, **SETTINGS[name])
        ids, mask = models.left_pad(chosen)
        compress(model, cache, ids, mask, 20)
        for token in torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 9]]).expand(len(chosen), -1).split(1, dim=1):
            ids, mask = torch.cat([ids, token], dim=1), modes.extend(mask, 1)
            modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
        return [[[sorted(set(h) - {-1}) for h in r] for r in one.positions.tolist()] for _, one in cache.paged_layers]

    together = held(rows)
    for at, row in enumerate(rows):
        for layer, own in zip(together, held([row]), strict=True):
            assert layer[at] == own[0], f"row {at}"


@pytest.mark.parametrize("name", SETTINGS)
def test_exact_after_the_probe(name: str) -> None:
    """Logits are those of the tokens held, at their own positions."""
    model = models.shared("llama", OURS)
    cache = room(model, **SETTINGS[name])
    ids, mask = models.left_pad(models.prompts([40, 33], seed=3))
    read = room(model, **SETTINGS[name])
    with Recorder(model, read) as before:  # what the columns of the context are
        for start, stop in chunks_of(40, 16)[::-1]:
            modes.forward(model, read, ids, mask, start, stop)
    compress(model, cache, ids, mask, 20)
    assert cache.stats().evicted_tokens > 0
    with Recorder(model, cache, poison=True) as recorder:
        recorder.columns = before.columns
        for token in torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 9]]).expand(2, -1).split(1, dim=1):
            ids, mask = torch.cat([ids, token], dim=1), modes.extend(mask, 1)
            modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])
    assert_exact(model, recorder)


def test_copies_serve_many_questions() -> None:
    model = models.shared("llama", OURS)
    cache = room(model)
    ids, mask = models.left_pad(models.prompts([40], seed=3))
    compress(model, cache, ids, mask, 20)
    sequences = []
    for seed in (1, 2, 1):
        more = torch.cat([ids, torch.stack(models.prompts([5], seed=seed))], dim=1)
        sequences.append(modes.generate(model, copy.deepcopy(cache), more, modes.extend(mask, 5), 8)[:, 45:].tolist())
    assert sequences[0] == sequences[2]
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "paged_eviction"}, "no statistics of attention"),
        ({"policy": "snapkv"}, "depends on the positions"),
        ({"policy": "sage_kv"}, "depends on the positions"),
        ({"budget": 36}, r"40 columns.*0"),
        ({"budget": "50%"}, r"holds.*prompt"),
    ],
)
def test_caches_that_cannot_be_probed(settings: dict[str, Any], message: str) -> None:
    model = models.shared("llama", OURS)
    cache = room(model, **settings)
    ids, mask = models.left_pad(models.prompts([40]))
    with pytest.raises(ValueError, match=message):
        compress(model, cache, ids, mask, 20)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 22}, "budget=22"),
        ({"budget": 68}, "would be growth"),
        ({"probe_ids": []}, "at least one"),
        ({"probe_ids": [[1, 2]]}, "ids of one text"),
        ({"chunk_size": 0}, "chunk_size must be"),
        ({"attention_mask": torch.ones(1, 39)}, "has shape"),
        ({"attention_mask": torch.cat([torch.ones(1, 39), torch.zeros(1, 1)], 1)}, "padded"),
        ({"attention_mask": torch.zeros(1, 40)}, "at least one token"),
        ({"input_ids": torch.zeros(40)}, r"\[rows, length\]"),
    ],
)
def test_arguments_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    model = models.shared("llama", OURS)
    cache = room(model)
    ids, mask = models.left_pad(models.prompts([40]))
    arguments = {
        "budget": 20,
        "input_ids": ids,
        "attention_mask": mask,
        "probe_ids": PROBE,
        "chunk_size": 16,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        compress_by_probe(model, cache, **arguments)
    assert cache.get_seq_length() == 0


def test_a_cache_that_has_read_something() -> None:
    model = models.shared("llama", OURS)
    cache = room(model)
    ids, mask = models.left_pad(models.prompts([40]))
    modes.forward(model, cache, ids, mask, 0, 10)
    with pytest.raises(ValueError, match="read something already"):
        compress(model, cache, ids, mask, 20)
    with pytest.raises(TypeError, match="PagedEvictionCache"):
        compress(model, modes.dynamic(model), ids, mask, 20)  # type: ignore[arg-type]
