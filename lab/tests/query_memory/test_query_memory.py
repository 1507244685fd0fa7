"""A query memory in models: encoders and prefix models, and what is refused."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DynamicCache,
    T5Config,
    T5ForConditionalGeneration,
)

import models
from closeness import assert_close
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_lab.query_memory import memory as recipe
from hf_paged_eviction_lab.query_memory import query_memory

LONG = {"queries": 63, "keys": 64, "chunk": 5}


@cache
def bart() -> Any:
    config = BartConfig(
        vocab_size=models.VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
    )
    return models.randomise(BartForConditionalGeneration(config), seed=0)


def padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    ids, mask = models.left_pad(models.prompts(lengths, seed=2))
    return ids.flip(1), mask.flip(1)  # encoders are padded on the right


@torch.no_grad()
def encode(ids: Tensor, mask: Tensor | None = None, **memory: Any) -> Tensor:
    if not memory:
        return bart().get_encoder()(ids, attention_mask=mask).last_hidden_state
    with query_memory(bart(), **memory):
        return bart().get_encoder()(ids, attention_mask=mask).last_hidden_state


def test_long_memories_change_nothing() -> None:
    ids, mask = padded([40, 23, 7])
    encoded, expected = encode(ids, mask, **LONG), encode(ids, mask)
    assert_close(encoded[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("evict", ["fifo", "lra", "lfa"])
def test_a_row_does_not_depend_on_its_batch(evict: str) -> None:
    memory = {"queries": 4, "keys": 11, "chunk": 6, "evict": evict}
    ids, mask = padded([40, 23, 7])
    together = encode(ids, mask, **memory)
    assert (together - encode(ids, mask))[mask.bool()].abs().max() > 0.1, "nothing was left out"
    for row, length in enumerate([40, 23, 7]):
        own = encode(ids[row : row + 1, :length], **memory)
        assert_close(together[row, :length], own[0])


def test_a_window_is_a_window() -> None:
    """One token at a time, the oldest leaving: attention from `keys - queries` tokens before to `queries` after."""
    ids = torch.stack(models.prompts([30]))
    encoded = encode(ids, queries=3, keys=8, chunk=1)
    place = torch.arange(30)
    # The chunk is attended to before anything leaves; those that wait at the end see the same memory.
    stop = (place + 3).clamp_max(29)
    mask = (place <= stop[:, None]) & (place >= (stop - 8)[:, None])
    wide = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "attention_mask": wide}), with_kwargs=True
        )
        for layer in bart().get_encoder().layers
    ]
    expected = encode(ids)
    for hook in hooks:
        hook.remove()
    assert_close(encoded, expected)


def test_the_decoder_and_later_calls_are_as_before() -> None:
    ids, mask = padded([40, 23])
    before = bart().config._attn_implementation
    plain = bart().generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    with query_memory(bart(), **LONG):
        delayed = bart().generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(plain, delayed)
    assert bart().config._attn_implementation == before
    assert torch.equal(bart().generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False), plain)
    assert recipe._active.memory is None


def test_another_thread_encodes_as_always() -> None:
    ids = torch.stack(models.prompts([20, 20]))
    encoded: dict[str, Any] = {"before": encode(ids)}
    with query_memory(bart(), queries=1, keys=4, chunk=2):
        other = threading.Thread(target=lambda: encoded.update(beside=encode(ids)))
        other.start()
        other.join()
        encoded["inside"] = encode(ids)
    assert_close(encoded["beside"], encoded["before"])
    assert (encoded["inside"] - encoded["before"]).abs().max() > 1e-2


def test_additive_masks_are_understood_and_biases_are_not() -> None:
    mask = padded([40, 23])[1]
    memory = {"queries": 4, "keys": 11, "chunk": 6}
    attention = bart().get_encoder().layers[0].self_attn
    query = key = value = torch.randn(2, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    added = torch.where(mask[:, None, None] > 0, 0.0, torch.finfo(torch.float32).min).expand(-1, 1, 40, -1)
    with query_memory(bart(), **memory):
        plain = recipe._attention(attention, query, key, value, (mask[:, None, None] > 0).expand(-1, 1, 40, -1))[0]
        assert torch.equal(recipe._attention(attention, query, key, value, added)[0], plain)
        with pytest.raises(ValueError, match=r"bias.*mask"):
            recipe._attention(attention, query, key, value, added + 0.5)
        with pytest.raises(ValueError, match="sliding_window"):
            recipe._attention(attention, query, key, value, None, sliding_window=(8, 8))
    assert plain.isfinite().all()


def test_an_encoder_alone() -> None:
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = models.randomise(BertModel(config), seed=0)
    ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        plain = model(ids).last_hidden_state
        with query_memory(model, **LONG):
            assert_close(model(ids).last_hidden_state, plain)
        with query_memory(model, queries=2, keys=6, chunk=2):
            assert (model(ids).last_hidden_state - plain).abs().max() > 0.1


# ---- prefix models --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_prefix_is_read_in_both_directions_and_what_follows_is_causal() -> None:
    model = models.build("llama")
    ids, mask = models.left_pad(models.prompts([20, 13], seed=1))
    more = torch.stack(models.prompts([3, 3], seed=4))
    both = (mask[:, None, None, :] > 0).expand(-1, 1, 20, -1)
    positions = models.positions_of(mask)
    expected = DynamicCache(config=model.config)
    wide = torch.where(both, 0.0, torch.finfo(torch.float32).min)
    model(ids, attention_mask=wide, position_ids=positions, **{CACHE_ARGUMENT: expected})
    cache = DynamicCache(config=model.config)
    whole = torch.cat([mask, torch.ones_like(more)], dim=1)
    after = models.positions_of(whole)[:, 20:]
    with query_memory(model, **LONG, prefix=True):
        model(ids, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
        logits = model(more, attention_mask=whole, position_ids=after, **{CACHE_ARGUMENT: cache}).logits
    plain = model(more, attention_mask=whole, position_ids=after, **{CACHE_ARGUMENT: expected}).logits
    for one, other in zip(cache.layers, expected.layers, strict=True):
        for row, length in enumerate([20, 13]):
            assert_close(one.keys[row, :, -length:], other.keys[row, :, -length:])
    assert_close(logits, plain)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": 4, "queries": 4}, r"larger.*queries"),
        ({"chunk": 0}, r"chunk.*1"),
        ({"queries": -1}, r"queries.*0"),
        ({"evict": "random"}, "evict must be"),
        ({"prefix": True}, "prefix=True"),
    ],
)
def test_arguments_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), query_memory(bart(), **{**LONG, **changes}):
        pass
    assert bart().config._attn_implementation == "sdpa"


def test_causal_models_have_nothing_to_wait_for() -> None:
    with pytest.raises(ValueError, match="llama is causal"), query_memory(models.shared("llama"), **LONG):
        pass


def test_attention_with_a_bias_is_refused() -> None:
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.arange(9)[None] + 3
    # Releases before 5.x compute it by code of their own, of which no call is seen.
    with (
        pytest.raises((ValueError, RuntimeError), match=r"position_bias|code"),
        torch.no_grad(),
        query_memory(model, **LONG),
    ):
        model.get_encoder()(ids)
    assert recipe._active.memory is None
