"""The parts of the benchmark: steps, rounds, bytes, largest batches, verdicts."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval.bench.decoder import Decoder, fill, layer_shapes
from hf_paged_eviction_eval.bench.rows import interleaved, ratio
from hf_paged_eviction_eval.bench.settings import BenchSettings
from hf_paged_eviction_eval.bench.shapes import SHAPES, config_of
from hf_paged_eviction_eval.bench.steps import state_bytes, weight_bytes
from hf_paged_eviction_eval.bench.variants import FLOORS, VARIANTS, make_cache

ROWS = 2


@pytest.fixture(scope="module")
def small() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["full", "paged", "paged_static", "paged_static_own", "full_compiled"])
def test_a_step_is_that_of_generate(small: Any, name: str) -> None:
    settings = BenchSettings(block_size=4, steps=8)
    prompt = torch.randint(0, 97, (ROWS, 40), generator=torch.Generator().manual_seed(1))
    held = make_cache(name, small, settings, 24, ROWS, 39)
    with torch.no_grad(), held.around():
        cache = make_cache(name, small, settings, 24, ROWS, 39).cache
        expected = small.generate(
            prompt, **{CACHE_ARGUMENT: cache}, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
        )
        # As generate's own prefill, which reads all of the prompt: its last token comes from there.
        logits = small(prompt, attention_mask=torch.ones_like(prompt), **{CACHE_ARGUMENT: held.cache}).logits
    held.seen = 40
    decoder = Decoder(small, small.forward, held, ROWS)
    decoder.seen, decoder.token = 40, logits[:, -1].argmax(-1, keepdim=True)
    assert torch.equal(decoder.token, expected[:, 40:41])
    decoder.run(7)
    assert torch.equal(decoder.token, expected[:, -1:])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_timing_starts_alike(small: Any, name: str) -> None:
    settings = BenchSettings(block_size=8, steps=8)
    held = make_cache(name, small, settings, 48, ROWS, None if name in FLOORS else 64)
    fill(held.cache, layer_shapes(small), ROWS, held.filled, small)
    decoder = Decoder(small, small.forward, held, ROWS)
    for number in range(1, 4):
        assert decoder.run(8) > 0
        seen = held.seen + (8 if held.rewinds else 8 * number)
        assert decoder.seen == seen and int(held.cache.get_seq_length()) == seen


def test_rounds_are_interleaved_and_go_on_without_what_fails() -> None:
    calls: list[str] = []
    failures: list[tuple[str, str]] = []

    def run(name: str, fail_at: int = 99) -> Any:
        def once() -> float:
            calls.append(name)
            if calls.count(name) == fail_at:
                raise ValueError("enough")
            return float(len(calls))

        return once

    ticks: list[None] = []
    times = interleaved(
        {"a": run("a"), "b": run("b", 2), "c": run("c")},
        3,
        lambda name, error: failures.append((name, str(error))),
        lambda: ticks.append(None),
    )
    assert "".join(calls) == "abcabcac" and len(ticks) == 9
    assert failures == [("b", "enough")] and set(times) == {"a", "c"}
    assert ratio([1.0, 10.0, 3.0], [2.0, 10.0, 1.0]) == 1.0


def test_bytes_of_the_weights(small: Any) -> None:
    table, every = 97 * 32 * 4, sum(weight.numel() for weight in small.parameters()) * 4
    assert weight_bytes(small, 3) == every - table + 3 * 32 * 4
    tied = LlamaForCausalLM(LlamaConfig(**{**small.config.to_dict(), "tie_word_embeddings": True}))
    assert weight_bytes(tied, 3) == every - table


def test_bytes_of_the_state(small: Any) -> None:
    token = ROWS * 2 * 2 * 2 * 8 * 4  # rows, layers, keys and values, KV heads, width, float32
    shapes = layer_shapes(small)
    mask = torch.ones(ROWS, 32, dtype=torch.long)
    for cache, held in (
        (DynamicCache(config=small.config), 32),
        (StaticCache(config=small.config, max_cache_len=50), 50),
        (PagedEvictionCache(small.config, budget=64, attention_mask=mask), 32),
        (PagedEvictionCache(small.config, budget=64, attention_mask=mask, static=True), 64),
    ):
        fill(cache, shapes, ROWS, 32, small)
        assert state_bytes(cache) == held * token


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("100m", 99_106_560),
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_shapes_have_the_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(name))
    model.tie_weights()
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert name in SHAPES
