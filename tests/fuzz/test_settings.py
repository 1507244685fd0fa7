"""Settings of a checkpoint's generation configuration, drawn: every caller answers as without them, or names one."""

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import models
from hf_paged_eviction import PagedEvictionCache, ask
from hf_paged_eviction.internals import CACHE_ARGUMENT, generate_settings
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_eval.running.generation import Generator
from hf_paged_eviction_eval.running.prefill import Inputs

#: Settings that change how tokens are found or handed over, not which.
FORM: dict[str, tuple[Any, ...]] = {
    "prompt_lookup_num_tokens": (1, 3),
    "max_matching_ngram_size": (2,),
    "assistant_early_exit": (1,),
    "use_cache": (False,),
    "cache_implementation": ("static", "dynamic", "offloaded", "quantized", "hybrid"),
    "return_dict_in_generate": (True,),
    "output_scores": (True,),
    "output_logits": (True,),
    "num_return_sequences": (2,),
    "prefill_chunk_size": (5,),
    "max_length": (9,),
}
#: Settings that change the answer: followed, set otherwise, or refused.
CHANGING: dict[str, tuple[Any, ...]] = {
    "token_healing": (True,),
    "begin_suppress_tokens": ([5, 9],),
    "forced_eos_token_id": (7,),
    "guidance_scale": (1.5,),
    "exponential_decay_length_penalty": ((1, 2.0),),
    "min_new_tokens": (3,),
    "repetition_penalty": (1.3,),
    "num_beams": (2,),
    "do_sample": (True,),
    "penalty_alpha": (0.6,),
    "stop_strings": (["e"],),
    "temperature": (0.3,),
}
TEXT = "def first(items):\n    return items[0]\n\n" * 9
QUESTION = "def second(items):"


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    tokenizer = embedded.load()[1]
    model = models.build("llama", "paged_eviction", vocab_size=len(tokenizer), max_position_embeddings=2048)
    model.generation_config.eos_token_id, model.generation_config.do_sample = None, False
    return model, tokenizer


@pytest.fixture(autouse=True)
def as_it_was(parts: Any) -> Iterator[None]:
    model, before = parts[0], copy.deepcopy(parts[0].generation_config)
    yield
    model.generation_config = before


def asked(model: Any, tokenizer: Any) -> Any:
    settings = {"budget": 64, "policy": "keydiff", "max_new_tokens": 8, "do_sample": False, "num_beams": 1}
    return ask(model, tokenizer, TEXT, QUESTION, **settings)


def evaluated(model: Any, tokenizer: Any) -> Any:
    """As eval answers: two rows, the first token by itself."""
    generator = Generator(model, tokenizer)
    ids = [tokenizer(TEXT + text).input_ids for text in (QUESTION, "x")]
    longest = max(map(len, ids))
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    padded = torch.tensor([row[:1] * (longest - len(row)) + row for row in ids])
    inputs = Inputs(padded, mask, (), padded, mask, None)
    cache = PagedEvictionCache(model.config, 64, policy="keydiff", attention_mask=mask)
    return generator.rest(inputs, generator.first(inputs, cache), cache, [8, 8]).tolist()


def chatted(model: Any, tokenizer: Any) -> Any:
    """As examples/chat.py calls `generate`."""
    ids = torch.tensor([tokenizer(TEXT + QUESTION).input_ids])
    cache = PagedEvictionCache(model.config, 64, policy="keydiff")
    greedy = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1}
    settings = generate_settings(model, greedy, "a chat")
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache}, **settings).tolist()


def drawn(table: dict[str, tuple[Any, ...]], random: Random, most: int) -> dict[str, Any]:
    return {name: random.choice(table[name]) for name in random.sample(list(table), random.randint(1, most))}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("caller", [asked, evaluated, chatted])
def test_settings_that_change_no_answer_change_none(parts: Any, caller: Callable[..., Any], seed: int) -> None:
    model, right = parts[0], caller(*parts)
    for name, value in drawn(FORM, Random(seed), 4).items():
        setattr(model.generation_config, name, value)
        model.generation_config.do_sample |= name == "num_return_sequences"  # which is invalid without it
    assert caller(*parts) == right, vars(model.generation_config)


@pytest.mark.parametrize("seed", range(8))
def test_eval_answers_as_one_call_with_a_plain_cache_or_names_the_setting(parts: Any, seed: int) -> None:
    """Greedily, whatever the checkpoint asks for; and a setting that two calls cannot follow is refused by name."""
    model, tokenizer = parts
    settings = drawn(CHANGING, Random(seed), 3)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    generator_of_all = {
        name: value for name, value in settings.items() if name in ("min_new_tokens", "repetition_penalty")
    }
    try:
        generator = Generator(model, tokenizer)
    except UserError as error:
        assert any(f"{name}=" in str(error) for name in settings)
        assert not settings.keys() <= {*generator_of_all, "num_beams", "do_sample", "penalty_alpha", "stop_strings"}
        return
    ids = torch.tensor([tokenizer(TEXT + QUESTION).input_ids])
    mask = torch.ones_like(ids)
    inputs = Inputs(ids, mask, (), ids, mask, None)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    answer = generator.rest(inputs, generator.first(inputs, caches[0]), caches[0], [8])
    model.generation_config = type(model.generation_config)(**generator_of_all, eos_token_id=sorted(generator.ends))
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert answer.tolist() == whole[:, ids.shape[1] :].tolist()
