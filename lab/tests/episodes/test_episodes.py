"""A conversation as several caches: what each holds, how much, and where questions go."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.queries.attention import PAGED_EVICTION
from hf_paged_eviction_lab.episodes import (
    Episodes,
    HiddenStates,
    LayerTokens,
    budgets_by_sensitivity,
    layer_sensitivity,
    read_episodes,
)

SYSTEM = [7, 8, 9, 10, 11, 12]
SIZES = {"block_size": 4, "chunk_size": 16, "turns_per_segment": 2}
NAMES = ("llama", "gemma3", "lfm2", "falcon_h1")


def turns(count: int = 12, seed: int = 0) -> list[Tensor]:
    """Of 6 to 9 tokens; every third one is about the same thing."""
    prompts = models.prompts([6 + at % 4 for at in range(count)], seed)
    return [torch.cat([torch.full((4,), 100 + at // 2 % 3), ids]) for at, ids in enumerate(prompts)]


def by_topic(texts: Any) -> Tensor:
    """Counts of the tokens that name topics."""
    return torch.stack([torch.stack([(ids == 100 + topic).sum() for topic in range(3)]) for ids in texts]).float()


def read(family: str = "llama", budget: int = 96, texts: list[Tensor] | None = None, **changes: Any) -> Episodes:
    settings = {"system": SYSTEM, "episodes": 3, "embed": by_topic, **SIZES, **changes}
    return read_episodes(models.shared(family, PAGED_EVICTION), turns() if texts is None else texts, budget, **settings)


@functools.cache
def plain() -> Episodes:
    """Of the defaults, read once per process; opened caches are copies."""
    return read()


@functools.cache
def weighted() -> Episodes:
    """As `plain`, with layers of different size."""
    return read(layers=[0.1, 0.5])


def held_positions(cache: PagedEvictionCache) -> list[list[list[int]]]:
    return [sorted_rows(layer.positions[0]) for _, layer in cache.paged_layers]


def sorted_rows(positions: Tensor) -> list[list[int]]:
    return [sorted(row) for row in positions.tolist()]


# ---- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "layers"), [(72, None), (100, None), (100, [0.1, 0.5])])
def test_all_episodes_together_keep_the_budget(budget: int, layers: Any) -> None:
    episodes = read(budget=budget, layers=layers)
    caches = [episodes.open(number) for number in range(len(episodes))]
    assert [episode.segments for episode in episodes.episodes] == [(0, 3), (1, 4), (2, 5)]
    stats = [cache.stats() for cache in caches]
    assert sum(sum(layer.held for layer in cache_stats.layers) for cache_stats in stats) == budget // 4 * 4 * 2
    one = PagedEvictionCache(models.shared("llama").config, budget // 4 * 4, block_size=4)
    models.shared("llama")(torch.zeros(1, 200, dtype=torch.long), **{CACHE_ARGUMENT: one})
    assert sum(cache_stats.storage_bytes for cache_stats in stats) <= one.stats().storage_bytes
    assert episodes.budget == budget // 4 * 4
    for episode, cache in zip(episodes.episodes, caches, strict=True):
        assert [layer.held for _, layer in cache.paged_layers] == list(episode.shares)
        assert [layer.store.slots for _, layer in cache.paged_layers] == list(episode.shares)


@pytest.mark.parametrize("family", NAMES)
def test_the_system_prompt_stays(family: str) -> None:
    if reason := models.unavailable(family):
        pytest.skip(reason)
    episodes = read(family)
    length = len(SYSTEM) + sum(map(len, turns()))
    for number in range(len(episodes)):
        cache = episodes.open(number)
        assert cache.get_seq_length() == length
        for layer in held_positions(cache):
            for head in layer:
                assert head[: len(SYSTEM)] == list(range(len(SYSTEM)))
                assert head[-1] == length - 1
                assert len(set(head)) == len(head)


def slow_episode(model: Any, text: Tensor, probe: Tensor, share: int, chunk: int) -> list[list[list[int]]]:
    """Positions held by layer and head, by lists: every probe is a forward over all of the text, masked."""
    count = model.config.num_hidden_layers
    heads = model.config.num_key_value_heads
    held: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(count)]
    visible: list[list[list[set[int]]]] = [[[] for _ in range(heads)] for _ in range(count)]
    length = text.shape[1]
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        for layer in range(count):
            for head in range(heads):
                for at in range(start, stop):
                    visible[layer][head].append({*held[layer][head], *range(start, at + 1)})
                held[layer][head] += range(start, stop)
        if len(held[0][0]) <= share:
            continue
        ids = torch.cat([text[:, :stop], probe], dim=1)
        seen = [
            [
                visible[layer][head] + [{*held[layer][head], *range(stop, at + 1)} for at in range(stop, ids.shape[1])]
                for head in range(heads)
            ]
            for layer in range(count)
        ]
        weights = masked_attention(model, ids, seen)
        for layer in range(count):
            for head in range(heads):
                group = weights[layer][0].unflatten(0, (heads, -1))[head, :, stop:]
                score = group.amax((0, 1))
                keep = {*range(len(SYSTEM)), *range(stop - 4, stop)}
                free = sorted((at for at in held[layer][head] if at not in keep), key=lambda at: -score[at])
                keep |= set(free[: share - len(keep & set(held[layer][head]))])
                held[layer][head] = sorted(keep)
    return held


@torch.no_grad()
def masked_attention(model: Any, ids: Tensor, seen: list[list[list[set[int]]]]) -> list[Tensor]:
    """Attention `[1, heads, n, n]` of each layer, every query head of a group seeing what `seen` says."""
    masks = []
    for layer in seen:
        mask = torch.full((1, len(layer), ids.shape[1], ids.shape[1]), torch.finfo(torch.float32).min)
        for head, queries in enumerate(layer):
            for at, places in enumerate(queries):
                mask[0, head, at, sorted(places)] = 0
        masks.append(mask)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    hooks = [
        block.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, mask=mask: (
                args,
                {**kwargs, "attention_mask": mask.repeat_interleave(group, 1)},
            ),
            with_kwargs=True,
        )
        for block, mask in zip(model.model.layers, masks, strict=True)
    ]
    try:
        return list(model(ids, output_attentions=True, use_cache=False).attentions)
    finally:
        for hook in hooks:
            hook.remove()


def test_an_episode_holds_what_its_probe_attends_to() -> None:
    """Block by block, against a reference that masks a full forward."""
    episodes = plain()
    text = torch.cat([torch.tensor(SYSTEM), *turns()])[None]
    texts = turns()
    for number, episode in enumerate(episodes.episodes):
        probe = torch.cat([texts[2 * at + more] for at in episode.segments for more in (0, 1)])[None]
        expected = slow_episode(models.shared("llama", "eager"), text, probe, 32, 16)
        assert held_positions(episodes.open(number)) == expected, f"episode {number}"


@pytest.mark.parametrize(
    "settings",
    [{"bits": 4}, {"positions": "cache", "policy": "attention_mean"}, {"heads": "shared", "recent_tokens": 9}],
    ids=str,
)
def test_settings_of_the_cache_go_through(settings: dict[str, Any]) -> None:
    episodes = read(budget=144, **settings)
    model, question = models.shared("llama", PAGED_EVICTION), models.prompts([5], seed=9)[0][None]
    for number in (0, 2):
        cache = episodes.open(number)
        recent = settings.get("recent_tokens", 4)
        for layer in held_positions(cache):
            for head in layer:
                assert len(set(head)) == 48
                assert {*range(len(SYSTEM))} < set(head)
                assert {*range(cache.get_seq_length() - recent, cache.get_seq_length())} < set(head)
        sequences = model.generate(
            **cache.follow_up(question), **{CACHE_ARGUMENT: cache}, max_new_tokens=9, do_sample=False
        )
        assert cache.stats().largest_held == 48
        assert sequences.shape[1] == cache.get_seq_length() + 1


def test_where_nothing_has_to_go_answers_are_those_of_a_plain_cache() -> None:
    model = models.shared("llama", PAGED_EVICTION)
    episodes = read(budget=3 * 200)
    text = torch.cat([torch.tensor(SYSTEM), *turns()])[None]
    question = models.prompts([5], seed=9)[0]
    expected = model.generate(torch.cat([text, question[None]], 1), max_new_tokens=8, do_sample=False)[:, -8:]
    for number in range(3):
        cache = episodes.open(number)
        sequences = model.generate(**cache.follow_up(question[None]), **{CACHE_ARGUMENT: cache}, max_new_tokens=8)
        assert torch.equal(sequences[:, -8:], expected)


# ---- where questions go ----------------------------------------------------------------------------------------------


def test_questions_go_to_their_episode_and_leave_no_trace() -> None:
    model, episodes = models.shared("llama", PAGED_EVICTION), plain()
    question = torch.tensor([101, 5, 6])
    assert episodes.nearest(question) == 1
    sequences = []
    for _ in range(2):
        cache = episodes.open(1)
        sequences.append(model.generate(**cache.follow_up(question[None]), **{CACHE_ARGUMENT: cache}, max_new_tokens=8))
    assert torch.equal(*sequences)
    assert episodes.nearest([5, 6]) == 0, "like none"


def test_hidden_states_are_the_default() -> None:
    episodes = read(embed=None)
    model = models.shared("llama", PAGED_EVICTION)
    ids = turns()[0]
    states = model(ids[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(HiddenStates(model)([ids])[0], states[1][0].mean(0))
    assert episodes.centroids.shape[1] == states[1].shape[-1]


def test_fewer_segments_than_episodes_and_empty_turns() -> None:
    few = turns(3)
    episodes = read(texts=[few[0], few[1][:0], few[1], few[2]], episodes=5)
    assert len(episodes) == 2, "three turns that say something are two segments"
    assert episodes.budget == 96, "the two share what five would have had"
    one = read(texts=few[:1], episodes=5)
    assert len(one) == 1
    assert one.open(0).get_seq_length() == len(SYSTEM) + len(few[0])


# ---- layers ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_sensitivity_is_what_a_mask_shows() -> None:
    model = models.shared("llama", "eager")
    ids = models.prompts([50], seed=5)[0][None]
    whole = [layer.clone() for layer in keys_of(model, ids, None)]
    expected = torch.zeros(2)
    for start in range(4, 50, 16):
        stop = min(start + 16, 50)
        seen = torch.full((1, 1, 50, 50), torch.finfo(torch.float32).min)
        for at in range(50):
            seen[0, 0, at, [*range(min(4, at + 1)), *range(start, max(start, at + 1))]] = 0
        blocked = keys_of(model, ids, seen)
        for layer in range(2):
            pairs = zip(blocked[layer][0, :, start:stop], whole[layer][0, :, start:stop], strict=True)
            cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in pairs]
            expected[layer] += (1 - sum(cosines) / len(cosines)) / 3
    sensitivity = layer_sensitivity(models.shared("llama", PAGED_EVICTION), ids, block=16, sinks=4)
    torch.testing.assert_close(sensitivity, expected, rtol=1e-3, atol=1e-5)
    assert sensitivity[0].abs() < 1e-6 < sensitivity[1], "the first layer's keys know their own token only"


def keys_of(model: Any, ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache})
    return [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("measured", [[0.0, 1.0], [0.2, 0.2, 0.2], [0.0, 0.9, 0.1, 0.3, 1e-9]])
@pytest.mark.parametrize("budget", [64, 96, 160])
def test_sensitive_layers_get_more_and_the_sum_stays(measured: list[float], budget: int) -> None:
    budgets = budgets_by_sensitivity(measured, budget, least=48)
    assert sum(budgets) == budget * len(measured)
    assert min(budgets) >= max(48, budget // 4)
    assert all(share % 16 == 0 for share in budgets)
    order = sorted(range(len(measured)), key=lambda at: measured[at])
    assert [budgets[at] for at in order] == sorted(budgets)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": []}, "0 turns"),
        ({"texts": [[], torch.tensor([], dtype=torch.int64)]}, "2 turns"),
        ({"texts": "a text"}, "model's"),
        ({"texts": ["a text"]}, "model's"),
        ({"texts": [torch.ones(2, 5, dtype=torch.long)]}, r"text.*pads"),
        ({"texts": [[0.5, 1.5]]}, "whole numbers"),
        ({"texts": [[3, -1]]}, "whole numbers"),
        ({"budget": 40}, r"budget=40.*3.*12.*budget=48"),
        ({"budget": 40.5}, "budget counts tokens"),
        ({"episodes": 0}, r"episodes.*1"),
        ({"turns_per_segment": True}, "turns_per_segment counts tokens"),
        ({"chunk_size": 6}, r"chunk_size=6.*block_size=4"),
        ({"policy": "keydiff"}, "no statistics of attention"),
        ({"policy": "snapkv"}, "depends on the positions"),
        ({"allocator": "ada_kv"}, r"read_episodes.*allocator="),
        ({"layers": [0.1, 0.2, 0.3]}, r"layers=.*3.*2"),
        ({"layers": [0.1, float("nan")]}, r"finite.*paged"),
        ({"embed": lambda texts: torch.ones(1, 3)}, r"\[6.*6 texts"),
        ({"embed": lambda texts: [1, 2]}, "got list"),
        ({"embed": lambda texts: torch.full((len(texts), 3), float("nan"))}, "infinite or nan"),
    ],
)
def test_what_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        read(**changes)


def test_attention_has_to_be_shown() -> None:
    with pytest.raises(ValueError, match="paged_eviction"):
        read_episodes(models.shared("llama"), turns(), 96, embed=by_topic, **SIZES)


def test_questions_that_cannot_be_asked() -> None:
    episodes = plain()
    with pytest.raises(ValueError, match="has no token"):
        episodes.nearest([])
    for number in (-1, 3, True):
        with pytest.raises(ValueError, match=r"episode.*0.*2"):
            episodes.open(number)


def test_budgets_of_layers_are_kept_saved_and_shrunk(tmp_path: Path) -> None:
    """Of an allocator of the lab's own: whole blocks in proportion, with the total of equal budgets."""
    model = models.shared("llama", PAGED_EVICTION)
    cache = PagedEvictionCache(model.config, 32, 4, "keydiff", allocator="layer_tokens(tokens=(20, 44))")
    ids = torch.stack(models.prompts([80, 80], seed=2))
    modes.forward(model, cache, ids, torch.ones_like(ids), 0, 60)
    assert [layer.held for _, layer in cache.paged_layers] == [20, 44] and cache.budget == 32
    cache.save(tmp_path / "context.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    for at in range(60, 70):
        assert torch.equal(
            *(modes.forward(model, one, ids, torch.ones_like(ids), at, at + 1) for one in (cache, loaded))
        )
    cache.shrink(24)
    assert [layer.held for _, layer in cache.paged_layers] == [16, 32]
    for wrong, message in [((20,), "1 numbers.*2 paged"), ((20, 0), "at least 1"), ([20, 44], "tuple")]:
        with pytest.raises((TypeError, ValueError), match=message):
            PagedEvictionCache(model.config, 32, 4, "keydiff", allocator=LayerTokens(wrong))
    with pytest.raises(ValueError, match=r"in tokens, got.*MiB"):
        PagedEvictionCache(model.config, "2MiB", 4, "keydiff", allocator=LayerTokens((20, 44)))
