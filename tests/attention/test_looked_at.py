"""Tokens that later queries look at: found from the sums of attention, they are those that all weights show."""

from typing import Any

import pytest
import torch
from torch import Tensor

import models
import modes
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.allocators.first_prompt import FirstPrompt
from hf_paged_eviction.attention import in_order
from hf_paged_eviction.attention import looked_at as module
from hf_paged_eviction.attention.looked_at import looked_at
from hf_paged_eviction.attention.weights import Attention, Logits
from hf_paged_eviction.tensors.pieces import PIECE_BYTES
from waiting import Watch


def drawn(seed: int, dtype: torch.dtype = torch.float32, tokens: int = 700, count: int = 40) -> dict[str, Any]:
    """Two rows, whose last queries look at a few tokens far more than at the others; the second row has pads."""
    draw = torch.Generator().manual_seed(seed)
    keys, queries = (torch.randn(2, heads, n, 16, generator=draw) for heads, n in ((2, tokens), (6, count)))
    keys[:, :, torch.randperm(tokens, generator=draw)[:50]] *= 3
    positions = torch.stack([torch.randperm(tokens, generator=draw) for _ in range(4)]).view(2, 2, tokens)
    asked = torch.arange(tokens - count, tokens).repeat(2, 1)
    positions[1, :, :7] = -1
    asked[1, :5] = -1
    return {
        "queries": queries.to(dtype),
        "keys": keys.to(dtype),
        "query_positions": asked,
        "key_positions": positions,
        "logits": Logits(0.4),
    }


def sums(attention: Attention) -> Tensor:
    """`[2, 6, q]`, query by query."""
    lse = torch.zeros(attention.queries.shape[:3])
    for row, head, at in torch.cartesian_prod(*(torch.arange(n) for n in lse.shape)).tolist():
        positions, asks = attention.key_positions[row, head // 3], attention.query_positions[row, at]
        seen = (positions >= 0) & (positions <= asks)
        logits = attention.keys[row, head // 3].float() @ attention.queries[row, head, at].float() * 0.4
        lse[row, head, at] = logits[seen].logsumexp(0)
    return lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.005, 0.02, 0.3])
@pytest.mark.parametrize("distance", [0, 64])
def test_sums_show_what_all_weights_show(threshold: float, distance: int, dtype: torch.dtype) -> None:
    given = drawn(1, dtype)
    expected = looked_at(Attention(**given), threshold, distance)
    found = looked_at(Attention(**given, lse=sums(Attention(**given))), threshold, distance)
    weights = Attention(**given).weights.mean(2)  # what lies on the threshold may be on either side
    close = ((weights - threshold).abs() < 2e-2 * threshold).any(2)
    assert ((found == expected) | close).all()
    assert 0 < int(expected.sum()) < expected.numel() / 2
    if dtype == torch.float32:
        assert torch.equal(found, expected)


def test_nothing_may_be_looked_at() -> None:
    given = drawn(4)
    given["keys"] *= 0
    for lse in None, sums(Attention(**given)):
        assert not looked_at(Attention(**given, lse=lse), 0.02, 64).any()


def test_the_weights_of_a_head_never_exist() -> None:
    given = drawn(2, tokens=4096)
    lse = sums(Attention(**given))
    with Watch() as watch:
        looked_at(Attention(**given, lse=lse), 0.02, 64)
    assert watch.largest <= given["keys"].numel() < 3 * 40 * 4096


def test_pieces_of_queries_show_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(3)
    whole = looked_at(Attention(**given), 0.02, 5)
    monkeypatch.setitem(PIECE_BYTES, "cpu", 4 * 12 * 700 * 7)
    assert torch.equal(looked_at(Attention(**given), 0.02, 5), whole)


@pytest.mark.skipif(in_order._FLASH is None, reason="torch lacks the operator that returns sums of exponentials")
def test_a_prompt_in_chunks_gets_the_same_shares_from_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own attention hands its sums over: of chunks that fit, and of the one that does not."""
    model = models.shared("llama", "paged_eviction")
    ids, mask = models.left_pad(models.prompts([90], seed=1))
    used: list[bool] = []
    mark = module._mark
    monkeypatch.setattr(module, "_mark", lambda *given: used.append(True) or mark(*given))

    def preferences() -> list[Tensor]:
        """After each chunk."""
        allocator = FirstPrompt(threshold=0.03, observed=8, distance=2)
        settings: Any = {"budget": 72, "block_size": 4, "policy": "snapkv", "heads": "separate"}
        cache = PagedEvictionCache(model.config, allocator=allocator, **settings)
        told = []
        for part in [(0, 40), (40, 60), (60, 66), (66, 90)]:
            modes.forward(model, cache, ids, mask, *part)
            told.append(torch.cat([cache._limits._told[place] for place in range(2)], 1))
        assert torch.cat([*cache._limits.tokens.values()], 1).unique().numel() > 1
        return told

    fast = preferences()
    assert used
    used.clear()
    monkeypatch.setattr(in_order, "_FLASH", None)
    for one, other in zip(fast, preferences(), strict=True):
        assert_close(one, other)
        assert float(one.std()) > 0, "heads differ"
    assert not used
