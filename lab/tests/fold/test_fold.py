"""Fold: what leaves is in the state, once, and attention reads it beside what is held."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_fold import folding, random_kernels, saved_kernels, slow_attention
from torch import Tensor

import models
import modes
from hf_paged_eviction import PagedEvictionCache, make_disposal
from hf_paged_eviction.attention.parts import Part, join, read
from hf_paged_eviction.attention.weights import Logits
from hf_paged_eviction.queries.handover import forget_handover
from hf_paged_eviction.queries.observer import Queries
from hf_paged_eviction_lab.fold import Fold, Kernels, load_kernels, save_kernels
from reference import Recorder, assert_exact

OURS = "paged_eviction"
SMALL: dict[str, Any] = {"budget": 24, "block_size": 4, "policy": "keydiff"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def make(folder: Path, model: Any, **settings: Any) -> PagedEvictionCache:
    settings = {**SMALL, **settings}
    return models.paged(model.config, **settings, disposal=saved_kernels(folder, model.config, settings["policy"]))


# ---- the formula -----------------------------------------------------------------------------------------------------


def test_the_formula(folder: Path) -> None:
    """A layer that is fed token by token, against plain Python lists."""
    model = models.shared("llama", OURS)
    cache = make(folder, model, budget=16, attention_mask=torch.ones(2, 40))
    layer, maps = cache.layers[1], cache.disposal.kernels.layers[1]
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, 40, 8, generator=generator)
    scaling, folded_counts = 0.3, []
    for at in range(40):
        query = torch.randn(2, 4, 1, 8, generator=generator)
        states = cache.update(keys[:, :, at : at + 1], values[:, :, at : at + 1], 1)
        forget_handover([layer])
        queries = Queries(query, states[0], Logits(scaling))
        beside = layer.extra_attention(queries, states[1])
        parts = [read(query, Part(*states), queries.logits), *(beside.parts if beside else ())]
        output = join(parts, queries.logits)
        layer.attended(queries)
        for row in range(2):
            for head in range(4):
                in_cache = set(layer.positions[row, head // 2].tolist())
                tokens = [(keys[row, head // 2, t].tolist(), values[row, head // 2, t].tolist()) for t in range(at + 1)]
                held, folded = (
                    [token for t, token in enumerate(tokens) if (t in in_cache) is which] for which in (True, False)
                )
                expected = slow_attention(query[row, head, 0].tolist(), held, folded, maps, head, scaling)
                assert output[row, head, 0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
                folded_counts.append(len(folded))
    assert max(folded_counts) == 24


WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"heads": "separate"},
    "observed": {"policy": "h2o"},
    "recording": {"record_past": True, "policy": "paged_eviction", "budget": 16},
    "ratio": {"budget": "50%"},
}
CASES = [
    ("shared", "beam", True),
    ("separate", "direct", True),
    ("observed", "three_turns", False),
    ("recording", "chunked_prefill", True),
    ("shared", "prompt_lookup", True),
    ("ratio", "return_sequences", True),
]


@pytest.mark.parametrize(("way", "mode", "padded"), CASES)
def test_exact(folder: Path, way: str, mode: str, padded: bool) -> None:
    """Every token is held or folded, never both, never neither: logits are those of plain attention that says so."""
    model = models.shared("llama", OURS)
    cache = make(folder, model, **{**WAYS[way]})
    with Recorder(model, cache, poison=way != "observed") as recorder:
        modes.run(model, cache, mode, *modes.batch(mode, padded))
    assert cache.stats().evicted_tokens > 0
    with folding(model, recorder, cache.disposal.kernels):
        assert_exact(model, recorder)
    with pytest.raises(AssertionError, match="logits differ"):  # it is not that nothing was read in the state
        assert_exact(model, recorder, 1e-3)


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "gpt_oss"])
def test_families(folder: Path, family: str) -> None:
    """Soft-capping, sinks, sliding windows beside."""
    if reason := models.unavailable(family):
        pytest.skip(reason)
    model = models.shared(family, OURS)
    cache = make(folder, model)
    with Recorder(model, cache) as recorder:
        modes.run(model, cache, "direct", *modes.batch("direct", True))
    assert cache.stats().evicted_tokens > 0
    with folding(model, recorder, cache.disposal.kernels):
        assert_exact(model, recorder)


# ---- the state -------------------------------------------------------------------------------------------------------


def feed(model: Any, cache: Any, ids: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    mask = torch.ones_like(ids)
    return torch.cat([modes.forward(model, cache, ids, mask, *span)[:, -1:] for span in spans], dim=1)


def test_bytes_are_constant_and_reported(folder: Path) -> None:
    """3 features of 8 numbers and a mass, of 2 KV heads and 2 rows, 4 bytes each, in 2 layers."""
    model = models.shared("llama", OURS)
    cache = make(folder, model)
    ids, sizes = torch.stack(models.prompts([120, 120], seed=3)), set()
    for span in [(0, 10), (10, 60), *((at, at + 1) for at in range(60, 90)), (90, 120)]:
        feed(model, cache, ids, [span])
        sizes.add(cache.stats().summary_bytes)
    assert sizes == {2 * 2 * 2 * 3 * (8 + 1) * 4}
    assert cache.stats().evicted_tokens == 2 * 2 * (120 - 24)
    cache.reset()
    assert cache.stats().summary_bytes == 0


def test_what_was_folded_cannot_be_taken_back(folder: Path) -> None:
    model = models.shared("llama", OURS)
    ids = torch.stack(models.prompts([60], seed=3))
    cache = make(folder, model)
    feed(model, cache, ids, [(0, 50)])
    before = [copy.deepcopy(layer.action.state) for _, layer in cache.paged_layers]
    with pytest.raises(ValueError, match=r"45.*evicted"):
        cache.crop(-45)
    cache.crop(-2)  # these are held; the state is of earlier tokens
    for (_, layer), state in zip(cache.paged_layers, before, strict=True):
        assert torch.equal(layer.action.state.values, state.values)
    waiting = make(folder, model, record_past=True)
    logits = feed(model, waiting, ids, [(0, 50), (50, 58)])
    waiting.crop(-8)
    assert torch.equal(feed(model, waiting, ids, [(50, 58)]), logits[:, -1:])
    cache.crop(-cache.get_seq_length())
    fresh = make(folder, model)
    assert torch.equal(feed(model, cache, ids, [(0, 50), (50, 51)]), feed(model, fresh, ids, [(0, 50), (50, 51)]))


def test_copies_share_nothing(folder: Path) -> None:
    model = models.shared("llama", OURS)
    ids = torch.stack(models.prompts([60], seed=3))
    cache = make(folder, model)
    feed(model, cache, ids, [(0, 40)])
    twin = copy.deepcopy(cache)
    before = twin.layers[0].action.state.mass.clone()
    feed(model, cache, ids, [(40, 60)])
    assert torch.equal(twin.layers[0].action.state.mass, before)
    assert not torch.equal(cache.layers[0].action.state.mass, before)
    assert twin.layers[0].action.kernels is cache.disposal.kernels


def test_half_precision(folder: Path) -> None:
    model = models.build("llama", OURS).to(torch.bfloat16)
    cache = make(folder, model)
    ids = torch.stack(models.prompts([60], seed=3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = feed(model, cache, ids, [(0, 40), *((at, at + 1) for at in range(40, 60))])
    assert logits.isfinite().all()
    assert cache.layers[0].action.state.values.dtype == torch.float32


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_saved_context_goes_on(folder: Path, tmp_path: Path) -> None:
    model = models.shared("llama", OURS)
    ids = torch.stack(models.prompts([60, 60], seed=3))
    cache = make(folder, model)
    feed(model, cache, ids, [(0, 40)])
    cache.save(tmp_path / "context.safetensors")
    twin = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    spans = [(at, at + 1) for at in range(40, 60)]
    assert torch.equal(feed(model, cache, ids, spans), feed(model, twin, ids, spans))


def test_a_context_of_other_kernels_is_refused(tmp_path: Path) -> None:
    model = models.shared("llama", OURS)
    path = Path(make_disposal(saved_kernels(tmp_path, model.config)).file)
    cache = models.paged(model.config, **SMALL, disposal=f"fold(file={str(path)!r})")
    feed(model, cache, torch.stack(models.prompts([40], seed=3)), [(0, 40)])
    cache.save(tmp_path / "context.safetensors")
    path.unlink()
    with pytest.raises(ValueError, match="no such file"):
        PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
    save_kernels(random_kernels(model.config, seed=1), path)
    with pytest.raises(ValueError, match=r"kernels is .* in the file"):
        PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy": "recency"}, r"'keydiff' lets go.*policy='keydiff'.*fit-fold"),
        ({"allocator": "pyramid"}, "allocator='uniform'"),
        ({"budget": "1MiB"}, r"bytes.*budget"),
        ({"positions": "cache"}, "positions='text'"),
    ],
)
def test_what_does_not_go_together(folder: Path, settings: dict[str, Any], reason: str) -> None:
    model = models.shared("llama", OURS)
    with pytest.raises(ValueError, match=reason):
        models.paged(model.config, **{**SMALL, **settings}, disposal=saved_kernels(folder, model.config))


def test_other_models_are_refused(folder: Path) -> None:
    model = models.shared("llama", OURS)
    disposal = saved_kernels(folder, model.config)
    other = models.build("qwen2", OURS)
    with pytest.raises(ValueError, match="model_type qwen2"):
        models.paged(other.config, **SMALL, disposal=disposal)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        models.paged(models.shared("llama").config, **SMALL, disposal=disposal)
    kernels = make_disposal(disposal).kernels
    path = folder / "one_layer.safetensors"
    save_kernels(Kernels({0: kernels.layers[0]}, kernels.model, policy=kernels.policy), path)
    with pytest.raises(ValueError, match=r"layers \[0\].*layer 1"):
        models.paged(model.config, **SMALL, disposal=f"fold(file={str(path)!r})")
    narrow = random_kernels(models.family_config("llama", head_dim=4))
    save_kernels(Kernels(narrow.layers, kernels.model, policy=kernels.policy), path)
    cache = models.paged(model.config, **SMALL, disposal=f"fold(file={str(path)!r})")
    with pytest.raises(ValueError, match=r"2.*4 dimensions"):
        feed(model, cache, torch.stack(models.prompts([5])), [(0, 5)])


def test_models_with_other_caches_are_refused(folder: Path) -> None:
    for family, reason in (("deepseek_v3", "caches latents"), ("gemma3n", "share keys and values")):
        if models.unavailable(family) or (family == "deepseek_v3" and not models.caches_latents()):
            continue
        model = models.shared(family, OURS)
        with pytest.raises(ValueError, match=reason):
            models.paged(model.config, **SMALL, disposal=saved_kernels(folder, models.family_config("llama")))


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    config = models.family_config("llama")
    kernels = random_kernels(config)
    path = tmp_path / "k.safetensors"
    save_kernels(kernels, path)
    read = load_kernels(path)
    assert (read.model, read.policy) == (kernels.model, kernels.policy) and len(read.digest) == 64
    for index, layer in kernels.layers.items():
        assert all(torch.equal(tensor, getattr(read.layers[index], name)) for name, tensor in layer.tensors().items())
    fold = make_disposal(f" fold( file = {str(path)!r} ) ")
    assert fold == Fold(str(path)) == make_disposal(fold.label)
    assert fold.label == f"fold(file={str(path)!r})"


def test_files_that_are_none() -> None:
    for text, reason in (("fold(file=nothing)", "fit-fold"), ("fold", "required argument: 'file'")):
        with pytest.raises(ValueError, match=reason):
            make_disposal(text)


def test_a_process_takes_its_heads() -> None:
    """Tensor parallelism: KV head 1 and its query heads."""
    layer = random_kernels(models.family_config("llama")).layers[0]
    part = layer.of_heads(1, 1).to(torch.device("cpu"))
    keys, queries = torch.randn(1, 2, 5, 8), torch.randn(1, 4, 5, 8)
    assert torch.allclose(part.of_keys(keys[:, 1:]), layer.of_keys(keys)[:, 1:])
    assert torch.allclose(part.of_queries(queries[:, 2:]), layer.of_queries(queries)[:, 2:])
