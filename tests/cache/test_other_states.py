"""Keys and values unlike those held are refused, before anything is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction import PagedEvictionCache

Change = Callable[[Tensor], Tensor]
OTHERS: dict[str, tuple[Change, Change, type[Exception], str]] = {
    "narrower heads": (lambda x: x[..., :4], lambda x: x[..., :4], ValueError, r"= \(2, 8, 8\).*\(2, 4, 4\)"),
    "wider heads": (lambda x: torch.cat([x, x], -1),) * 2 + (ValueError, r"= \(2, 8, 8\).*\(2, 16, 16\)"),
    "narrower values": (lambda x: x, lambda x: x[..., :4], ValueError, r"= \(2, 8, 8\).*\(2, 8, 4\)"),
    "fewer heads": (lambda x: x[:, :1], lambda x: x[:, :1], ValueError, r"= \(2, 8, 8\).*\(1, 8, 8\)"),
    "float64": (Tensor.double, Tensor.double, ValueError, "in torch.float32 and got some in torch.float64"),
    "float64 values": (lambda x: x, Tensor.double, ValueError, "in torch.float32 and got some in torch.float64"),
    "bfloat16": (Tensor.bfloat16, Tensor.bfloat16, ValueError, "in torch.float32 and got some in torch.bfloat16"),
    "int64": (Tensor.long, Tensor.long, TypeError, "keys in torch.int64 and values in torch.int64"),
    "bool values": (lambda x: x, Tensor.bool, TypeError, "keys in torch.float32 and values in torch.bool"),
    "complex": (lambda x: x * 1j, lambda x: x * 1j, TypeError, "in torch.complex64"),
    "another device": (lambda x: x.to("meta"), lambda x: x.to("meta"), ValueError, "came on cpu, and got some on meta"),
    "two devices": (lambda x: x, lambda x: x.to("meta"), ValueError, "keys on cpu and values on meta"),
    "fewer values": (lambda x: torch.cat([x, x], 2), lambda x: x, ValueError, r"keys \[1, 2, .*alike but for head_dim"),
    "three dimensions": (lambda x: x[0], lambda x: x[0], ValueError, r"both must be \[rows, kv_heads, tokens"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recency": {"policy": "recency"},
    "few bits": {"bits": 4},
    "recording": {"record_past": True},
    "static": {"static": True},
    "in the cache": {"positions": "cache"},
    "own heads": {"heads": "separate"},
}


def make(settings: dict[str, Any], family: str = "llama") -> PagedEvictionCache:
    return models.paged(models.shared(family).config, **{"budget": 16, "block_size": 4, **settings})


def announced(cache: PagedEvictionCache, count: int) -> PagedEvictionCache:
    """The cache, asked for a mask for so many tokens, as models ask."""
    assert cache.is_sliding is not None
    cache.get_mask_sizes(count)
    return cache


def fill(cache: PagedEvictionCache) -> None:
    states = torch.randn(1, 2, 40, 8)
    for at, stop in ((0, 30), (30, 31)):
        announced(cache, stop - at)
        for layer in range(2):
            cache.update(states[:, :, at:stop], states[:, :, at:stop], layer)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_refused(settings: dict[str, Any], other: Any, count: int) -> None:
    cache, (change_keys, change_values, kind, reason) = make(settings), other
    fill(cache)
    before = cache.layers[0].positions.clone()
    new = torch.randn(1, 2, count, 8)
    with pytest.raises(kind, match=reason):
        announced(cache, count).update(change_keys(new), change_values(new), 0)
    assert torch.equal(cache.layers[0].positions, before)
    assert cache.get_seq_length() == 31
    announced(cache, count)
    for layer in range(2):
        cache.update(new, new, layer)
    assert cache.get_seq_length() == 31 + count


@pytest.mark.parametrize("other", ["int64", "complex", "two devices", "fewer values", "three dimensions"])
def test_refused_at_first(other: str) -> None:
    cache, (change_keys, change_values, kind, reason) = make({}), OTHERS[other]
    new = torch.randn(1, 2, 5, 8)
    with pytest.raises(kind, match=reason):
        cache.update(change_keys(new), change_values(new), 0)
    fill(cache)


@pytest.mark.parametrize("settings", [{}, {"bits": 4}], ids=["plain", "few bits"])
def test_refused_after_loading(settings: dict[str, Any], tmp_path: Path) -> None:
    cache = make(settings)
    fill(cache)
    cache.save(tmp_path / "context.safetensors")
    loaded = PagedEvictionCache.load(tmp_path / "context.safetensors", models.shared("llama").config)
    new = torch.randn(1, 2, 1, 8)
    for other in ("narrower heads", "narrower values", "float64", "another device"):
        change_keys, change_values, kind, reason = OTHERS[other]
        with pytest.raises(kind, match=reason):
            loaded.update(change_keys(new), change_values(new), 0)
    assert torch.equal(loaded.update(new, new, 0)[0], cache.update(new, new, 0)[0])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_after_reset_another_model_may_come(settings: dict[str, Any]) -> None:
    cache = make(settings)
    fill(cache)
    cache.reset()
    states = torch.randn(1, 1, 30, 16, dtype=torch.float64)
    if settings.get("positions") == "cache":  # turned as the config says
        states = states[..., :8]
    assert announced(cache, 30).update(states, states, 0)[0].dtype == torch.float64


@pytest.mark.parametrize("budget", [10**9, 10**12, 2**63, "99999999999", "9999999999 TB"])
def test_a_budget_that_no_text_reaches(budget: int | str) -> None:
    """A table has a place for each token."""
    with pytest.raises(ValueError, match=r"16,777,216.*DynamicCache"):
        fill(make({"budget": budget, "block_size": 1}))
