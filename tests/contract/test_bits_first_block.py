"""Few bits where the first tokens of a row come one by one: the row is rounded from its first whole block on."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction import PagedEvictionCache

pytestmark = pytest.mark.contract

BLOCK, BIAS = 8, 900.0
CONFIG = models.family_config("llama", num_hidden_layers=2)
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "bits": 4, "policy": "keydiff"}


def states_of(tokens: int, seed: int = 0) -> Tensor:
    """Keys and values of each layer, `[layers, 2, heads, tokens, dim]`; keys have a large constant part."""
    states = torch.randn(2, 2, 2, tokens, 8, generator=torch.Generator().manual_seed(seed))
    rotary = PagedEvictionCache(CONFIG, budget=32, **OPTIONS).layers[0].store.coder.codecs[0].rotary
    bias = torch.full((1, 2, 1, 8), BIAS / 8**0.5)
    states[:, 0] += rotary.rotate(bias, torch.arange(tokens)[None, None])[0]
    return states


def feed(cache: PagedEvictionCache, states: Tensor, cuts: Sequence[int]) -> PagedEvictionCache:
    """Give states `[layers, 2, rows, heads, tokens, dim]` to the layers, cut into so many tokens."""
    for part in states.split(list(cuts), dim=4):
        cache.get_mask_sizes(part.shape[4], 0)
        for layer, (keys, values) in zip(cache.layers, part, strict=True):
            layer.update(keys, values)
    return cache


def farthest(cache: PagedEvictionCache, states: Tensor) -> float:
    """Largest distance of a held key from the one that came."""
    worst = 0.0
    for layer, (keys, _) in zip(cache.layers, states, strict=True):
        places = layer.positions[0][..., None].expand(-1, -1, 8)
        held, _ = layer.store.read(layer.held)
        worst = max(worst, (held[0] - keys.gather(1, places)).norm(dim=-1).max().item())
    return worst


def test_a_constant_costs_no_more_than_in_a_prompt() -> None:
    """Without a mean, it would take all levels."""
    states = states_of(40)
    at_once, by_token = (
        feed(PagedEvictionCache(CONFIG, budget=64, **OPTIONS), states[:, :, None], cuts) for cuts in ([40], [1] * 40)
    )
    worst = farthest(at_once, states)
    assert 0 < worst < 5
    assert 0 < farthest(by_token, states) < 1.5 * worst


LENGTHS = 41, 30, 26, 20, 17
MASK = torch.stack([torch.arange(41) >= 41 - length for length in LENGTHS])


def padded(budget: int, **more: Any) -> tuple[list[Tensor], PagedEvictionCache]:
    """The texts of a batch of left-padded rows, and a cache that has seen 25 columns: rows of 25, 14, 10, 4 and 1
    tokens."""
    texts = [states_of(length, seed) for seed, length in enumerate(LENGTHS)]
    batch = torch.full((2, 2, len(LENGTHS), 2, 41, 8), torch.nan)
    for row, text in enumerate(texts):
        batch[:, :, row, :, 41 - text.shape[3] :] = text
    cache = PagedEvictionCache(CONFIG, budget=budget, attention_mask=MASK.long(), **OPTIONS, **more)
    feed(cache, batch[..., :25, :], [1] * 25)
    texts.append(batch[..., 25:, :])
    return texts, cache


def kept(cache: PagedEvictionCache, row: int) -> list[Tensor]:
    """What a row holds, by position: positions, codes and levels, and keys and values as they are read."""
    parts = []
    for layer in cache.layers:
        store, positions = layer.store, layer.positions[row]
        exact, columns = set(store.exact.slots[row].flatten().tolist()), store.columns.first(layer.held)
        for head, own in enumerate(positions):
            order = [slot for slot in own.argsort().tolist() if own[slot] >= 0]
            rounded = [slot for slot in order if slot not in exact]
            parts += [own[order], *[states[row, head, order] for states in store.read(layer.held)]]
            parts += [columns[name][row, head, rounded] for name in ("key_codes", "key_levels")]
        parts += [store.exact.means[row], store.exact.sizes[row]]
    return parts


@pytest.mark.parametrize("budget", [32, 64])
@pytest.mark.parametrize("then", [[1] * 16, [1, 1, 3, 1, 1, 9], [16]], ids=str)
def test_rows_of_a_batch_are_rounded_as_alone(budget: int, then: list[int]) -> None:
    """Bit for bit: each row when its own first block is full, at another column than the others."""
    texts, cache = padded(budget)
    late = texts.pop()
    feed(cache, late, then)
    for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        alone = PagedEvictionCache(CONFIG, budget=budget, **OPTIONS)
        feed(alone, text[:, :, None], [1] * (length - 16) + then)
        for ours, expected in zip(kept(cache, row), kept(alone, 0), strict=True):
            assert torch.equal(ours, expected), row
        assert farthest(alone, text) < 5


def test_moved_and_saved_in_the_first_block(tmp_path: Path) -> None:
    """Copies, files and other rows go on as the cache does."""
    texts, cache = padded(32)
    late = texts.pop()
    cache.save(tmp_path / "context")
    loaded, copied = PagedEvictionCache.load(tmp_path / "context", CONFIG), copy.deepcopy(cache)
    order = torch.tensor([4, 2, 3, 0, 1])
    moved, fewer = copy.deepcopy(cache), copy.deepcopy(cache)
    moved.reorder_cache(order)
    fewer.batch_select_indices(torch.tensor([3]))
    feed(moved, late[:, :, order], [1] * 16)
    feed(fewer, late[:, :, 3:4], [1] * 16)
    for other in (cache, loaded, copied):
        feed(other, late, [1] * 16)
    for row in range(5):
        expected = kept(cache, row)
        others = kept(loaded, row), kept(copied, row), kept(moved, order.tolist().index(row))
        for parts in (*others, *([kept(fewer, 0)] if row == 3 else [])):
            assert all(map(torch.equal, parts, expected)), row


def test_taken_back_in_the_first_block() -> None:
    """As if the tokens had never come; the first block is that of the tokens that stay."""
    states = states_of(40)[:, :, None]
    cropped, expected = (PagedEvictionCache(CONFIG, budget=64, **OPTIONS) for _ in range(2))
    feed(cropped, torch.cat([states[..., :4, :], states_of(3, seed=9)[:, :, None]], dim=4), [1] * 7)
    with pytest.warns(UserWarning, match="keep a copy"):
        cropped.crop(-3)
    feed(cropped, states[..., 4:, :], [1] * 36)
    feed(expected, states, [1] * 40)
    assert all(map(torch.equal, kept(cropped, 0), kept(expected, 0)))


def test_a_block_is_encoded_once() -> None:
    """Rows of one length: a loop of single tokens makes codes once a block, from the first on."""
    states = states_of(2 * BLOCK + 3)[:, :, None]
    cache = feed(PagedEvictionCache(CONFIG, budget=64, **OPTIONS), states[..., : BLOCK - 1, :], [1] * (BLOCK - 1))
    exact, seen = cache.layers[0].store.exact, []
    assert int(exact.coded) == -1
    for at in range(BLOCK - 1, 2 * BLOCK + 3):
        feed(cache, states[..., at : at + 1, :], [1])
        seen.append((int(exact.count), int(exact.coded)))
    assert seen[:2] == [(BLOCK, BLOCK), (BLOCK + 1, BLOCK)]
    assert {coded for _, coded in seen} == {BLOCK, 2 * BLOCK}
