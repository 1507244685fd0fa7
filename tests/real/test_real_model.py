"""The promises on a real model, with sinks, outlying channels, a real tokenizer and a window of 8,192: SmolLM2-135M.

`make test-real` fetches it; or name a folder in PAGED_EVICTION_REAL_MODEL.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache, verify
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction.integration.feeding import feed

pytest.importorskip("pydantic", reason="the extra `eval` is not installed")


from hf_paged_eviction_eval.data import texts
from hf_paged_eviction_eval.models import loading as models
from hf_paged_eviction_eval.options.settings import TaskSettings

FILE = os.environ.get(
    "PAGED_EVICTION_REAL_MODEL",
    str(Path(__file__).parents[2] / "results" / "models" / "SmolLM2-135M-Instruct.Q4_1"),
)
pytestmark = [pytest.mark.real, pytest.mark.skipif(not Path(FILE).exists(), reason=f"no model at {FILE}: make real")]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return models.load(TaskSettings(policies=(), budgets=("full",), tasks=("passkey",), model=FILE))


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[0]


@pytest.fixture(scope="module")
def ids(loaded: tuple[Any, Any]) -> torch.Tensor:
    """Real text, `[1, 8300]`."""
    tokens: list[int] = []
    for text in texts.read_texts(()):
        tokens += loaded[1](text.content).input_ids
        if len(tokens) >= 8300:
            break
    return torch.tensor([tokens[:8300]])


@contextmanager
def precision(model: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The same model, for a while in another precision as loading with `dtype=` makes it: buffers stay in float32."""
    before = {name: weight.data for name, weight in model.named_parameters()}
    try:
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)
        yield model
    finally:
        for name, weight in model.named_parameters():
            weight.data = before[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify(model: Any, dtype: torch.dtype) -> None:
    with precision(model, dtype):
        report = verify(model)
    assert report.ok and report.of("exact"), str(report)
    assert any("in float32, too" in note for note in report.notes) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_room_for_all_it_is_the_full_cache(model: Any, ids: torch.Tensor, dtype: torch.dtype) -> None:
    """A left-padded batch of two texts, prefill and 24 steps, token by token."""
    prompts = torch.stack([ids[0, :200], torch.cat([ids[0, :1].expand(70), ids[0, 300:430]])])
    mask = torch.ones_like(prompts)
    mask[1, :70] = 0
    with precision(model, dtype):
        caches = (DynamicCache(config=model.config), PagedEvictionCache(model.config, budget=256, policy="keydiff"))
        full, ours = (
            model.generate(
                prompts,
                attention_mask=mask,
                **{CACHE_ARGUMENT: cache},
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=-1,
            )
            for cache in caches
        )
    assert full.shape[1] == 224 and torch.equal(full, ours)


def test_far_into_the_window_attention_is_exact_over_what_is_held(model: Any, ids: torch.Tensor) -> None:
    """8,128 tokens in chunks of 508 with a budget of 1,024; then a chunk, against a plain cache of the tokens held."""
    cache = PagedEvictionCache(model.config, budget=1024, policy="key_norm")
    with torch.inference_mode():
        for start in range(0, 8128, 508):
            positions = torch.arange(start, start + 508)[None]
            feed(model, ids[:, start : start + 508], None, cache, positions=positions)
        assert {layer.keys.shape[-2] for layer in cache.layers} == {1024}
        plain = DynamicCache(config=model.config)
        for index, layer in enumerate(cache.layers):
            plain.update(layer.keys.clone(), layer.values.clone(), index)
        positions = torch.arange(8128, 8192)[None]
        following = ids[:, 8128:8192]
        ours = feed(model, following, None, cache, positions=positions, keep=0)
        expected = feed(model, following, None, plain, positions=positions, keep=0)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)
    assert ours.std() > 1


def test_a_saved_context_goes_on(model: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    cache = PagedEvictionCache(model.config, budget=128, policy="keydiff")
    with torch.inference_mode():
        feed(model, ids[:, :600], torch.ones(1, 600), cache)
        cache.save(tmp_path / "context.safetensors")
        again = PagedEvictionCache.load(tmp_path / "context.safetensors", model.config)
        mask = torch.ones(1, 620)
        ours, loaded = (feed(model, ids[:, 600:620], mask, one, keep=0) for one in (cache, again))
    assert torch.equal(ours, loaded)
