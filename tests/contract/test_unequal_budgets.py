"""Layers and heads that hold different numbers of tokens keep every promise that equal ones keep."""

from typing import Any

import pytest
import torch

import models
import modes
import rows
from closeness import assert_close
from evicting import KINDS, check
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.allocators.cake import Cake
from hf_paged_eviction.allocators.first_prompt import FirstPrompt
from hf_paged_eviction.allocators.pyramid import Pyramid
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.contract

OURS = "paged_eviction"
BLOCK = 4
#: Settings that make each allocator share unequally on two layers.
SHARED: dict[str, dict[str, Any]] = {
    "heads": {"allocator": Heads.of([[0.4, 1.8], [1.2, 0.6]]), "heads": "separate"},
    "first_prompt": {"allocator": FirstPrompt(threshold=0.05, observed=8, distance=2), "heads": "separate"},
    "pyramid": {"allocator": Pyramid(window=8)},
    "cake": {"allocator": Cake(observed=8), "heads": "shared"},
    "d2o": {"allocator": "d2o", "heads": "separate"},
    "ada_kv": {"allocator": "ada_kv", "heads": "separate"},
    "layers": {"allocator": Heads.of([[36], [12]])},
}


def settings_of(name: str, policy: str = "h2o") -> dict[str, Any]:
    """Arguments of a cache that shares out as this allocator does, by a policy like this one."""
    return {**SHARED[name], "policy": policy}


def shares(cache: PagedEvictionCache) -> list[torch.Tensor]:
    """Per layer, tokens that each row and head may hold `[batch, heads]`."""
    by_layer = []
    for _, layer in cache.paged_layers:
        limits = layer.table.limits
        heads = layer.keys.shape[1]
        equal = torch.full((layer.table.rows, heads), layer.table.capacity)
        by_layer.append(equal if limits is None else limits.expand(-1, heads))
    return by_layer


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("mode", KINDS)
def test_exact(mode: str, padded: bool) -> None:
    """The others are drawn, see tests/fuzz."""
    check("llama", OURS, mode, padded, **settings_of("first_prompt"))


@pytest.mark.parametrize("span", [[36], [20, 19], [7], [1]], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_nothing_leaves_while_the_total_holds_all(name: str, span: list[int]) -> None:
    """A prompt, chunks and single tokens up to the last that fits; the first row is as long as the budget, no more."""
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([40, 29, 9]))
    cache = models.paged(model.config, **{"budget": 40, "block_size": BLOCK, **settings_of(name)})
    plain, at = modes.dynamic(model), 0
    while at < 40:
        stop = at + (span[0] if at == 0 else 1 if at != span[0] or len(span) == 1 else span[1])
        ours, expected = (modes.forward(model, one, ids, mask, at, stop) for one in (cache, plain))
        assert_close(ours[mask[:, at:stop].bool()], expected[mask[:, at:stop].bool()])
        at = stop
    assert cache.stats().evicted_tokens == 0
    modes.forward(model, cache, torch.cat([ids, ids[:, :1]], dim=1), modes.extend(mask, 1), 40, 41)
    assert cache.stats().evicted_tokens > 0


@pytest.mark.parametrize("budget", [16, 24, 48])
@pytest.mark.parametrize("turns", [None, [10, 2, 6]], ids=["one turn", "ragged second turn"])
@pytest.mark.parametrize("name", SHARED)
def test_rows_do_not_depend_on_their_batch(name: str, budget: int, turns: list[int] | None) -> None:
    model = models.shared("llama", OURS)
    settings = {"budget": budget, "block_size": BLOCK, **settings_of(name)}
    # No row of one token: alone it would have no prompt that could decide the shares.
    assert rows.compare(model, [40, 29, 5], turns, **settings) > 0


@pytest.mark.parametrize("record_past", [False, True])
@pytest.mark.parametrize("name", ["cake", "d2o"])
def test_a_prompt_that_waited_shares_out_like_one_that_did_not(name: str, record_past: bool) -> None:
    """The second row comes in the second chunk alone, and then grows past what it had when layers shared out."""
    model = models.shared("llama", OURS)
    texts = models.prompts([40, 15], seed=3)
    ids, mask = models.left_pad(texts)
    settings = {"budget": 24, "block_size": BLOCK, "record_past": record_past, **settings_of(name, "paged_eviction")}
    batch, alone = (models.paged(model.config, **settings) for _ in "ab")
    for span in ((0, 23), (23, 30), *((at, at + 1) for at in range(30, 40))):
        together = modes.forward(model, batch, ids, mask, *span)
    own = torch.ones(1, 15, dtype=torch.long)
    for span in ((0, 5), *((at, at + 1) for at in range(5, 15))):
        single = modes.forward(model, alone, texts[1][None], own, *span)
    assert_close(together[1], single[0])
    for (_, layer), (_, ours) in zip(batch.paged_layers, alone.paged_layers, strict=True):
        held, expected = (
            [{*head} - {-1} for head in heads.tolist()] for heads in (layer.positions[1], ours.positions[0])
        )
        assert held == expected


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", SHARED)
def test_the_total_is_that_of_equal_shares(name: str, padded: bool) -> None:
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, **{"budget": 24, "block_size": BLOCK, **settings_of(name, "attention_mean")})
    modes.run(model, cache, "greedy", *modes.batch("greedy", padded))
    by_layer = shares(cache)
    layers = torch.stack([share.double().mean(1) for share in by_layer])  # [layers, rows]
    assert layers.sum(0).tolist() == [48.0] * layers.shape[1]
    if name == "ada_kv":
        assert all(share.sum(1).tolist() == [48] * len(share) for share in by_layer)
        assert any((share[:, 0] != share[:, 1]).any() for share in by_layer), "all heads got the same"
    elif name != "d2o":  # its softmax hardly tells two layers apart
        assert (layers[0] != layers[1]).any(), "all layers got the same"
    assert all((share % BLOCK == 0).all() for share in by_layer)
    # Every slot that may be used holds a real token, as soon as the row has so many; but for room for tokens to come.
    seen = cache.layers[0].table.seen - cache.layers[0].table.pads
    for (_, layer), share in zip(cache.paged_layers, by_layer, strict=True):
        empty = share.minimum(seen[:, None]) - (layer.positions >= 0).sum(-1)
        assert (empty == empty[:, :1]).all() and (empty >= 0).all()
        assert not empty.any()
    stats = cache.stats()
    assert sum(layer.budget or 0 for layer in stats.layers) == pytest.approx(48, abs=1)


@pytest.mark.parametrize("chunk", [None, 7])
def test_cake_keeps_the_total_at_every_moment(chunk: int | None) -> None:
    """Layers that have been through hold no more than the total together, while the others, which are still to come,
    hold what they held before."""
    model = models.build("llama", OURS, num_hidden_layers=5)
    cache = models.paged(model.config, budget=24, block_size=BLOCK, policy="h2o", allocator=Cake(observed=8))
    ids, mask = models.left_pad(models.prompts([120]))
    held: list[int] = []
    for _, layer in cache.paged_layers:

        def follow(queries: Any, layer: Any = layer, attended: Any = layer.attended) -> None:
            attended(queries)
            through = [one for _, one in cache.paged_layers if one.held and one.state.seen >= layer.state.seen]
            held.append(sum(one.table.capacity for one in through))

        layer.attended = follow
    settings = {} if chunk is None else {"prefill_chunk_size": chunk}
    modes.generate(model, cache, ids, mask, 8, **settings)
    assert max(held) == 24 * 5
    assert len({layer.table.capacity for _, layer in cache.paged_layers}) > 1


def test_taking_back_needs_recording() -> None:
    model = models.shared("llama", OURS)
    ids, mask = models.left_pad(models.prompts([40]))
    cache = models.paged(model.config, budget=24, block_size=BLOCK, allocator="cake")
    modes.forward(model, cache, ids, mask, 0, 40)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    cache.reset()
    cache.activate_past_recording()
    modes.forward(model, cache, ids, mask, 0, 30)
    modes.forward(model, cache, ids, mask, 30, 40)
    cache.crop(-4)
    assert cache.get_seq_length() == 36


def test_a_mask_of_the_users_own_is_refused() -> None:
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, budget=24, block_size=BLOCK, allocator="pyramid")
    ids, _ = models.left_pad(models.prompts([10]))
    mask = torch.zeros(1, 1, 10, 10)
    with pytest.raises(ValueError, match="mask fits"), torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, use_cache=True)


def test_beams_and_rows_follow() -> None:
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, budget=24, block_size=BLOCK, policy="h2o", **SHARED["cake"])
    ids, mask = models.left_pad(models.prompts([40, 30, 20]))
    modes.forward(model, cache, ids, mask, 0, 40)
    before = shares(cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    for ours, old in zip(shares(cache), before, strict=True):
        assert torch.equal(ours, old[[2, 0, 1]])
    cache.reset()
    modes.forward(model, cache, ids, mask, 0, 40)
    for ours, old in zip(shares(cache), before, strict=True):
        assert torch.equal(ours, old)


@pytest.mark.parametrize(
    ("policy", "allocator"),
    [
        ("snapkv", "cake"),
        ("keydiff", "d2o"),
        ("keydiff", "ada_kv"),
        ("snapkv", "pyramid"),
    ],
)
def test_tokens_do_not_see_what_comes_behind_them(policy: str, allocator: str) -> None:
    """A layer that is made to give up tokens before it has attended would show it, here by how long the forward is."""
    model = models.build("llama", "paged_eviction", num_hidden_layers=8)
    ids, mask = models.left_pad(models.prompts([130, 117]))
    logits = []
    for stop in (86, 100, 130):
        cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy=policy, allocator=allocator)
        modes.forward(model, cache, ids, mask, 0, 80)
        logits.append(modes.forward(model, cache, ids, mask, 80, stop)[:, :6])
    for other in logits[1:]:
        assert_close(other, logits[0])
