"""`torch.compile(model.forward)` and a cache of any kind: what the cache does stays outside of the graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.tensors.graphs import warn_of_leaving

#: Attention, lengths of the prompts, options; each compiles dozens of frames, for seconds.
WAYS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "filling, then binding": ("sdpa", [9, 6], {}),
    "few bits": ("sdpa", [24], {"bits": 4}),
    "observing, unequal": ("paged_eviction", [24, 17], {"policy": "h2o", "allocator": "heads:[[0.6, 1.4]]"}),
}


pytestmark = pytest.mark.filterwarnings("ignore:The model is compiled, but")


def two_turns(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    for turn in range(2):
        with torch.no_grad():
            ids = model.generate(
                ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=4, do_sample=False, pad_token_id=0
            )
        more = torch.full((ids.shape[0], 3), 5 + turn)
        ids = torch.cat([ids, more], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return ids


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "observing, unequal" else pytest.mark.all_cases) for way in WAYS]
)
def test_as_without_compilation(way: str) -> None:
    """A row alone, and a batch with pads on the left."""
    attention, lengths, settings = WAYS[way]
    model = models.build("llama", attention, num_hidden_layers=1)
    ids, mask = models.left_pad(models.prompts(lengths))

    plain, cache = (models.paged(model.config, **{"budget": 16, "block_size": 4, **settings}) for _ in range(2))
    expected = two_turns(model, plain, ids, mask)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        assert torch.equal(two_turns(model, cache, ids, mask), expected)
    finally:
        torch._dynamo.reset()
    assert cache.stats().evicted_tokens > 0
    for layer, own in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(layer.positions, own.positions)


def test_a_whole_graph_needs_a_static_cache() -> None:
    """The error says so, where torch tells reasons."""
    model = models.shared("llama")
    cache = models.paged(model.config, budget=64)
    ids = torch.stack(models.prompts([20]))
    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    try:
        with torch.no_grad(), pytest.raises(Exception, match="disable") as refused:
            forward(ids, **{CACHE_ARGUMENT: cache})
    finally:
        torch._dynamo.reset()
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9):
        assert "fullgraph=True needs PagedEvictionCache(..., static=True)" in str(refused.value)


def compilations(attention: str, layers: int, kind: str) -> tuple[int, int]:
    """Frames and graphs of three answers, after prompts of several lengths with pads."""
    model = models.build("llama", attention, num_hidden_layers=layers)

    def make() -> Any:
        if kind == "dynamic":
            return DynamicCache(config=model.config)
        return models.paged(model.config, budget=16, block_size=4, policy="keydiff", static=kind == "static")

    def answer(lengths: list[int]) -> Tensor:
        ids, mask = models.left_pad(models.prompts(lengths))
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        with torch.no_grad():
            return model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: make()}, **how)

    texts = [20, 14], [9, 9], [25, 11]
    expected = [answer(lengths) for lengths in texts]
    torch._dynamo.reset()
    counters.clear()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        for lengths, wanted in zip(texts, expected, strict=True):
            assert torch.equal(answer(lengths), wanted)
        return int(counters["frames"]["total"]), int(counters["stats"]["unique_graphs"])
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("attention", "kind"),
    [
        ("sdpa", "ours"),
        pytest.param("paged_eviction", "ours", marks=pytest.mark.all_cases),
        pytest.param("paged_eviction", "dynamic", marks=pytest.mark.all_cases),
    ],
)
def test_no_more_graphs_than_with_a_dynamic_cache(attention: str, kind: str) -> None:
    """However many layers there are: nothing between two updates is compiled by itself."""
    of_one_layer = compilations(attention, 1, kind)
    frames, graphs = compilations(attention, 2, kind)
    assert frames <= of_one_layer[0] and graphs <= compilations("sdpa", 2, "dynamic")[1]


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("paged_eviction", marks=pytest.mark.all_cases)])
def test_a_static_cache_reads_prompts_outside(attention: str) -> None:
    """Prompts are not compiled layer by layer; steps are."""
    of_one_layer = compilations(attention, 1, "static")
    assert compilations(attention, 2, "static") <= of_one_layer


def test_a_model_that_is_compiled_in_vain() -> None:
    """A warning says so, and what to use instead."""
    model = models.build("llama", num_hidden_layers=1)
    ids = torch.stack(models.prompts([9]))
    warn_of_leaving.cache_clear()
    forward = torch.compile(model.forward, backend="eager")
    try:
        with torch.no_grad(), pytest.warns(UserWarning, match="static=True"):
            forward(ids, **{CACHE_ARGUMENT: models.paged(model.config, budget=64, policy="keydiff")})
    finally:
        torch._dynamo.reset()
