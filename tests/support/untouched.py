"""Whether importing and using the package changes what transformers has, in a process that has not imported it."""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, cache_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface


def tables(masks: bool = True) -> list[Any]:
    """What others look names up in."""
    registries: list[Any] = [dict(AttentionInterface._global_mapping), dict(ALL_ATTENTION_FUNCTIONS._local_mapping)]
    if masks:
        registries += [dict(AttentionMaskInterface._global_mapping), dict(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping)]
    for table in registries:  # new names for models that ask for them, and nothing else
        table.pop("paged_eviction", None)
    for name in ("DYNAMIC_LAYER_TYPE_MAPPING", "STATIC_LAYER_TYPE_MAPPING"):
        registries.append(dict(getattr(cache_utils, name, {})))
    registries.append({name: id(value) for name, value in vars(cache_utils).items() if callable(value)})
    registries.append({name: id(value) for name, value in vars(cache_utils.Cache).items()})
    registries.append({name: id(value) for name, value in vars(cache_utils.DynamicCache).items()})
    return registries


def plugins_loaded(_: int, folder: str, name: str) -> bool:
    """Whether the package imports a plugin of this folder before it is asked for one."""
    sys.path.insert(0, folder)
    from hf_paged_eviction import make_policy

    make_policy("h2o")
    return name in sys.modules


def check(_: int) -> str:
    """Before the import, after it, and after use."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    tiny = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()

    def said() -> Tensor:
        return tiny.generate(torch.arange(5, 45)[None], max_new_tokens=8, do_sample=False, pad_token_id=0)

    tokens, before = said(), tables()
    assert not any(name.startswith("hf_paged_eviction") for name in sys.modules), "it is imported already"
    from hf_paged_eviction import PagedEvictionCache

    assert tables() == before, "import changed a table"
    assert torch.equal(said(), tokens)

    import models
    import modes

    model, gemma = models.build("llama"), models.build("gemma3")
    inputs = modes.batch("direct", True)
    cases = [(model, "direct"), (model, "greedy"), (model, "beam"), (gemma, "direct")]

    def plain() -> list[Tensor]:
        caches = [modes.dynamic(one) for one, _ in cases]
        runs = [modes.run(one, cache, mode, *inputs) for (one, mode), cache in zip(cases, caches, strict=True)]
        layers = [layer for cache in caches for layer in cache.layers]
        return runs + [layer.keys for layer in layers] + [layer.values for layer in layers]

    first, before = plain(), tables(masks=False)
    for one, mode in cases:
        modes.run(one, PagedEvictionCache(one.config, budget=24, block_size=4), mode, *inputs)
    assert tables(masks=False) == before, "use changed a table"
    assert all(torch.equal(one, other) for one, other in zip(first, plain(), strict=True)), "a foreign cache changed"
    assert torch.equal(said(), tokens)
    return "unchanged"
