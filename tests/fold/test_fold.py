"""Fold: what leaves is in the state, once, and attention reads it beside what is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slow_fold import folding, saved_kernels, slow_attention

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.queries.attention import forget_handover
from hf_paged_eviction.queries.observer import Queries
from hf_paged_eviction.queries.parts import Part, join, read
from hf_paged_eviction.queries.weights import Logits
from reference import Recorder, assert_exact

OURS = "paged_eviction"
SMALL: dict[str, Any] = {"budget": 24, "block_size": 4, "policy": "keydiff"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def make(folder: Path, model: Any, **settings: Any) -> PagedEvictionCache:
    settings = {**SMALL, **settings}
    return PagedEvictionCache(
        model.config, **settings, disposal=saved_kernels(folder, model.config, settings["policy"])
    )


# ---- the formula -----------------------------------------------------------------------------------------------------


def test_the_formula(folder: Path) -> None:
    """A layer that is fed token by token, against plain Python lists."""
    model = models.shared("llama", OURS)
    cache = make(folder, model, budget=16, attention_mask=torch.ones(2, 40))
    layer, maps = cache.layers[1], cache.disposal.kernels.layers[1]
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, 40, 8, generator=generator)
    scaling, told = 0.3, []
    for at in range(40):
        query = torch.randn(2, 4, 1, 8, generator=generator)
        given = cache.update(keys[:, :, at : at + 1], values[:, :, at : at + 1], 1)
        forget_handover([layer])
        queries = Queries(query, given[0], Logits(scaling))
        beside = layer.beside(queries, given[1])
        parts = [read(query, Part(*given), queries.logits), *(beside or ())]
        output = join(parts, queries.logits)
        layer.attended(queries)
        for row in range(2):
            for head in range(4):
                held = set(layer.positions[row, head // 2].tolist())
                tokens = [(keys[row, head // 2, t].tolist(), values[row, head // 2, t].tolist()) for t in range(at + 1)]
                kept, gone = (
                    [token for t, token in enumerate(tokens) if (t in held) is which] for which in (True, False)
                )
                expected = slow_attention(query[row, head, 0].tolist(), kept, gone, maps, head, scaling)
                assert output[row, head, 0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
                told.append(len(gone))
    assert max(told) == 24


WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"heads": "separate"},
    "observed": {"policy": "h2o"},
    "recording": {"record_past": True, "policy": "paged_eviction", "budget": 16},
    "ratio": {"budget": None, "keep_ratio": 0.5},
}
MODES = ("beam", "chunked_prefill", "three_turns", "direct", "assisted", "return_sequences")
#: Every way meets every second mode, full and padded by turns.
CASES = [
    (way, mode, (row + column) % 4 < 2)
    for row, way in enumerate(WAYS)
    for column, mode in enumerate(MODES)
    if (row + column) % 2 == 0
]


@pytest.mark.parametrize(("way", "mode", "padded"), CASES)
def test_exact(folder: Path, way: str, mode: str, padded: bool) -> None:
    """Every token is held or folded, never both, never neither: logits are those of plain attention that says so."""
    model = models.shared("llama", OURS)
    recording = models.NEEDS_RECORDING_FLAG and mode in modes.SPECULATIVE
    cache = make(folder, model, **{"record_past": recording, **WAYS[way]})
    with Recorder(model, cache, poison=way != "observed") as recorder:
        modes.run(model, cache, mode, *modes.batch(mode, padded))
    assert cache.stats().evicted_tokens > 0
    with folding(model, recorder, cache.disposal.kernels):
        assert_exact(model, recorder, 3e-5)
    with pytest.raises(AssertionError, match="logits differ"):  # it is not that nothing was read in the state
        assert_exact(model, recorder, 1e-3)


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "gpt_oss", "gpt_neox", "qwen3"])
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
        assert_exact(model, recorder, 5e-5)
