"""BART: the decoder's self-attention is paged, the cross-attention is whole."""

from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache

import models
from closeness import assert_close
from hf_paged_eviction import PagedEvictionCache, paged_encoder_decoder_cache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

pytestmark = pytest.mark.contract

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beam": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
}


def bart() -> BartForConditionalGeneration:
    config = BartConfig(
        vocab_size=models.VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=256,
        dropout=0.0,
        eos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=1,
    )
    model = BartForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model = models.randomise(model, 0)
    with torch.no_grad():
        model.model.shared.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def run(model: Any, cache: Any, mode: str, steps: int = 24, rows: int = 3) -> torch.Tensor:
    ids, mask = models.left_pad(models.prompts([20, 12, 5][:rows]))
    torch.manual_seed(0)
    settings = {"do_sample": False, "min_new_tokens": steps, "max_new_tokens": steps, **SETTINGS.get(mode, {})}
    return model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **settings)


@pytest.mark.parametrize("mode", SETTINGS)
def test_roomy_equals_dynamic(mode: str) -> None:
    model = bart()
    ours = run(model, paged_encoder_decoder_cache(model.config, budget=64), mode)
    expected = run(model, EncoderDecoderCache(DynamicCache(), DynamicCache()), mode)
    assert ours.tolist() == expected.tolist()
    assert ours.unique().numel() > 3


def test_prompt_lookup_equals_dynamic() -> None:
    """crop of the pair asks for DynamicCache on both sides."""
    model = bart()
    settings = {
        "prompt_lookup_num_tokens": 3,
        "max_new_tokens": 30,
        "do_sample": False,
        "eos_token_id": models.VOCABULARY,
    }
    ids, mask = models.left_pad(models.prompts([20]))
    caches = [paged_encoder_decoder_cache(model.config, budget=64), EncoderDecoderCache(DynamicCache(), DynamicCache())]
    tokens = [model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **settings) for cache in caches]
    assert tokens[0].tolist() == tokens[1].tolist()


@pytest.mark.parametrize("mode", SETTINGS)
def test_binding_budget_is_kept(mode: str) -> None:
    model = bart()
    cache = paged_encoder_decoder_cache(model.config, budget=12, block_size=4)
    tokens = run(model, cache, mode)
    paged = cache.self_attention_cache
    assert isinstance(paged, PagedEvictionCache)
    assert [layer.held for _, layer in paged.paged_layers] == [12, 12]
    assert [layer.keys.shape[2] for layer in cache.cross_attention_cache.layers] == [20, 20]
    assert cache.get_seq_length() == tokens.shape[1] - 1
    free = run(model, EncoderDecoderCache(DynamicCache(), DynamicCache()), mode)
    assert free.tolist() != tokens.tolist()


def test_binding_budget_is_exact() -> None:
    """Recency keeps the same tokens in all layers and heads, so a 4-D mask can say which."""
    model = bart()
    ids, mask = models.left_pad(models.prompts([20, 12, 5]))
    decoder = torch.stack(models.prompts([40] * 3, seed=5))
    cache = paged_encoder_decoder_cache(model.config, budget=12, block_size=4, policy="recency")
    encoded = model.get_encoder()(ids, attention_mask=mask)
    allowed = torch.zeros(3, 1, 40, 40, dtype=torch.bool)
    # BART of transformers 4 builds its mask without asking the cache: only single tokens may follow an eviction.
    last = [(25, 30), *((at, at + 1) for at in range(30, 40))] if models.VERSION >= (5, 0) else [(25, 26)]
    steps = []
    layer = cache.self_attention_cache.layers[0]
    with torch.no_grad():
        for start, stop in [(0, 9), *((at, at + 1) for at in range(9, 25)), *last]:
            before = layer.positions[0, 0].tolist() if layer.held else []
            steps.append(
                model(
                    encoder_outputs=encoded,
                    attention_mask=mask,
                    decoder_input_ids=decoder[:, start:stop],
                    **{CACHE_ARGUMENT: cache},
                    use_cache=True,
                ).logits
            )
            for at in range(start, stop):
                seen = layer.positions[0, 0].tolist() if stop - start == 1 else [*before, *range(start, at + 1)]
                allowed[:, :, at, seen] = True
        ours = torch.cat(steps, dim=1)
        length = ours.shape[1]
        logits = model(
            encoder_outputs=encoded,
            attention_mask=mask,
            decoder_input_ids=decoder[:, :length],
            decoder_attention_mask=torch.where(allowed[:, :, :length, :length], 0.0, torch.finfo(torch.float32).min),
            use_cache=False,
        ).logits
    assert allowed[0, 0, length - 1].sum() == 12
    assert_close(ours, logits)


def test_rows_of_the_pair() -> None:
    model = bart()
    cache = paged_encoder_decoder_cache(model.config, budget=12, block_size=4)
    run(model, cache, "greedy")
    positions = cache.self_attention_cache.layers[0].positions.clone()
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    index = [2, 2, 0, 0]
    assert torch.equal(cache.self_attention_cache.layers[0].positions, positions[index])
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    assert cache.cross_attention_cache.layers[0].keys.shape[0] == 4
    assert torch.equal(cache.self_attention_cache.layers[0].positions, positions[[0, 2, 2, 0]])
