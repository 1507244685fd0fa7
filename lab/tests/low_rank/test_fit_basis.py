"""Fitting a basis: the sums are those of plain loops, and the directions are the best ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_lab.low_rank.basis import load_basis
from hf_paged_eviction_lab.low_rank.fit import fit_basis, solve, sum_products
from invoking import run


def windows() -> list[Tensor]:
    return [torch.stack(models.prompts(lengths, seed=sum(lengths))) for lengths in ([40], [30, 30])]


def seen_by(model: Any, window: Tensor) -> tuple[DynamicCache, dict[int, Tensor]]:
    """Keys and values that a plain cache holds, and the rotated queries by layer."""
    from hf_paged_eviction.queries import attention
    from hf_paged_eviction.queries.attention import paged_eviction_attention

    cache, queries = DynamicCache(config=model.config), {}

    def noting(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        queries[module.layer_idx] = query
        return paged_eviction_attention(module, query, *args, **kwargs)

    attention.AttentionInterface.register("noting", noting)
    attention.AttentionMaskInterface.register("noting", attention._build_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("noting")
    with torch.no_grad():
        model(window, **{CACHE_ARGUMENT: cache})
    model.set_attn_implementation(before)
    return cache, queries


def slow_sums(model: Any, layer: int, head: int) -> dict[str, Any]:
    """Token by token."""
    sums: dict[str, Any] = {"count": 0, "keys": 0.0, "key_squares": 0.0, "value_squares": 0.0, "query_squares": 0.0}
    for window in windows():
        cache, queries = seen_by(model, window)
        for row in range(len(window)):
            for column in range(window.shape[1]):
                held = cache.layers[layer]
                key, value = (states[row, head, column].double() for states in (held.keys, held.values))
                own = [queries[layer][row, 2 * head + group, column].double() for group in range(2)]
                sums["count"] += 1
                sums["keys"] = sums["keys"] + key
                sums["key_squares"] = sums["key_squares"] + torch.outer(key, key)
                sums["value_squares"] = sums["value_squares"] + torch.outer(value, value)
                sums["query_squares"] = sums["query_squares"] + sum(torch.outer(q, q) for q in own) / 2
    return sums


def test_sums() -> None:
    model = models.shared("llama")
    before = model.config._attn_implementation
    sums = sum_products(model, windows())
    assert model.config._attn_implementation == before
    for layer, of in sums.items():
        for head in range(2):
            for name, expected in slow_sums(model, layer, head).items():
                own = getattr(of, name)
                own = own[0] if name == "count" else own[head]
                assert torch.allclose(own, torch.as_tensor(expected).double(), rtol=1e-4, atol=1e-4), name


def test_directions_are_the_best() -> None:
    """Of values no directions keep more of the variance, of keys none more of the products with queries."""
    sums = sum_products(models.shared("llama"), windows())
    generator = torch.Generator().manual_seed(0)
    for of in sums.values():
        count = float(of.count)
        basis, worth = solve(of)
        for kind, total, squares, weight in (
            ("keys", of.keys, of.key_squares, of.query_squares / count),
            ("values", of.values, of.value_squares, None),
        ):
            axes = getattr(basis, kind)
            mean = total / count
            covariance = squares / count - mean[:, :, None] * mean[:, None, :]
            dim = covariance.shape[-1]
            weight = torch.eye(dim).double().expand_as(covariance) if weight is None else weight

            def lost(down: Tensor, up: Tensor, covariance: Tensor = covariance, weight: Tensor = weight) -> Tensor:
                left = torch.eye(len(up[0])).double() - up @ down.mT
                return torch.einsum("hij,hji->h", weight, left @ covariance @ left.mT)

            whole = lost(torch.zeros_like(covariance[..., :1]), torch.zeros_like(covariance[..., :1]))
            shares = []
            for rank in range(1, dim + 1):
                down, up = axes.down[..., :rank].double(), axes.up[..., :rank].double()
                ours = lost(down, up)
                shares.append(1 - (ours / whole).mean())
                for _ in range(5):
                    other = torch.linalg.qr(torch.randn(down.shape, generator=generator).double())[0]
                    assert (ours <= lost(other, other) * (1 + 0.1 * (kind == "keys")) + 1e-9).all()
            assert shares == sorted(shares)
            assert shares[-1] > 0.9999
            assert worth[kind] == pytest.approx([shares[rank - 1].item() for rank in (2, 4, 6)], abs=0.05)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="8 directions"):
        fit_basis(models.shared("llama"), [torch.ones(1, 9, dtype=torch.long)])
    if models.unavailable("deepseek_v3") is None:
        with pytest.raises(ValueError, match="caches latents"):
            fit_basis(models.shared("deepseek_v3"), windows())


def test_the_command(tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "basis.safetensors"
    text.write_text("The quick fox asks the lazy dog for a code, and the dog tells it: seven, four, nine. " * 90)
    arguments = ["fit-basis", "--text", str(text), "--window", "300", "--tokens", "1200", "--output"]
    result = run(*arguments, output)
    assert "variance:" in result.stdout
    assert list(load_basis(output).layers) == [0, 1, 2, 3]
    run(*arguments, tmp_path / "basis.bin", status=2)
