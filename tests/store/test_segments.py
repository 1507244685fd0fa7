"""Heads of different length in one flat tensor: no slot more than the budget says, and attention that reads it so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators import Heads
from hf_paged_eviction.attention.segments import InSegments, Prepared
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.precision import few_bits
from hf_paged_eviction.store.segments import Segments
from hf_paged_eviction.store.store import Store

LENGTHS = torch.tensor([[3, 1, 4], [2, 5, 2]])
CPU = torch.device("cpu")


def test_slots_lie_one_after_the_other() -> None:
    segments, column = Segments(LENGTHS, CPU, 6), torch.arange(17)
    parts = column.split(segments.lengths)
    padded = segments.first({"keys": column})["keys"]
    assert padded.shape == (2, 3, 6)
    for own, expected in zip(padded.flatten(0, 1).tolist(), parts, strict=True):
        assert own[: len(expected)] == expected.tolist()
    slot = torch.tensor([[[2], [0], [1]], [[1], [4], [0]]])
    assert segments.places(slot).flatten().tolist() == [2, 3, 5, 9, 14, 15]
    slots = torch.tensor([[[7, 0, 3, 9, 9, 9]], [[1, 2, 4, 5, 6, 9]]])  # the same in all heads of a row
    new = torch.empty(17, dtype=torch.int64)
    segments.take({"keys": torch.arange(60).view(2, 3, 10)}, slots, {"keys": new})
    assert new.tolist() == [
        *(7, 0, 3),
        *(17,),
        *(27, 20, 23, 29),
        *(31, 32),
        *(41, 42, 44, 45, 46),
        *(51, 52),
    ]
    twice, moved = segments.rows_of(lambda rows: rows[[1, 0, 1]])
    assert twice.lengths == [2, 5, 2, 3, 1, 4, 2, 5, 2]
    assert moved(column).tolist() == [*range(8, 17), *range(8), *range(8, 17)]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_reads_each_segment_alone(softcap: float | None, sinks: bool) -> None:
    """Against sums over lists of tokens."""
    torch.manual_seed(0)
    rows, heads, group, width = 2, 3, 2, 8
    keys, values = torch.randn(17, width), torch.randn(17, 5)
    query, sink = torch.randn(rows, heads * group, 1, width), torch.randn(heads * group)
    logits = Logits(0.4, softcap, sink if sinks else None)
    flat = LENGTHS.flatten().tolist()
    output = InSegments(keys, values, flat).read(query, None, logits)
    assert output.shape == (rows, 1, heads * group, 5)
    start = 0
    for at, length in enumerate(flat):
        row, head = divmod(at, heads)
        for own in range(head * group, head * group + group):
            products = 0.4 * keys[start : start + length] @ query[row, own, 0]
            products = products if softcap is None else softcap * (products / softcap).tanh()
            weights = products.exp() / (products.exp().sum() + (sink[own].exp() if sinks else 0))
            expected = weights @ values[start : start + length]
            assert (output[row, 0, own] - expected).abs().max() < 1e-5
        start += length


@pytest.mark.parametrize(
    "settings",
    [
        {"allocator": "ada_kv", "policy": "paged_eviction", "heads": "separate"},
        {"allocator": "cake(observed=8)", "policy": "h2o"},
    ],
    ids=str,
)
def test_bytes_are_those_of_the_budget(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the longest head holds; and single tokens are read where they lie."""
    calls: list[int] = []
    for reader, name in ((InSegments, "read"), (Prepared, "__call__")):
        read = getattr(reader, name)
        monkeypatch.setattr(reader, name, lambda *arguments, read=read: calls.append(1) or read(*arguments))
    model = models.shared("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, 24, 4, **settings)
    few = PagedEvictionCache(model.config, 24, 4, bits=4, **settings)
    ids, mask = models.left_pad(models.prompts([60, 44]))
    for one in (cache, few):
        modes.generate(model, one, ids, mask, 9)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    numbers = 2 * heads * 24 * width * 2 * len(cache.paged_layers)
    assert cache.stats().storage_bytes == numbers * 4
    parts = few.stats().storage_parts
    assert (parts["codes"], parts["levels"]) == (numbers // 2, numbers // width * 2)
    limits = torch.cat([layer.table.limits.expand(-1, heads) for _, layer in cache.paged_layers])
    assert limits.max() > 24
    assert len(calls) > 4 * len(cache.paged_layers)
    for one in (cache, few):
        one.reset()
        assert one.stats().storage_bytes == 0


def test_a_model_that_changes_what_it_is_given_is_told() -> None:
    """A layer that was given the very tensors once relies on it."""
    model = models.build("llama", "paged_eviction")
    cache = PagedEvictionCache(model.config, 24, 4, allocator="ada_kv", heads="separate")
    ids, mask = models.left_pad(models.prompts([40]))
    modes.forward(model, cache, ids, mask, 0, 40)
    update = cache.update
    cache.update = lambda *arguments, **more: tuple(  # type: ignore[method-assign]
        states.clone() for states in update(*arguments, **more)
    )
    with pytest.raises(ValueError, match=r"changes.*values"):
        modes.forward(model, cache, torch.cat([ids, ids[:, :1]], 1), modes.extend(mask, 1), 40, 41)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("policy", ["keydiff", "tova"])
def test_rows_with_pads_are_read_where_they_lie(policy: str, bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While larger heads still fill up and while one row holds pads, too: no single token asks for a padded copy."""
    model = models.shared("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts([60, 41], seed=1))
    sizes, draw = (model.config.num_hidden_layers, model.config.num_key_value_heads), torch.Generator().manual_seed(3)
    table: Any = Heads.of(torch.rand(sizes, generator=draw) + 0.1)
    copies: list[int | None] = []

    def logits(budget: int) -> torch.Tensor:
        settings: Any = {"budget": budget, "block_size": 4, "policy": policy, "allocator": table, "bits": bits}
        cache = PagedEvictionCache(model.config, **settings)
        last = [modes.forward(model, cache, ids, mask, 0, 30)[:, -1]]
        copies.clear()
        return torch.stack(last + [modes.forward(model, cache, ids, mask, at, at + 1)[:, -1] for at in range(30, 60)])

    def copying(self: Any, held: int | None = None) -> Any:
        if self.columns.layout.lengths is not None:
            copies.append(held)
        return original(self, held)

    original = Store.shown
    for budget in (24, 32):
        with monkeypatch.context() as patch:
            patch.setattr(Store, "carrier", lambda *_: None)
            patch.setattr(Store, "shown", copying)
            expected = logits(budget)
            assert copies
        with monkeypatch.context() as patch:
            patch.setattr(few_bits, "FEW", 0)
            patch.setattr(Store, "shown", copying)
            assert_close(logits(budget), expected)
            assert not copies or policy == "tova"  # which looks at keys whenever a block may be full
