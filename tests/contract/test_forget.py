"""`forget`: tokens that the user drops are gone at once; positions stay, and masks may go on showing them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from closeness import bound
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from reference import Recorder, assert_evicted, assert_exact

READ, ALL = 24, 34
#: By row, of the real tokens: in the middle and at the end of what is read; of the second row, the start alone.
SPANS = [[(5, 9), (13, 15)], [(0, 3)]]


def text(padded: bool) -> tuple[Tensor, Tensor]:
    """Two rows; padded, `READ` columns of the first are 15 tokens."""
    return models.left_pad(models.prompts([ALL - 9, ALL] if padded else [ALL, ALL], seed=5))


def without(mask: Tensor) -> Tensor:
    """The mask, in which `SPANS` are hidden."""
    hidden, places = mask.clone(), mask.cumsum(-1) - 1
    for row, spans in enumerate(SPANS):
        for start, end in spans:
            hidden[row, (places[row] >= start) & (places[row] < end)] = 0
    return hidden


def feed(model: Any, cache: Any, ids: Tensor, mask: Tensor, positions: Tensor, part: slice) -> Tensor:
    """Logits of these columns, with these positions whatever the mask shows."""
    inputs = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part], CACHE_ARGUMENT: cache}
    with torch.no_grad():
        return model(input_ids=ids[:, part], use_cache=True, **inputs).logits


def said(model: Any, cache: Any, ids: Tensor, mask: Tensor, positions: Tensor, step: int) -> Tensor:
    """Logits of the columns from `READ` on, fed in parts of `step` columns."""
    parts = [slice(start, min(start + step, ALL)) for start in range(READ, ALL, step)]
    return torch.cat([feed(model, cache, ids, mask, positions, part) for part in parts], dim=1)


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged_eviction"])
@pytest.mark.parametrize(("family", "static"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_as_a_plain_cache_with_a_mask(family: str, static: bool, attention: str, padded: bool, step: int) -> None:
    """The mask of the plain cache hides the tokens, and ours is told to forget them, whatever its mask says."""
    model, (ids, mask) = models.shared(family, attention), text(padded)
    positions, plain = models.positions_of(mask), modes.dynamic(model)
    modes.forward(model, plain, ids, mask, 0, READ)
    expected = said(model, plain, ids, without(mask), positions, step)
    for shown in (mask, without(mask)):
        cache = PagedEvictionCache(model.config, budget=64, policy="key_norm", static=static)
        modes.forward(model, cache, ids, mask, 0, READ)
        cache.forget(SPANS)
        assert cache.get_seq_length() == READ
        assert cache.stats().evicted_tokens == 9 * len(cache.paged_layers)
        logits = said(model, cache, ids, shown, positions, step)
        assert (logits - expected).abs().max() <= bound(expected)


@pytest.mark.parametrize("by", ["generate", "follow_up", "no mask"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_chat_goes_on_with_its_whole_text(family: str, by: str) -> None:
    """At the end of what was read, too, positions stay."""
    model, (ids, mask) = models.shared(family), text(padded=False)
    spans, positions, plain = [(8, 12), (READ - 3, READ)], models.positions_of(mask), modes.dynamic(model)
    hidden = mask.clone()
    hidden[:, 8:12] = hidden[:, READ - 3 : READ] = 0
    modes.forward(model, plain, ids, mask, 0, READ)
    answer, expected, start = ids, list[Tensor](), READ
    for _ in range(6):
        places, part = torch.arange(answer.shape[1]).expand(2, -1), slice(start, answer.shape[1])
        logits = feed(model, plain, answer, modes.extend(hidden, len(expected)), places, part)
        expected.append(logits[:, -1].argmax(-1, keepdim=True))
        start, answer = answer.shape[1], torch.cat([answer, expected[-1]], dim=1)
    cache = PagedEvictionCache(model.config, budget=64, policy="key_norm")
    modes.forward(model, cache, ids, mask, 0, READ)
    cache.forget(spans)
    settings = {CACHE_ARGUMENT: cache, "max_new_tokens": 6, "do_sample": False, "pad_token_id": models.PAD}
    if by == "generate":
        output = model.generate(ids, attention_mask=mask, **settings)
    elif by == "follow_up":
        output = model.generate(**cache.follow_up(ids[:, READ:]), **settings)
    else:
        with torch.no_grad():
            logits = model(ids[:, READ:], position_ids=positions[:, READ:], **{CACHE_ARGUMENT: cache}).logits
        assert logits[:, -1].argmax(-1, keepdim=True).tolist() == expected[0].tolist()
        return
    assert output[:, -6:].tolist() == torch.cat(expected, dim=1).tolist()


KINDS: list[dict[str, Any]] = [
    {"policy": "key_norm"},
    {"policy": "h2o", "heads": "separate"},
    {"policy": "value_norm", "bits": 8},
    {"policy": "keydiff", "bits": 4},
    {"policy": "keydiff", "allocator": "heads:[[1.5, 0.5], [0.6, 1.4]]"},
    {"policy": "keydiff", "allocator": "heads:[[1.5, 0.5], [0.6, 1.4]]", "bits": 4},
    {"policy": "snapkv(window=4)"},
    {"policy": "key_norm", "static": True},
]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_exact_where_the_budget_binds(settings: dict[str, Any], padded: bool, saved: bool, tmp_path: Path) -> None:
    model, (ids, mask) = models.shared("llama", "paged_eviction"), text(padded)
    cache = PagedEvictionCache(model.config, budget=16, block_size=2, **settings)
    modes.forward(model, cache, ids, mask, 0, READ)
    cache.forget(SPANS)
    if saved:
        cache.save(tmp_path / "forgot.safetensors", ids[:, :READ])
        cache = PagedEvictionCache.load(tmp_path / "forgot.safetensors", model.config)
    twin, gone = copy.deepcopy(cache), [{at for span in row for at in range(*span)} for row in SPANS]
    positions = models.positions_of(mask)
    for part in (slice(READ, READ + 1), slice(READ + 1, READ + 5), slice(READ + 5, ALL)):
        logits = feed(model, cache, ids, mask, positions, part)
        assert torch.equal(logits, feed(model, twin, ids, without(mask), positions, part))
        for _, layer in cache.paged_layers:
            for row, heads in enumerate(layer.positions.tolist()):
                assert all(gone[row].isdisjoint(slots) for slots in heads)


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("settings", [kind for kind in KINDS if not {"bits", "static"} & kind.keys()], ids=str)
def test_every_logit_is_that_of_what_is_held(settings: dict[str, Any], budget: int) -> None:
    model, (ids, mask) = models.shared("llama", "paged_eviction"), text(padded=True)
    cache = PagedEvictionCache(model.config, budget=budget, block_size=2, sink_tokens=0, **settings)
    with Recorder(model, cache, poison=True) as recorder:
        modes.forward(model, cache, ids, mask, 0, READ)
        cache.forget([[(2, 9)], [(1, 3), (10, 12)]])
        for at in range(READ, ALL, 2):
            modes.forward(model, cache, ids, mask, at, at + 2)
        ids, mask = torch.cat([ids, ids[:, -6:]], dim=1), modes.extend(mask, 6)
        for at in range(ALL, ALL + 6):
            modes.forward(model, cache, ids, mask, at, at + 1)
    assert_evicted(recorder)
    assert_exact(model, recorder)


def test_their_slots_are_used_first() -> None:
    model, (ids, mask) = models.shared("llama"), text(padded=False)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="key_norm")
    modes.forward(model, cache, ids, mask, 0, READ)
    cache.forget([(8, 14)])
    evicted = cache.stats().evicted_tokens
    for at in range(READ, READ + 6):
        modes.forward(model, cache, ids, mask, at, at + 1)
    assert cache.stats().evicted_tokens == evicted == 12 * len(cache.paged_layers)
    modes.forward(model, cache, ids, mask, READ + 6, READ + 7)
    assert cache.stats().evicted_tokens > evicted


def test_crop_after_forgetting() -> None:
    """What was forgotten does not come back, and its positions are given back with the text."""
    model, (ids, mask) = models.shared("llama"), text(padded=False)
    caches = [PagedEvictionCache(model.config, budget=64, policy="key_norm") for _ in range(2)]
    modes.forward(model, caches[0], ids, mask, 0, READ)
    modes.forward(model, caches[1], ids, mask, 0, READ - 4)
    caches[0].forget([(4, 6), (READ - 6, READ - 1)])
    caches[1].forget([(4, 6), (READ - 6, READ - 4)])
    caches[0].crop(-4)
    first, second = (modes.forward(model, cache, ids, mask, READ - 4, ALL) for cache in caches)
    torch.testing.assert_close(first, second)


def test_what_cannot_be_forgotten() -> None:
    model, (ids, mask) = models.shared("llama"), text(padded=True)
    cache = PagedEvictionCache(model.config, budget=64, policy="key_norm")
    with pytest.raises(ValueError, match="has read no text"):
        cache.forget([(0, 4)])
    modes.forward(model, cache, ids, mask, 0, READ)
    before = [layer.positions.tolist() for _, layer in cache.paged_layers]
    for spans, message in (
        ([(0, 16)], r"\(0, 16\), and row 0 has 15 tokens"),
        ([(3, 1)], r"forget has the span \(3, 1\)"),
        ([[(0, 1)]] * 3, "spans for 3 rows.*batch of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.forget(spans)
    with pytest.raises(TypeError, match="forget must be a list of pairs"):
        cache.forget("system")
    cache.forget([])
    cache.forget([(4, 4)])
    assert [layer.positions.tolist() for _, layer in cache.paged_layers] == before


def test_a_linear_state_cannot_forget() -> None:
    model = models.shared("lfm2")
    ids = models.prompts([12])[0][None]
    cache = PagedEvictionCache(model.config, budget=64, policy="key_norm")
    modes.forward(model, cache, ids, torch.ones_like(ids), 0, 12)
    with pytest.raises(ValueError, match=r"linear states.*reset"):
        cache.forget([(2, 4)])
