"""The attention implementation "paged_eviction": what it observes is what attention really does."""

from typing import Any

import pytest
import torch

import models
import modes
import rows
from evicting import binding, exact
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.policies.attention.h2o import H2O
from hf_paged_eviction.tensors.pieces import PIECE_BYTES
from reference import Recorder, assert_evicted

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
ROOMY = 160


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", modes.MODES)
def test_same_as_dynamic(mode: str, padded: bool) -> None:
    inputs = modes.batch(mode, padded)
    plain, ours = models.shared("llama"), models.shared("llama", OURS)
    cache = models.paged(ours.config, budget=ROOMY, block_size=4, policy="h2o")
    expected = modes.run(plain, modes.dynamic(plain), mode, *inputs)
    assert modes.run(ours, cache, mode, *inputs).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gemma3"])
def test_without_our_cache_it_is_plain_attention(family: str) -> None:
    inputs = modes.batch("greedy", padded=True)
    plain, ours = models.shared(family), models.shared(family, OURS)
    expected = modes.run(plain, modes.dynamic(plain), "greedy", *inputs)
    assert modes.run(ours, modes.dynamic(ours), "greedy", *inputs).tolist() == expected.tolist()


def eager_attention(family: str, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Per layer `[rows, query heads, queries, tokens]`, rows of pads zero."""
    model = models.shared(family, "eager")
    with torch.no_grad():
        attentions = model(
            ids, attention_mask=mask, position_ids=models.positions_of(mask), output_attentions=True, use_cache=False
        ).attentions
    return [weights.float() * mask[:, None, :, None] for weights in attentions]


@pytest.mark.parametrize("chunks", [[37], [20, 9, 8], [30, *[1] * 7], [1] * 37], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3", "gpt2"])
def test_observed_attention_is_that_of_the_model(family: str, chunks: list[int]) -> None:
    """Summed up over a whole text it is the column sum of the eager attention matrix, however the text came in."""
    ids, mask = models.left_pad(models.prompts([37, 25], seed=1))
    model = models.shared(family, OURS)
    # One block is one token, so that no query waits at the end.
    cache = models.paged(model.config, budget=64, block_size=1, policy=H2O(normalised=False))
    start = 0
    for count in chunks:
        modes.forward(model, cache, ids, mask, start, start + count)
        start += count
    for index, layer in cache.paged_layers:
        expected = eager_attention(family, ids, mask)[index].sum(2)
        heads = layer.keys.shape[1]
        expected = expected.unflatten(1, (heads, -1)).mean(2) * mask[:, None]
        observed = layer.observed["attention"]
        torch.testing.assert_close(observed, expected, rtol=1e-4, atol=2e-5)
        opportunities = torch.where(mask.bool(), mask.sum(-1, keepdim=True) - models.positions_of(mask), 0)
        assert (
            layer.recorder.observer.count.of(layer.positions)[:, 0].long().mul(mask).tolist() == opportunities.tolist()
        )


@pytest.mark.parametrize("block_size", [3, 4, 16])
def test_queries_of_a_block_count_once_it_is_full(block_size: int) -> None:
    ids, mask = models.left_pad(models.prompts([37, 25], seed=1))
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, budget=48, block_size=block_size, policy="h2o")
    modes.forward(model, cache, ids, mask, 0, 20)
    for at in range(20, 37):
        modes.forward(model, cache, ids, mask, at, at + 1)
    for row, length in enumerate([37, 25]):
        prompt = length - 17
        observed = max(prompt, length // block_size * block_size)
        first = ids.shape[1] - length  # the row's first token has met every query
        assert cache.layers[0].recorder.observer.count.of(cache.layers[0].positions)[row, 0, first].item() == observed


def test_pieces_of_a_long_prompt_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = models.left_pad(models.prompts([60, 41]))
    model = models.shared("llama", OURS)
    observed = []
    for in_pieces in (False, True):
        if in_pieces:
            monkeypatch.setitem(PIECE_BYTES, "cpu", 4 * 2 * 4 * 60 * 7)
        cache = models.paged(model.config, budget=24, block_size=4, policy="h2o")
        modes.forward(model, cache, ids, mask, 0, 60)
        observed.append(cache.layers[1].observed["attention"])
    torch.testing.assert_close(observed[0], observed[1])


@pytest.mark.parametrize(
    ("policy", "pieces"),
    [
        ("expected_attention", 2),
        ("compactor", 2),
        ("h2o", 9),
        ("hybrid(h2o, compactor)", 9),
        ("adaptive(keydiff, compactor)", 9),
    ],
)
def test_who_reads_no_weights_gets_larger_pieces(policy: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 queries of 4 heads with 8 channels see 60 tokens; a piece has room for 7 rows of weights, or 52 queries."""
    model, ids = models.shared("llama", OURS), torch.cat(models.prompts([60]))[None]
    monkeypatch.setitem(PIECE_BYTES, "cpu", 4 * 4 * 60 * 7)
    cache = models.paged(model.config, budget=24, block_size=4, policy=policy)
    seen = []

    def counted(statistics: Any, attention: Any) -> Any:
        seen.append(attention.query_positions.shape[1])
        return cache.policy.observe(statistics, attention)

    for layer in cache.layers:
        layer.recorder.observer.observe = counted
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
    layers = model.config.num_hidden_layers
    assert sum(seen) == 60 * layers
    assert len(seen) == pieces * layers


@pytest.mark.parametrize("budget", [12, 24, 52])
@pytest.mark.parametrize("heads", ["shared", "separate"])
@pytest.mark.parametrize("turns", [None, [10, 2, 6]], ids=str)
def test_rows_do_not_depend_on_their_batch(heads: str, budget: int, turns: list[int] | None) -> None:
    model = models.shared("llama", OURS)
    settings: dict[str, Any] = {"budget": budget, "block_size": 4, "policy": "h2o", "heads": heads}
    assert rows.compare(model, [40, 29, 1], turns, **settings) > 0


def test_attention_decides() -> None:
    """Another policy would have kept other tokens: the run is not decided by protection alone."""
    held = []
    for policy in ("h2o", "recency"):
        model = models.shared("llama", OURS)
        cache = binding(model, "greedy", policy=policy)
        ids, mask = modes.batch("greedy", padded=False)
        with Recorder(model, cache) as recorder:
            modes.run(model, cache, "greedy", ids, mask)
        assert_evicted(recorder)
        held.append(cache.layers[1].positions.sort(-1).values)
    assert not torch.equal(held[0], held[1])


def test_statistics_follow_rows_and_reset() -> None:
    model = models.shared("llama", OURS)
    cache = binding(model, "direct", policy="h2o")
    ids, mask = models.left_pad(models.prompts([40, 30, 20]))
    modes.forward(model, cache, ids, mask, 0, 40)
    before = cache.layers[0].observed["attention"].clone()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(cache.layers[0].observed["attention"], before[[2, 0, 0]])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].observed["attention"], before[[0, 0]])
    cache.reset()
    modes.forward(model, cache, ids, mask, 0, 40)
    assert torch.equal(cache.layers[0].observed["attention"], before)


def test_crop_takes_back_statistics_of_tokens_that_waited() -> None:
    """Tokens that were dropped leave no trace."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([40, 33]))
    caches = [models.paged(model.config, budget=24, block_size=4, policy="h2o", record_past=True) for _ in "ab"]
    for cache in caches:
        modes.forward(model, cache, ids, mask, 0, 30)
    modes.forward(model, caches[0], ids, mask, 30, 34)
    modes.forward(model, caches[1], ids, mask, 30, 40)
    caches[1].crop(34)
    caches[0].crop(34)
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(layer.positions, other.positions)
        torch.testing.assert_close(layer.observed["attention"], other.observed["attention"])


def test_queries_of_an_unfinished_block_count_when_the_text_goes_on() -> None:
    """Single tokens, then a forward of several before their block is full: no query is lost, none counts twice."""
    ids, mask = models.left_pad(models.prompts([37, 25], seed=1))
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, budget=48, block_size=16, policy=H2O(normalised=False))
    for start, stop in [(0, 20), *((at, at + 1) for at in range(20, 25)), (25, 37)]:
        modes.forward(model, cache, ids, mask, start, stop)
    for index, layer in cache.paged_layers:
        expected = eager_attention("llama", ids, mask)[index].sum(2).unflatten(1, (2, -1)).mean(2)
        torch.testing.assert_close(layer.observed["attention"], expected * mask[:, None], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("budget", [24, 80])
def test_a_chunk_of_pads_leaves_a_row_alone(budget: int) -> None:
    """A second turn in chunks, the first of which is nothing but pads in some rows, while their queries wait."""
    model = models.shared("llama", OURS)
    turn, real = models.left_pad(models.prompts([10, 2, 8, 3], seed=4))  # never one token: that is another rule
    forced = torch.stack(models.prompts([17] * 4, seed=5))

    def observed(rows: list[int]) -> list[torch.Tensor]:
        cache = models.paged(model.config, budget=budget, block_size=8, policy=H2O(normalised=False))
        ids, mask = models.left_pad([models.prompts([40, 33, 9, 20], seed=3)[row] for row in rows])
        modes.forward(model, cache, ids, mask, 0, ids.shape[1])
        for fed, its_mask in (
            *((token, torch.ones_like(token)) for token in forced[rows].split(1, dim=1)),
            *zip(turn[rows].split(5, dim=1), real[rows].split(5, dim=1), strict=True),
        ):
            if not its_mask.any():
                continue
            fed, its_mask = fed[:, -int(its_mask.sum(-1).max()) :], its_mask[:, -int(its_mask.sum(-1).max()) :]
            ids, mask = torch.cat([ids, fed], dim=1), torch.cat([mask, its_mask], dim=1)
            modes.forward(model, cache, ids, mask, ids.shape[1] - fed.shape[1], ids.shape[1])
        last = cache.layers[1]
        return [
            last.observed["attention"][row, 0][order[last.positions[row, 0][order] >= 0]]
            for row in range(len(rows))
            for order in [last.positions[row, 0].argsort()]
        ]

    together = observed([0, 1, 2, 3])
    for row in range(4):
        torch.testing.assert_close(together[row], observed([row])[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("policy", ["h2o", "snapkv(window=6)"])
def test_a_single_token_fills_the_storage_while_pads_lie_in_the_middle(policy: str, record: bool) -> None:
    """All tokens are then put in order, by a layer that has not seen this token's query yet."""
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, budget=40, block_size=4, policy=policy, record_past=record)
    (ids, mask), (turn, real) = (models.left_pad(models.prompts(lengths)) for lengths in ([20, 15], [10, 3]))
    ids, mask = torch.cat([ids, turn], dim=1), torch.cat([mask, real], dim=1)
    forced = torch.stack(models.prompts([30, 30], seed=5))
    with exact(model, cache, poison=True):
        modes.forward(model, cache, ids, mask, 0, 20)
        modes.forward(model, cache, ids, mask, 20, 30)
        for token in forced.split(1, dim=1):
            ids, mask = torch.cat([ids, token], dim=1), modes.extend(mask, 1)
            modes.forward(model, cache, ids, mask, ids.shape[1] - 1, ids.shape[1])


def test_crop_takes_back_queries_that_were_kept() -> None:
    """Without recording, where nothing was evicted: queries that wait for their block go with their tokens."""
    ids, mask = models.left_pad(models.prompts([40, 33], seed=1))
    model = models.shared("llama", OURS)
    caches = [models.paged(model.config, budget=64, block_size=16, policy="h2o") for _ in "ab"]
    for cache in caches:
        for start, stop in [(0, 32), *((at, at + 1) for at in range(32, 35))]:
            modes.forward(model, cache, ids, mask, start, stop)
    other = ids.roll(1, dims=1)
    for at in (35, 36):
        modes.forward(model, caches[0], other, mask, at, at + 1)
    caches[0].crop(-2)
    for at in range(35, 40):
        for cache in caches:
            modes.forward(model, cache, ids, mask, at, at + 1)
    more = torch.stack(models.prompts([3, 3], seed=2))
    ids, mask = torch.cat([ids, more], dim=1), modes.extend(mask, 3)
    for cache in caches:
        modes.forward(model, cache, ids, mask, 40, 43)
    for layer, own in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(layer.observed["attention"], own.observed["attention"])


def test_another_implementation_is_refused() -> None:
    for attention in ("sdpa", "eager"):
        with pytest.raises(ValueError, match=rf"uses '{attention}'[\s\S]*set_attn_implementation"):
            models.paged(models.shared("llama", attention).config, budget=24, block_size=4, policy="h2o")
    model = models.build("llama", OURS)
    cache = binding(model, "greedy", policy="h2o")
    model.set_attn_implementation("sdpa")  # later
    ids, mask = modes.batch("greedy", padded=False)
    with pytest.raises(ValueError, match="uses 'sdpa'"):
        modes.run(model, cache, "greedy", ids, mask)
    model.set_attn_implementation(OURS)
    modes.run(model, cache, "greedy", ids, mask)


def test_update_without_attention_is_refused() -> None:
    model = models.shared("llama", OURS)
    cache = binding(model, "greedy", policy="h2o")
    states = torch.randn(1, 2, 30, 8)
    cache.get_mask_sizes(30, 0)
    cache.update(states, states, 0)
    cache.get_mask_sizes(30, 0)
    with pytest.raises(RuntimeError, match=r"show.*0"):
        cache.update(states, states, 0)
    single = binding(model, "greedy", policy="h2o")
    single.update(states[:, :, :1], states[:, :, :1], 0)
    with pytest.raises(RuntimeError, match=r"show.*0"):
        single.update(states[:, :, :1], states[:, :, :1], 0)
