"""A forward that fails in the middle leaves layers that have seen different numbers of tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

TEXT = torch.stack(models.prompts([40]))
OURS = "paged_eviction"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "observing": {"policy": "h2o"},
    "recording": {"record_past": True},
    "static": {"static": True},
    "sharing out": {"allocator": "cake"},
}


def forward(model: Any, cache: Any, start: int, stop: int) -> Tensor:
    """Without a mask, so that nothing else tells how many tokens were seen."""
    with torch.no_grad():
        return model(TEXT[:, start:stop], **{CACHE_ARGUMENT: cache}).logits


def fail(model: Any, cache: Any, start: int, stop: int) -> None:
    """Run out of memory between the two layers."""

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("as if")

    hook = model.model.layers[1].register_forward_pre_hook(out_of_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            forward(model, cache, start, stop)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("way", "stop"), [(way, stop) for way in WAYS for stop in (25, 31) if way + str(stop) != "static25"]
)
def test_the_next_forward_is_refused(way: str, stop: int) -> None:
    model = models.shared("llama", OURS)
    cache = models.paged(model.config, budget=16, block_size=4, **WAYS[way])
    forward(model, cache, 0, 24)
    fail(model, cache, 24, stop)
    with pytest.raises(RuntimeError, match=rf"{stop}.*24"):
        forward(model, cache, 24, stop)
    cache.reset()
    fresh = models.paged(model.config, budget=16, block_size=4, **WAYS[way])
    for span in ((0, 24), (24, 25), (25, 31)):
        assert torch.equal(forward(model, cache, *span), forward(model, fresh, *span))


def test_a_sliding_layer_that_is_ahead() -> None:
    model = models.shared("gemma3")
    cache = models.paged(model.config, budget=16, block_size=4)
    forward(model, cache, 0, 24)
    fail(model, cache, 24, 25)
    with pytest.raises(RuntimeError, match=r"25.*last.*24"):
        forward(model, cache, 24, 25)


@pytest.mark.parametrize("count", [1, 24])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [1, 5])
def test_a_model_with_another_number_of_layers(layers: int, way: str, count: int) -> None:
    """At once, before it has read anything."""
    model = models.build("llama", OURS, num_hidden_layers=layers)
    own = models.shared("llama", OURS)
    cache = models.paged(own.config, budget=16, block_size=4, **WAYS[way])
    with pytest.raises(ValueError, match=f"a model of {own.config.num_hidden_layers} layers.*has {layers}"):
        forward(model, cache, 0, count)
    assert cache.get_seq_length() == 0
    cache.reset()
    assert forward(own, cache, 0, count).shape[1] == count


def test_layers_that_never_take_anything_in() -> None:
    """Of a model that does not name its layers; both causes are said."""
    model = models.build("llama")
    model.model.layers = model.model.layers[:1]
    cache = models.paged(model.config, budget=16, block_size=4)
    forward(model, cache, 0, 24)
    with pytest.raises(RuntimeError, match="fewer layers"):
        forward(model, cache, 24, 25)
