"""T5Gemma and T5Gemma 2: the decoder's layers have windows, and what the encoder has read is held whole."""

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

import models
from closeness import assert_close
from hf_paged_eviction import paged_encoder_decoder_cache, verify
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.contract

WINDOW = 8
TEXT = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def build(family: str, attention: str = "eager") -> Any:
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config_class = getattr(transformers, f"{family}Config")
    if family == "T5Gemma2":
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        text = TEXT | {"rope_parameters": {kind: dict(rope) for kind in ("sliding_attention", "full_attention")}}
        encoder = {"text_config": dict(text), "vision_config": dict(IMAGE), "mm_tokens_per_image": 4}
        config = config_class(encoder=encoder, decoder=text, initializer_range=0.3)
    else:
        config = config_class(encoder=dict(TEXT), decoder=dict(TEXT), vocab_size=TEXT["vocab_size"])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).double().eval()
    model.set_attn_implementation(attention)
    return models.randomise(model, 0)


def texts(length: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """What the encoder reads; the second row is padded."""
    return models.left_pad(models.prompts([length, max(length - 3, 1)][:rows], seed=3))


def logits_of(model: Any, cache: Any, length: int, calls: list[tuple[int, int]]) -> torch.Tensor:
    text, mask = texts(length)
    decoder_ids = torch.stack(models.prompts([calls[-1][1]] * 2, seed=5))
    parts = []
    with torch.no_grad():
        encoded = model.get_encoder()(text, attention_mask=mask)
        for start, stop in calls:
            inputs = {
                "encoder_outputs": encoded,
                "attention_mask": mask,
                "decoder_input_ids": decoder_ids[:, start:stop],
            }
            parts.append(model(**inputs, **{CACHE_ARGUMENT: cache}, use_cache=cache is not None).logits)
    return torch.cat(parts, dim=1)


CALLS = {
    "steps": [(at, at + 1) for at in range(20)],
    "chunks": [(0, 5), (5, 12), (12, 13), (13, 20)],
    "one forward": [(0, 20)],
}


@pytest.mark.parametrize("family", ["T5Gemma", "T5Gemma2"])
@pytest.mark.parametrize("attention", ["eager", "paged_eviction"])
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, 20])
def test_all_that_the_encoder_has_read_is_seen(family: str, attention: str, calls: str, length: int) -> None:
    model = build(family, attention)
    whole = logits_of(model, None, length, CALLS["one forward"])
    cache = paged_encoder_decoder_cache(model.config, budget=64)
    assert_close(logits_of(model, cache, length, CALLS[calls]), whole)
    assert [layer.keys.shape[2] for layer in cache.cross_attention_cache.layers] == [length] * 2


@pytest.mark.parametrize("family", ["T5Gemma", "T5Gemma2"])
@pytest.mark.parametrize("settings", [{}, {"policy": "random"}, {"policy": "keydiff", "heads": "separate"}])
def test_both_implementations_evict_alike(family: str, settings: dict[str, Any]) -> None:
    """After an eviction, too, T5Gemma 2 gets the mask that it asks for; its decoder's tokens hold no pads."""
    logits = []
    for attention in ("eager", "paged_eviction"):
        model = build(family, attention)
        cache = paged_encoder_decoder_cache(model.config, budget=12, block_size=4, **settings)
        logits.append(logits_of(model, cache, 20, [(0, 14), *((at, at + 1) for at in range(14, 30))]))
        assert [layer.held for _, layer in cache.self_attention_cache.paged_layers] == [12]
    assert_close(*logits)


@pytest.mark.parametrize(
    "settings", [{"policy": "h2o"}, {"policy": "snapkv(window=4)"}, {"policy": "random", "allocator": "pyramid"}]
)
def test_merged_attention_is_refused_where_it_does_not_fit(settings: dict[str, Any]) -> None:
    """T5Gemma 2 compares its queries with the decoder's and the encoder's keys at once. The first forward refuses."""
    model = build("T5Gemma2", "paged_eviction")
    cache = paged_encoder_decoder_cache(model.config, budget=12, block_size=4, **settings)
    with pytest.raises(ValueError, match="allocator='uniform'"):
        logits_of(model, cache, 20, [(0, 14)])
    assert_close(
        logits_of(model, None, 20, CALLS["one forward"]), logits_of(build("T5Gemma2"), None, 20, CALLS["one forward"])
    )


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("family", ["T5Gemma", "T5Gemma2"])
def test_generate(family: str, mode: dict[str, Any]) -> None:
    model = build(family, "paged_eviction")
    text, mask = texts(20)
    caches = [
        paged_encoder_decoder_cache(model.config, budget=64),
        EncoderDecoderCache(DynamicCache(config=model.config.get_text_config(decoder=True)), DynamicCache()),
    ]
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **mode}
    tokens = [model.generate(text, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **settings) for cache in caches]
    assert tokens[0].tolist() == tokens[1].tolist()


@pytest.mark.parametrize("family", ["T5Gemma", "T5Gemma2"])
def test_verify_blames_nobody(family: str) -> None:
    report = verify(build(family).float(), thorough=False)
    assert report.ok and report.of("exact"), str(report)
    assert "the model fails with DynamicCache" not in str(report)
