"""What a layer hands over to attention is picked up by the very call that got it, or by none."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

import models
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

OURS = "paged_eviction"
TEXT, MASK = models.left_pad(models.prompts([40, 33], seed=1))
CASES = [
    ("deepseek_v3", {"policy": "keydiff", "allocator": "d2o", "heads": "separate"}),
    ("deepseek_v3", {"policy": "keydiff", "allocator": "d2o"}),
    ("deepseek_v3", {"policy": "h2o"}),
    ("llama", {"policy": "keydiff", "allocator": "d2o", "heads": "separate"}),
]
#: The next call of the model, by what it is given beside the ids.
NEXT: dict[str, Any] = {
    "no cache": lambda model: {"use_cache": False},
    "another cache": lambda model: {CACHE_ARGUMENT: DynamicCache(config=model.config)},
    "a cache by itself": lambda model: {},
}


def forward(model: Any, start: int, stop: int, mask: Tensor, **options: Any) -> Tensor:
    """The second row is padded."""
    where = models.positions_of(MASK)[:, start:stop]
    with torch.no_grad():
        return model(TEXT[:, start:stop], attention_mask=mask, position_ids=where, **options).logits


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("as if")


@contextmanager
def failing(model: Any) -> Iterator[None]:
    """Out of memory after `update`, before attention: latents are expanded, or attention itself fails."""
    projection = getattr(model.model.layers[0].self_attn, "kv_b_proj", None)
    with pytest.MonkeyPatch.context() as patch:
        if projection is None:
            patch.setitem(AttentionInterface._global_mapping, OURS, out_of_memory)
            yield
        else:
            hook = projection.register_forward_pre_hook(out_of_memory)
            yield
            hook.remove()


def failed(model: Any, cache: Any, start: int, stop: int) -> BaseException:
    """The error, which keeps the frames of the forward alive, as a notebook or a handler of errors does."""
    with failing(model), pytest.raises(torch.OutOfMemoryError) as error:
        forward(model, start, stop, MASK[:, :stop], **{CACHE_ARGUMENT: cache})
    return error.value


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("follows", NEXT)
@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_nothing_leaks(family: str, settings: dict[str, Any], follows: str, count: int, padded: bool) -> None:
    """The next call has the same shapes, and is made where the error is still at hand."""
    model = models.shared(family, OURS)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
    forward(model, 0, 30, MASK[:, :30], **{CACHE_ARGUMENT: cache})
    error = failed(model, cache, 30, 30 + count)
    held = 24 + count if count > 1 else 24  # as many keys as were handed over
    mask = MASK[:, -held:] if padded else torch.ones(2, held, dtype=torch.long)
    arguments = {CACHE_ARGUMENT: DynamicCache(config=model.config)} if follows == "another cache" else {}
    logits = forward(model, 40 - held, 40, mask, **NEXT[follows](model))
    del error, arguments
    model.set_attn_implementation("sdpa")
    try:
        expected = forward(model, 40 - held, 40, mask, use_cache=False)
    finally:
        model.set_attn_implementation(OURS)
    assert torch.equal(logits[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize(("family", "settings"), CASES[:3], ids=str)
def test_a_mask_of_the_callers_own(family: str, settings: dict[str, Any]) -> None:
    """transformers builds none then, so nothing is forgotten when the next forward begins."""
    model = models.shared(family, OURS)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, **settings)
    forward(model, 0, 30, MASK[:, :30], **{CACHE_ARGUMENT: cache})
    error = failed(model, cache, 30, 31)
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    logits = [forward(model, 0, 24, mask, use_cache=False) for _ in range(2)]
    assert torch.equal(*logits) and isinstance(error, torch.OutOfMemoryError)


def test_what_was_handed_over_is_not_kept() -> None:
    model = models.shared("deepseek_v3", OURS)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="h2o")
    with failing(model), pytest.raises(torch.OutOfMemoryError):
        forward(model, 0, 30, MASK[:, :30], **{CACHE_ARGUMENT: cache})
    layer = weakref.ref(cache.layers[0])
    del cache
    gc.collect()
    assert layer() is None


def test_a_reset_in_another_thread() -> None:
    """The thread that failed goes on with a cache that begins anew."""
    model = models.shared("llama", OURS)
    cache = PagedEvictionCache(model.config, budget=24, block_size=4, policy="h2o")
    error = failed(model, cache, 0, 30)
    other = threading.Thread(target=cache.reset)
    other.start()
    other.join()
    fresh = PagedEvictionCache(model.config, budget=24, block_size=4, policy="h2o")
    logits = [forward(model, 0, 30, MASK[:, :30], **{CACHE_ARGUMENT: one}) for one in (cache, fresh)]
    assert torch.equal(*logits) and error.args
