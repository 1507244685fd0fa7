"""Low rank: tokens are kept as coefficients of a model's directions, and read as what those say."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_rank import RankRecorder, assert_projected, slow_projected
from transformers import DynamicCache

import models
import modes
import rows
from closeness import assert_close
from evicting import binding
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.heads import WHOLE
from hf_paged_eviction_lab.low_rank import LowRank
from hf_paged_eviction_lab.low_rank.basis import Basis, load_basis, save_basis
from hf_paged_eviction_lab.low_rank.codec import RankCodec, check_rank
from hf_paged_eviction_lab.low_rank.fit import fit_basis
from reference import assert_evicted

OURS = "paged_eviction"
DIM = 8


@functools.cache
def shared(family: str = "llama", attention: str = OURS) -> Any:
    """In double precision a step of the rounding is hardly ever taken for the noise of the last digit."""
    return models.build(family, attention).double()


@functools.cache
def fitted(family: str = "llama") -> Basis:
    return fit_basis(shared(family), [torch.stack(models.prompts([50, 50], seed=9))])


# ---- the codec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("rank", [1, 3, DIM])
def test_codec(rank: int, bits: int | None) -> None:
    axes = fitted().layers[1].keys
    states = torch.randn(2, 2, 5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    codec = RankCodec(axes, rank, bits, WHOLE)
    codes = codec.encode(states)
    assert (codes.packed.shape, codes.levels.shape) == codec.shapes(states, 5)
    assert codes.packed.shape[-1] == (rank if bits is None else -(-rank // 2))
    decoded = codec.decode(codes, DIM, states.dtype)
    assert torch.allclose(decoded, slow_projected(states, axes, rank, bits), rtol=1e-5, atol=1e-6)
    if rank == DIM and bits is None:
        assert torch.allclose(decoded, states, rtol=1e-5, atol=1e-5)


# ---- in a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "padded", "rank", "bits", "settings"),
    [
        ("beam", True, 3, None, {"policy": "keydiff", "heads": "separate"}),
        ("chunked_prefill", True, (None, 4), (None, 4), {"policy": "paged_eviction"}),
        ("three_turns", False, (5, 2), (None, 8), {"policy": "h2o"}),
        ("direct", True, 4, None, {"policy": "keydiff", "allocator": "ada_kv", "heads": "separate"}),
    ],
    ids=str,
)
def test_exact(mode: str, padded: bool, rank: Any, bits: Any, settings: dict[str, Any]) -> None:
    """Logits are those of a slow cache that projects the same tokens."""
    model, basis = shared(), fitted()
    cache = binding(model, mode, bits=LowRank(basis, rank, bits), **settings)
    with RankRecorder(model, cache, basis, check_rank(rank), check_rank(bits)) as recorder:
        modes.run(model, cache, mode, *modes.batch(mode, padded))
    assert_evicted(recorder)
    assert_projected(model, recorder)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_sliding_layers_beside(family: str) -> None:
    """Of gemma4 they have heads of another size."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model, basis = shared(family), fitted(family)
    assert list(basis.layers) == [1]
    cache = binding(model, "direct", bits=LowRank(basis, 3))
    with RankRecorder(model, cache, basis, (3, 3), (None, None)) as recorder:
        modes.run(model, cache, "direct", *modes.batch("direct", True))
    assert_projected(model, recorder)


def test_as_many_directions_as_channels_lose_nothing() -> None:
    model = shared()
    ids, mask = modes.batch("direct", True)
    caches = DynamicCache(config=model.config), PagedEvictionCache(model.config, 48, 4, bits=LowRank(fitted(), DIM))
    spans = [(0, 20), *((at, at + 1) for at in range(20, 40))]
    logits = [torch.cat([modes.forward(model, cache, ids, mask, *span) for span in spans], 1) for cache in caches]
    assert_close(logits[0][mask.bool()], logits[1][mask.bool()])


@pytest.mark.parametrize("settings", [{}], ids=str)
def test_a_row_is_what_it_is_alone(settings: dict[str, Any]) -> None:
    settings = {"budget": 24, "block_size": 4, "policy": "keydiff", **settings}
    assert rows.compare(shared(), [40, 23, 9], None, bits=LowRank(fitted(), 4), **settings) > 0


@pytest.mark.parametrize("disposal", ["merge", "demote", "recall"])
def test_what_is_refused_is_called_by_its_name(disposal: str) -> None:
    how: dict[str, Any] = {"policy": "keydiff", "disposal": disposal, "bits": LowRank(fitted(), 4)}
    with pytest.raises(ValueError, match=r"bits=.*bits="):
        PagedEvictionCache(shared().config, 24, 4, **how)


def test_static() -> None:
    model = shared()
    ids, mask = models.left_pad(models.prompts([44, 31], seed=1))
    logits = []
    for static in (False, True):
        how = {"policy": "keydiff", "bits": LowRank(fitted(), 4, 8), "static": static}
        cache = PagedEvictionCache(model.config, 24, 4, **how)
        spans = [(0, 20), (20, 28), *((at, at + 1) for at in range(28, 44))]
        logits.append(torch.cat([modes.forward(model, cache, ids, mask, *span)[:, -1:] for span in spans], 1))
    assert_close(logits[0], logits[1])


def test_a_compiled_step_decodes_in_its_graph() -> None:
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    model, tokens = shared(), []
    ids, mask = models.left_pad(models.prompts([27, 21], seed=1))
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    for how in ({"disable_compile": True}, {"compile_config": config}):
        cache = PagedEvictionCache(model.config, 24, 4, policy="keydiff", bits=LowRank(fitted(), 4), static=True)
        tokens.append(modes.generate(model, cache, ids, mask, 6, **how).tolist())
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    assert tokens[0] == tokens[1]


def test_bytes() -> None:
    model = shared()
    ids, mask = modes.batch("direct", False)
    taken = {}
    for rank in (None, 4, (2, None)):
        cache = PagedEvictionCache(model.config, 24, 4, bits=None if rank is None else LowRank(fitted(), rank))
        modes.forward(model, cache, ids, mask, 0, 40)
        taken[rank] = cache.stats().storage_bytes
        if rank is not None:
            parts = [part for layer in cache.layers for part in (*layer.store.tensors, *layer.store.exact.tensors())]
            assert taken[rank] == sum(part.numel() * part.element_size() for part in parts)
    slots = 2 * 3 * 2 * 24 * 8  # layers, rows, heads, slots, bytes of a number
    assert taken[None] == slots * 2 * DIM
    beside = taken[4] - slots * 8
    assert 0 < beside < taken[None]
    assert taken[2, None] == slots * (2 + DIM) + beside
    few, all_of_them = (
        PagedEvictionCache(model.config, "60000B", block_size=4, policy="keydiff", bits=bits)
        for bits in (LowRank(fitted(), 2), None)
    )
    for cache in (few, all_of_them):
        modes.forward(model, cache, ids, mask, 0, 40)
        assert cache.stats().storage_bytes <= 60_000
    assert few.budget is not None and all_of_them.budget is not None and few.budget > all_of_them.budget


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_refused(tmp_path: Path) -> None:
    model, basis = shared(), fitted()
    for file, rank, message in [
        (basis, None, "says no rank"),
        (basis, DIM + 1, "more than the 8 channels"),
        (basis, 0, "at least 1"),
        (basis, (1, 2, 3), "a pair"),
        (tmp_path / "none.safetensors", 4, "there is no such file"),
        (Basis({0: basis.layers[0]}, basis.model), 4, "knows nothing of layer 1"),
        (Basis(basis.layers, {**basis.model, "head_dim": "64", "num_hidden_layers": "7"}), 4, "7"),
    ]:
        with pytest.raises(ValueError, match=message):
            PagedEvictionCache(model.config, 24, 4, policy="keydiff", bits=LowRank(file, rank))
    for text, message in [
        ("low_rank", "write 8, 4, 3 or 2"),
        ("low_rank(file=nowhere, rank=4)", "write 8, 4, 3 or 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            PagedEvictionCache(model.config, 24, 4, policy="keydiff", bits=text)
    with pytest.raises(TypeError, match="whole number"):
        LowRank(basis, "4")  # type: ignore[arg-type]
    if models.unavailable("deepseek_v3") is None:
        with pytest.raises(ValueError, match="caches latents"):
            PagedEvictionCache(models.family_config("deepseek_v3"), 24, 4, policy="keydiff", bits=LowRank(basis, 4))
    cache = PagedEvictionCache(model.config, 24, 4, bits=LowRank(basis, 4))
    modes.forward(model, cache, *modes.batch("direct", False), 0, 9)
    with pytest.raises(ValueError, match=r"Save.*bits="):
        cache.save(tmp_path / "context.safetensors")


def test_files(tmp_path: Path) -> None:
    basis, file = fitted(), tmp_path / "basis.safetensors"
    save_basis(basis, file)
    loaded = load_basis(file)
    assert (loaded.model, loaded.facts) == (basis.model, basis.facts)
    for index, layer in basis.layers.items():
        for kind, axes in vars(layer).items():
            for name, tensor in vars(axes).items():
                assert torch.equal(getattr(getattr(loaded.layers[index], kind), name), tensor)
    model = shared()
    ids, mask = modes.batch("direct", False)
    logits = [
        modes.forward(model, PagedEvictionCache(model.config, 24, 4, bits=bits), ids, mask, 0, 40)
        for bits in (
            LowRank(basis, 3),
            LowRank(file, 3),
        )
    ]
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"Cannot.*basis"):
        load_basis(file)
