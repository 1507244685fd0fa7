"""`generate` beside a cache: threads, configurations, processors, criteria, outputs, files, training."""

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import models
import modes
from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

SMALL: dict[str, Any] = {"budget": 24, "block_size": 4}


def roomy(model: PreTrainedModel) -> PagedEvictionCache:
    return PagedEvictionCache(model.config, budget=64)


def say(model: PreTrainedModel, cache: Any, **settings: Any) -> Any:
    """What `generate` says to rows of different length."""
    ids, mask = modes.batch("greedy", padded=True)
    torch.manual_seed(0)
    plain = {"attention_mask": mask, "do_sample": False, "max_new_tokens": modes.STEPS}
    return model.generate(ids, **{CACHE_ARGUMENT: cache}, **{**plain, **settings})


@pytest.mark.parametrize("settings", [{}, {"policy": "snapkv"}, {"policy": "h2o", "allocator": "pyramid"}], ids=str)
def test_threads_share_a_model(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one thread hands to its attention never reaches another's, though all stop in between."""
    model = models.shared("llama", "paged_eviction")
    caches = [PagedEvictionCache(model.config, **SMALL, **settings) for _ in range(4)]
    expected = say(model, caches[0], max_new_tokens=12).tolist()
    sequences: dict[int, Any] = {}
    everybody, update = Barrier(3), PagedEvictionCache.update

    def update_and_wait(cache: PagedEvictionCache, *args: Any, **more: Any) -> Any:
        updated = update(cache, *args, **more)
        everybody.wait(timeout=300)
        return updated

    monkeypatch.setattr(PagedEvictionCache, "update", update_and_wait)

    def talk(number: int) -> None:
        sequences[number] = say(model, caches[number], max_new_tokens=12).tolist()

    threads = [Thread(target=talk, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sequences == {number: expected for number in range(1, 4)}
    assert all(cache.stats() == caches[0].stats() for cache in caches)


def test_a_configuration_is_as_good_as_arguments() -> None:
    model = models.shared("llama")
    settings = {"max_new_tokens": 9, "prefill_chunk_size": 7, "repetition_penalty": 1.3, "pad_token_id": models.PAD}
    ids, mask = modes.batch("greedy", padded=True)
    caches = [PagedEvictionCache(model.config, **SMALL) for _ in range(2)]
    config = GenerationConfig(**settings)
    by_config = model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: caches[0]}, generation_config=config)
    by_argument = model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: caches[1]}, **settings)
    assert by_config.tolist() == by_argument.tolist()
    assert caches[0].stats() == caches[1].stats()


def test_no_use_of_the_cache_is_the_models_default() -> None:
    """Training leaves `config.use_cache = False` behind; generate goes by its own configuration."""
    model = models.build("llama", use_cache=False)
    model.generation_config.use_cache = True
    cache = PagedEvictionCache(model.config, **SMALL)
    assert say(model, cache).tolist() == say(models.shared("llama"), PagedEvictionCache(model.config, **SMALL)).tolist()
    assert cache.stats().seen == max(modes.LENGTHS) + modes.STEPS - 1


CONTROLS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "sampling": {"do_sample": True, "min_p": 0.05, "temperature": 0.7},
    "guidance": {"guidance_scale": 1.5},
    "allowed": {
        "prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1]) % 100 + 2, (int(ids.sum()) + row) % 100 + 2]
    },
    "criterion": {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] % 4 == 0]},
    "beams": {"num_beams": 3, "length_penalty": 1.4, "early_stopping": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls(control: str) -> None:
    """Roomy: the text of DynamicCache. Binding: still to the end, within the budget."""
    model = models.shared("llama")
    ours, expected = (say(model, cache, **CONTROLS[control]) for cache in (roomy(model), DynamicCache()))
    assert ours.tolist() == expected.tolist()
    cache = PagedEvictionCache(model.config, **SMALL)
    say(model, cache, **CONTROLS[control])
    assert cache.stats().largest_held == 24


def test_outputs() -> None:
    model = models.shared("llama")
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    ours, expected = (
        say(model, cache, return_dict_in_generate=True, **wanted) for cache in (roomy(model), DynamicCache())
    )
    assert ours[CACHE_ARGUMENT].get_seq_length() == expected[CACHE_ARGUMENT].get_seq_length()
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name))
    assert len(ours.hidden_states) == modes.STEPS
    transitions = [model.compute_transition_scores(out.sequences, out.scores) for out in (ours, expected)]
    torch.testing.assert_close(*transitions)


def gradient(model: PreTrainedModel, **settings: Any) -> torch.Tensor:
    model.zero_grad()
    ids, mask = modes.batch("greedy", padded=True)
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **settings).loss.backward()
    return model.model.layers[0].self_attn.k_proj.weight.grad.clone()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_a_training_step(checkpointing: bool) -> None:
    """One forward with an evicting cache learns what one without a cache learns; checkpointing leaves it empty."""
    model = models.build("llama").train()
    expected = gradient(model, use_cache=False)
    if checkpointing:
        enable: Callable[[], None] = model.gradient_checkpointing_enable
        enable()
    cache = PagedEvictionCache(model.config, **SMALL)
    torch.testing.assert_close(gradient(model, **{CACHE_ARGUMENT: cache}, use_cache=True), expected)
    assert cache.stats().largest_held == (0 if checkpointing else 24)
    assert not any(layer.keys.requires_grad for layer in cache.layers if layer.held)
