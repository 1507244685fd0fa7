"""What the comparison page says was measured of others: `python docs/measure_peers.py`.

Runs what is installed, on a tiny model of random, wide weights in float64: the caches of transformers, and kvpress,
whose release 0.5.5 needs transformers below 5.3 and so an environment of its own. Results go to `docs/peers.json`, each
under the versions it was found with. Nothing here needs this package.
"""

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, StaticCache
from transformers.masking_utils import create_causal_mask

#: Of the argument for a cache in the release that is installed.
NAME = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
RESULTS = Path(__file__).parent / "peers.json"
SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
#: 119 is an end token, which prompt lookup asks for.
LOOKUP = {"prompt_lookup_num_tokens": 4, "eos_token_id": 119}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double().eval()


def prompt(*lengths: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask."""
    torch.manual_seed(seed)
    width = max(lengths)
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return torch.randint(2, 120, (len(lengths), width)) * mask, mask


def generate(model: Any, ids: Tensor, mask: Tensor, cache: Any = None, new: int = 12, **settings: Any) -> Tensor:
    tokens: Tensor = model.generate(
        ids, attention_mask=mask, **{NAME: cache}, max_new_tokens=new, do_sample=False, **settings
    )
    return tokens[:, ids.shape[1] :]


def padded_row_is_as_alone(model: Any, make: Callable[[], Any], **settings: Any) -> bool:
    """The tokens of a row of 40 beside one of 64, and alone."""
    ids, mask = prompt(64, 40)
    together = generate(model, ids, mask, make(), **settings)[1]
    alone = generate(model, ids[1:, 24:], mask[1:, 24:], make(), **settings)[0]
    return bool((together == alone).all())


def second_turn(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> int:
    """Tokens that the model is fed in a second turn of 8 more tokens: those, and the last one of the answer."""
    first = generate(model, ids, mask, cache, new=4)
    fed: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: fed.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    longer = torch.cat([ids, first, prompt(8, seed=2)[0]], dim=1)
    generate(model, longer, torch.ones_like(longer), cache, new=1)
    hook.remove()
    return fed[0]


def lookup_is_greedy(model: Any, make: Callable[[], Any]) -> bool | str:
    """Whether prompt lookup gives the tokens of greedy decoding, on a text that repeats itself."""
    ids, mask = prompt(64)
    ids = torch.cat([ids[:, :32], ids[:, :32]], dim=1)
    try:
        lookup = generate(model, ids, mask, make(), **LOOKUP)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return lookup.tolist() == generate(model, ids, mask, make(), eos_token_id=LOOKUP["eos_token_id"]).tolist()


def sliding_window() -> dict[str, Any]:
    model = build(MistralConfig(**SIZES, sliding_window=16))
    cache = DynamicCache(config=model.config)
    ids, mask = prompt(64)
    generate(model, ids, mask, cache)
    return {
        "layer": type(cache.layers[0]).__name__,
        "slots held after 64 + 12 tokens, window 16": cache.layers[0].keys.shape[2],
        "padded row as alone": padded_row_is_as_alone(model, lambda: DynamicCache(config=model.config)),
        "tokens fed in a second turn that adds 9": second_turn(model, DynamicCache(config=model.config), ids, mask),
        "prompt lookup gives the greedy tokens": lookup_is_greedy(model, lambda: DynamicCache(config=model.config)),
    }


def static() -> dict[str, Any]:
    model = build(LlamaConfig(**SIZES))
    cache = StaticCache(config=model.config, max_cache_len=80)
    generate(model, *prompt(64), cache)
    try:
        generate(model, *prompt(64), StaticCache(config=model.config, max_cache_len=72))
        beyond = "runs"
    except Exception as error:
        beyond = type(error).__name__
    return {
        "slots held after 64 + 12 tokens, made for 80": cache.layers[0].keys.shape[2],
        "64 + 12 tokens, made for 72": beyond,
        "padded row as alone": padded_row_is_as_alone(
            model, lambda: StaticCache(config=model.config, max_cache_len=80)
        ),
        "is_compileable": bool(cache.is_compileable),
        "tokens fed in a second turn that adds 9": second_turn(
            model, StaticCache(config=model.config, max_cache_len=80), *prompt(64)
        ),
        "prompt lookup": lookup_is_greedy(model, lambda: StaticCache(config=model.config, max_cache_len=80)),
    }


def kvpress() -> dict[str, Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    import kvpress as package
    from kvpress import AdaKVPress, KnormPress, SnapKVPress

    model = build(LlamaConfig(**SIZES))
    ids, mask = prompt(64)
    replaced = [name for name, function in before.items() if ALL_ATTENTION_FUNCTIONS[name] is not function]

    def held(press: Any, **settings: Any) -> int:
        cache = DynamicCache()
        with press(model):
            generate(model, ids, mask, cache, new=1, **settings)
        return int(cache.layers[0].keys.shape[2])

    measured: dict[str, Any] = {
        "names that end in Press": sum(name.endswith("Press") for name in package.__all__),
        "attention functions of transformers replaced by the import": sorted(replaced),
        "slots held after a prompt of 64, KnormPress(0.5)": held(KnormPress(0.5)),
        "the same in chunks of 16": held(KnormPress(0.5), prefill_chunk_size=16),
        "slots held after a prompt of 64, AdaKVPress(SnapKVPress(0.5))": held(AdaKVPress(SnapKVPress(0.5, 8))),
        "without a press: padded row as alone": padded_row_is_as_alone(model, DynamicCache),
        "without a press: prompt lookup gives the greedy tokens": lookup_is_greedy(model, DynamicCache),
    }
    with KnormPress(0.5)(model):
        measured["KnormPress(0.5): padded row as alone"] = padded_row_is_as_alone(model, DynamicCache)
        measured["KnormPress(0.5): prompt lookup gives the greedy tokens"] = lookup_is_greedy(model, DynamicCache)
        measured["KnormPress(0.5): tokens fed in a second turn that adds 9"] = second_turn(
            model, DynamicCache(), ids, mask
        )
    return measured


def main() -> None:
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    measured: dict[str, Any] = {"SinkCache": {"in transformers": hasattr(transformers, "SinkCache")}}
    measured |= {"sliding window": sliding_window(), "StaticCache": static()}
    try:
        versions = f"kvpress {version('kvpress')}, {versions}"
        measured = {"kvpress": kvpress()}
    except PackageNotFoundError:
        pass
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    results[versions] = measured
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n", "utf-8")
    print(json.dumps({versions: measured}, indent=2))


if __name__ == "__main__":
    main()
