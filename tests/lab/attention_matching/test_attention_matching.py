"""`compress_by_matching`: values solve what the slow twin solves, and what comes out is an ordinary cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slow_matching import plain_queries, slow_values
from torch import Tensor
from transformers import DynamicCache

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.lab.attention_matching import compress_by_matching
from hf_paged_eviction.recipes.procedures.probe import compress_by_probe

OURS = "paged_eviction"
PROBE = [11, 12, 13, 14, 15]
BUDGET = 20


def room(model: Any, **settings: Any) -> PagedEvictionCache:
    defaults = {"budget": 64, "block_size": 4, "policy": "kvzip", "heads": "separate", "allocator": "global"}
    return models.paged(model.config, **{**defaults, **settings})


def matched(model: Any, ids: Tensor, mask: Tensor, budget: int = BUDGET, **settings: Any) -> PagedEvictionCache:
    cache = room(model, **settings)
    compress_by_matching(model, cache, budget, ids, mask, probe_ids=PROBE, chunk_size=16, ridge=0.1)
    return cache


def probed(model: Any, ids: Tensor, mask: Tensor, budget: int = BUDGET, **settings: Any) -> PagedEvictionCache:
    cache = room(model, **settings)
    compress_by_probe(model, cache, budget, ids, mask, probe_ids=PROBE, chunk_size=16)
    return cache


def padded() -> tuple[Tensor, Tensor]:
    return models.left_pad(models.prompts([40, 33, 17], seed=3))


def queries_of(model: Any, row: Tensor, layer: int) -> Tensor:
    """`[query heads, queries, dim]` of the probe and of the repeated text, which is cut from the end."""
    found, stop = [], len(row)
    while stop > 0:
        text = torch.cat([row, torch.tensor(PROBE), row[max(stop - 16, 0) : stop]])
        found.append(plain_queries(model, text, len(row))[layer])
        stop -= 16
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("settings", [{}, {"allocator": "uniform", "heads": "shared"}], ids=["global", "shared"])
def test_values_are_those_of_the_slow_twin(settings: dict[str, Any]) -> None:
    """In every row of a padded batch, layer and head; keys stay what they were."""
    model, plain = models.shared("llama", OURS), models.shared("llama", "eager")
    rows = models.prompts([40, 33, 17], seed=3)
    cache, before = matched(model, *models.left_pad(rows), **settings), probed(model, *padded(), **settings)
    moved = 0.0
    for at, row in enumerate(rows):
        whole = DynamicCache(config=plain.config)
        with torch.no_grad():
            plain(row[None], past_key_values=whole)
        for index, layer in cache.paged_layers:
            other, queries = before.layers[index], queries_of(plain, row, index)
            assert torch.equal(layer.positions, other.positions)
            assert torch.equal(layer.keys, other.keys)
            for head, asked in enumerate(queries.unflatten(0, (layer.keys.shape[1], -1))):
                live = layer.positions[at, head] >= 0
                kept = layer.positions[at, head][live].tolist()
                states = (part[0, head] for part in (whole.layers[index].keys, whole.layers[index].values))
                scaling = plain.model.layers[index].self_attn.scaling
                wanted = slow_values(*states, kept, [*asked.flatten(0, 1)], scaling, 0.1)
                found = layer.values[at, head, : len(live)][live]
                torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4)
                moved += float((found - other.values[at, head, : len(live)][live]).abs().max())
    assert moved > 1  # the values did change


@pytest.mark.parametrize("bits", [None, 4])
def test_where_nothing_goes_nothing_changes(bits: int | None) -> None:
    model = models.shared("llama", OURS)
    found, plain = matched(model, *padded(), budget=40, bits=bits), probed(model, *padded(), budget=40, bits=bits)
    for (_, one), (_, other) in zip(found.paged_layers, plain.paged_layers, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.store.tensors, other.store.tensors, strict=True))


@pytest.mark.parametrize("bits", [None, 4])
def test_rows_do_not_depend_on_their_batch(bits: int | None) -> None:
    model = models.shared("llama", OURS)
    rows = models.prompts([40, 33, 17], seed=3)
    together = matched(model, *models.left_pad(rows), bits=bits)
    for at, row in enumerate(rows):
        alone = matched(model, *models.left_pad([row]), bits=bits)
        for (_, one), (_, other) in zip(together.paged_layers, alone.paged_layers, strict=True):
            for head in range(one.positions.shape[1]):
                ours, theirs = (each.positions[row_, head] >= 0 for each, row_ in ((one, at), (other, 0)))
                found, wanted = one.values[at, head, : len(ours)][ours], other.values[0, head, : len(theirs)][theirs]
                near = (found - wanted).abs() <= 1e-3 + 1e-3 * wanted.abs()
                assert near.float().mean() > (0.99 if bits else 0.9999)  # a number between two levels may go either way


def test_values_in_few_bits_are_near_those_that_were_found() -> None:
    """Also those of the tokens that are read as they came."""
    model = models.shared("llama", OURS)
    plain, coded = matched(model, *padded()), matched(model, *padded(), bits=8)
    for (_, one), (_, other) in zip(plain.paged_layers, coded.paged_layers, strict=True):
        if torch.equal(one.positions, other.positions):
            held = one.positions.shape[-1]
            live = (one.positions >= 0)[..., None]
            wanted, found = (each.values[:, :, :held] * live for each in (one, other))
            assert (wanted - found).norm() < 0.05 * wanted.norm()


def test_saved_copied_and_continued_as_any_other(tmp_path: Path) -> None:
    """Later turns are appended, blocks are evicted, and a loaded context says the same."""
    model = models.shared("llama", OURS)
    ids, mask = padded()
    cache = matched(model, ids, mask)
    cache.save(tmp_path / "context.safetensors", input_ids=ids)
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    question = torch.stack(models.prompts([6] * 3, seed=5))
    asked = torch.cat([ids, question], dim=1), modes.extend(mask, 6)
    said = [modes.generate(model, each, *asked, 12) for each in (cache, loaded)]
    assert torch.equal(*said)
    assert cache.stats().evicted_tokens > 0


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({}, {"ridge": 0}, "ridge must be a number above 0"),
        ({}, {"ridge": True}, "ridge must be a number above 0"),
        ({"positions": "cache", "allocator": "uniform"}, {}, "positions='cache' changes the distances"),
        ({"disposal": "merge", "allocator": "uniform"}, {}, "keeps them besides: use disposal='drop'"),
        ({"policy": "keydiff", "allocator": "uniform"}, {}, "a probe tells it nothing"),
        ({"static": True, "allocator": "uniform"}, {}, "static"),
    ],
)
def test_refusals(settings: dict[str, Any], change: dict[str, Any], message: str) -> None:
    """Before anything is read."""
    model = models.shared("llama", OURS)
    cache = room(model, **settings)
    with pytest.raises(ValueError, match=message):
        compress_by_matching(model, cache, BUDGET, *padded(), probe_ids=PROBE, **change)
    assert cache.get_seq_length() == 0


def test_latents_are_refused() -> None:
    model = models.shared("deepseek_v3", OURS)
    with pytest.raises(ValueError, match="caches latents"):
        compress_by_matching(model, room(model, allocator="uniform"), BUDGET, *padded(), probe_ids=PROBE)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3"])
def test_attention_of_every_kind(family: str) -> None:
    """Bounded logits, sinks, sliding layers: outputs for the repeated text come nearer than without the fit."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, OURS)
    ids, mask = models.left_pad(models.prompts([40, 33], seed=3))
    again = torch.cat([ids, torch.tensor([PROBE] * 2), ids[:, -7:]], dim=1), modes.extend(mask, len(PROBE) + 7)
    wanted, *found = (
        modes.forward(model, cache, *again, 40, 40 + len(PROBE) + 7)
        for cache in (probed(model, ids, mask, 40), matched(model, ids, mask), probed(model, ids, mask))
    )
    errors = [float((each - wanted).square().mean()) for each in found]
    assert errors[0] < errors[1]
