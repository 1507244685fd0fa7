"""Two threads that use one cache by mistake: both are told."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch

import models
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

TEXT = torch.stack(models.prompts([60]))
SETTINGS: dict[str, dict[str, Any]] = {
    "keydiff": {"policy": "keydiff"},
    "recency": {"policy": "recency"},
    "roomy": {"budget": 80},
    "observing": {"policy": "h2o"},
    "sharing out": {"allocator": "pyramid"},
    "recording": {"record_past": True},
    "static": {"static": True},
    "few bits": {"bits": 4},
}


def make(model: Any, settings: dict[str, Any]) -> Any:
    return models.paged(model.config, **{"budget": 16, "block_size": 4, **settings})


def forward(model: Any, cache: Any, start: int, stop: int) -> torch.Tensor:
    with torch.no_grad():
        return model(TEXT[:, start:stop], **{CACHE_ARGUMENT: cache}).logits


class Pair:
    """Two threads that feed one cache a token at a time. The first stops before a layer of its first forward, until
    the second has done its own."""

    def __init__(self, model: Any, cache: Any, layer: int) -> None:
        self.model, self.cache, self.layer = model, cache, model.model.layers[layer]
        self.errors: dict[str, str] = {}
        self._stopped, self._passed, self._gave_up = Event(), Event(), Event()

    def run(self, start: int) -> dict[str, str]:
        """What each was told, from the token `start` on."""
        hook = self.layer.register_forward_pre_hook(self._stop)
        both = [Thread(target=self._feed, args=(start, name)) for name in ("first", "second")]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        hook.remove()
        return self.errors

    def _stop(self, *_: object) -> None:
        if current_thread().name == "first" and not self._stopped.is_set():
            self._stopped.set()
            self._passed.wait(20)

    def _feed(self, start: int, name: str) -> None:
        current_thread().name = name
        if name == "second":
            self._stopped.wait(20)
        try:
            for at in range(start, start + 10):
                forward(self.model, self.cache, at, at + 1)
                if name == "second":
                    self._passed.set()
                    self._gave_up.wait(20)
        except RuntimeError as error:
            self.errors[name] = str(error)
        (self._passed if name == "second" else self._gave_up).set()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("first", [0, 30])
@pytest.mark.parametrize("layer", [0, 1])
def test_both_are_told(settings: dict[str, Any], first: int, layer: int) -> None:
    model = models.shared("llama", "paged_eviction")
    cache = make(model, settings)
    if first:
        forward(model, cache, 0, first)
    messages = Pair(model, cache, layer).run(first)
    assert messages.keys() == {"first", "second"}
    assert all(text.startswith("Another thread uses this cache at the same time") for text in messages.values())
    with pytest.raises(RuntimeError, match=r"thread.*cache"):
        forward(model, cache, 50, 51)
    cache.reset()
    assert torch.equal(forward(model, cache, 0, 20), forward(model, make(model, settings), 0, 20))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_one_after_the_other_is_no_mistake(settings: dict[str, Any]) -> None:
    """Every forward in another thread, and its layers in two."""
    model = models.shared("llama", "paged_eviction")
    cache, alone = make(model, settings), make(model, settings)
    spans = [(0, 30), *((at, at + 1) for at in range(30, 50))]
    for span in spans:
        with ThreadPoolExecutor(1) as pool:
            logits = pool.submit(forward, model, cache, *span).result()
        assert torch.equal(logits, forward(model, alone, *span))


def test_a_copy_for_each_thread() -> None:
    model = models.shared("llama")
    prefix = make(model, {})
    forward(model, prefix, 0, 30)
    with ThreadPoolExecutor(2) as pool:
        logits = list(pool.map(lambda cache: forward(model, cache, 30, 40), [copy.deepcopy(prefix) for _ in range(2)]))
    assert torch.equal(*logits)


def test_layers_in_threads_of_their_own() -> None:
    """As where a model is split into stages."""
    states = torch.randn(2, 1, 2, 40, 8)
    cache, alone = (make(models.shared("llama"), {}) for _ in range(2))
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for at in range(40):
            for layer, pool in enumerate((first, second)):
                new = states[layer][:, :, at : at + 1]
                updated = pool.submit(cache.update, new, new, layer).result()
                assert torch.equal(updated[0], alone.update(new, new, layer)[0])
