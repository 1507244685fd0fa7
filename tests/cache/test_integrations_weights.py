"""Adapters and quantised weights; every test is skipped where its package is not installed."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 12

#: With DynamicCache, too: answers are those without the learned prompt.
PEFT_KNOWS_THE_OLD_NAME = "PEFT 0.21 looks for past_key_values=, which transformers 5.24 renamed"


@pytest.fixture(scope="module")
def whole() -> tuple[Any, Any]:
    """The embedded model, which callers copy before they change it, and its tokenizer."""
    return embedded.load()


def inputs(tokenizer: Any, rows: int = 3) -> Any:
    text = "".join(f"key{number} = value{number * 7}\n" for number in range(24))
    return tokenizer([text[: 400 - 120 * row] for row in range(rows)], return_tensors="pt", padding=True)


def say(model: Any, batch: Any, cache: Any, **settings: Any) -> list[list[int]]:
    """Exactly `STEPS` new tokens per row."""
    settings = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, **settings}
    return model.generate(**batch, **{CACHE_ARGUMENT: cache}, **settings)[:, -STEPS:].tolist()


def paged(model: Any, budget: int = 64, **settings: Any) -> PagedEvictionCache:
    return PagedEvictionCache(model.config, budget=budget, **settings)


def assert_serves(model: Any, batch: Any) -> None:
    """Roomy, the text of DynamicCache; binding, within the budget."""
    assert say(model, batch, paged(model, 512)) == say(model, batch, DynamicCache(config=model.config))
    cache = paged(model)
    say(model, batch, cache)
    assert cache.stats().largest_held == 64 < cache.stats().seen


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapters = [
        peft.LoraConfig(target_modules=modules, lora_alpha=64, init_lora_weights=False)
        for modules in (["k_proj", "v_proj"], ["q_proj", "o_proj"])
    ]
    adapted = peft.get_peft_model(deepcopy(model), adapters[0], "one")
    adapted.add_adapter("two", adapters[1])
    return adapted.eval()


def test_lora(whole: tuple[Any, Any]) -> None:
    model, tokenizer = whole
    adapted, batch = with_adapters(model), inputs(tokenizer)
    assert_serves(adapted, batch)
    adapted.set_attn_implementation("paged_eviction")
    cache = paged(adapted, policy="snapkv")
    one = say(adapted, batch, cache)
    assert cache.stats().largest_held == 64
    adapted.set_adapter("two")
    assert say(adapted, batch, paged(adapted, policy="snapkv")) != one
    adapted.set_adapter("one")
    assert say(adapted, batch, paged(adapted, policy="snapkv")) == one


def test_an_adapter_for_every_row(whole: tuple[Any, Any]) -> None:
    model, tokenizer = whole
    adapted, batch = with_adapters(model), inputs(tokenizer)
    rows = say(adapted, batch, paged(adapted), adapter_names=["one", "two", "__base__"])
    for row, name in enumerate(("one", "two")):
        adapted.set_adapter(name)
        assert say(adapted, batch, paged(adapted))[row] == rows[row]
    assert say(model, batch, paged(model))[2] == rows[2]


@pytest.mark.skipif(CACHE_ARGUMENT == "cache", reason=PEFT_KNOWS_THE_OLD_NAME)
def test_prompt_tuning(whole: tuple[Any, Any]) -> None:
    """The learned prompt is the first tokens of every row, before its pads: `sink_tokens` keeps it."""
    peft = pytest.importorskip("peft")
    model, tokenizer = whole
    torch.manual_seed(0)
    tuned = peft.get_peft_model(
        deepcopy(model), peft.PromptTuningConfig(num_virtual_tokens=20, task_type="CAUSAL_LM")
    ).eval()
    batch = inputs(tokenizer)
    assert_serves(tuned, batch)
    cache = paged(tuned, sink_tokens=20)
    say(tuned, batch, cache)
    for row in cache.layers[0].positions[:, 0].tolist():
        assert set(range(20)) <= set(row)


@pytest.mark.skipif(CACHE_ARGUMENT == "cache", reason=PEFT_KNOWS_THE_OLD_NAME)
def test_prefix_tuning_brings_a_cache_of_its_own(whole: tuple[Any, Any]) -> None:
    """PEFT puts learned keys and values into a cache that it makes, and takes no other: ours stays empty."""
    peft = pytest.importorskip("peft")
    model, tokenizer = whole
    tuned = peft.get_peft_model(
        deepcopy(model), peft.PrefixTuningConfig(num_virtual_tokens=20, task_type="CAUSAL_LM")
    ).eval()
    cache = paged(tuned)
    say(tuned, inputs(tokenizer), cache)
    assert cache.stats().seen == 0


def _bitsandbytes(bits: int) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)


def _torchao(bits: int) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(weight_dtype=torch.int4))


def _quanto(bits: int) -> Any:
    from transformers import QuantoConfig

    return QuantoConfig(weights=f"int{bits}")


QUANTISERS = {"bitsandbytes": _bitsandbytes, "torchao": _torchao, "optimum.quanto": _quanto}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("package", QUANTISERS)
def test_quantised(package: str, bits: int, whole: tuple[Any, Any]) -> None:
    pytest.importorskip(package)
    model = AutoModelForCausalLM.from_pretrained(
        embedded.path(), dtype=torch.bfloat16, quantization_config=QUANTISERS[package](bits), device_map="cpu"
    )
    plain = whole[0].model.layers[0].self_attn.k_proj
    small = model.model.layers[0].self_attn.k_proj
    assert type(small) is not type(plain) or type(small.weight) is not type(plain.weight)
    assert_serves(model, inputs(whole[1]))
