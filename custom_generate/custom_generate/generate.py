"""`generate` with a KV cache that stays at a fixed number of tokens.

transformers runs this file for `model.generate(custom_generate="<repository>", trust_remote_code=True, budget=...)`.
"""

from dataclasses import fields
from typing import Any

from transformers import EncoderDecoderCache, GenerationMixin

from hf_paged_eviction import CacheOptions, PagedEvictionCache, paged_encoder_decoder_cache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT

# `static` is left out: `generate` has a way of its own to ask for that.
_OPTIONS = [each.name for each in fields(CacheOptions) if each.name != "static"]

# What says where this file is loaded from is handed on to it as well, but means nothing to the model.
_FROM_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "revision", "token")


def generate(
    inputs: Any = None,
    generation_config: Any = None,
    *args: Any,
    model: Any,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate as `model.generate` does, holding at most what `budget` says.

    Args:
        inputs, generation_config, *args: as for `GenerationMixin.generate`.
        model: the model; transformers fills it in.
        cache: a `PagedEvictionCache` (or a pair from `paged_encoder_decoder_cache`) of an earlier turn, which is
            continued; the settings below belong to it then and must be left out.
        past_key_values: the same, by its name before transformers 5.24.
        **kwargs: the options of `hf_paged_eviction.CacheOptions` by name, whose defaults stand for None; `budget` is
            needed. All others as for `GenerationMixin.generate`.

    Returns:
        What `model.generate` returns; `return_dict_in_generate=True` puts the cache into `cache` (`past_key_values`).

    Raises:
        TypeError: the cache is of another kind.
        ValueError: a cache under both names, settings for a cache that exists already, `use_cache=False`, a
            `cache_implementation`, or what `PagedEvictionCache` refuses.
    """
    settings = {name: kwargs.pop(name) for name in _OPTIONS if kwargs.get(name) is not None}
    kwargs = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    kwargs = {name: value for name, value in kwargs.items() if name not in _FROM_WHERE}
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    _check_use_cache(configs, kwargs)
    if kwargs.get("cache_implementation") is not None:
        raise ValueError("cache_implementation= asks for another cache than the one that this function makes: omit it.")
    if model.generation_config.cache_implementation is not None:
        kwargs["cache_implementation"] = None  # the model's default gives way
    if cache is not None and past_key_values is not None:
        raise ValueError("cache= and past_key_values= are two names of one argument. Pass one of them.")
    cache = past_key_values if cache is None else cache
    if cache is None:
        cache = _new_cache(model.config, settings, _is_speculative(configs, kwargs))
    else:
        _check_past(cache, settings)
    # Not `model.generate`: `from_pretrained` may have put this very function there, and a class with a `generate` of
    # its own (Whisper) has run that already.
    return GenerationMixin.generate(model, inputs, generation_config, *args, **{CACHE_ARGUMENT: cache}, **kwargs)


def _new_cache(config: Any, settings: dict[str, Any], speculative: bool) -> Any:
    # Before transformers 5.14 nobody else tells the cache that tokens may be taken back.
    make = paged_encoder_decoder_cache if config.is_encoder_decoder else PagedEvictionCache
    cache = make(config, **settings)
    if speculative:
        (cache.self_attention_cache if config.is_encoder_decoder else cache).activate_past_recording()
    return cache


def _is_speculative(configs: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether proposed tokens will be taken back, with an assistant, by lookup in the prompt, or by an early exit."""
    names = ("prompt_lookup_num_tokens", "assistant_early_exit")
    asked = [kwargs.get(name) or getattr(config, name, None) for name in names for config in configs]
    return kwargs.get("assistant_model") is not None or any(asked)


def _check_use_cache(configs: list[Any], kwargs: dict[str, Any]) -> None:
    """Without it `generate` feeds the whole text at every step, which a cache that is there takes for new tokens."""
    asked = [kwargs.get("use_cache"), *(config.use_cache for config in configs)]
    if next((value for value in asked if value is not None), True) is False:
        raise ValueError(
            "use_cache=False leaves nothing to evict from. Leave it out, set model.generation_config.use_cache = True, "
            "or call generate without custom_generate."
        )


def _check_past(past: Any, settings: dict[str, Any]) -> None:
    cache = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    if not isinstance(cache, PagedEvictionCache):
        raise TypeError(
            f"{CACHE_ARGUMENT}= is a {type(cache).__name__}, which holds every token. Leave it out for a new cache, or "
            "pass the one that this function returned with return_dict_in_generate=True."
        )
    if settings:
        raise ValueError(
            f"{CACHE_ARGUMENT}= has its settings already, so {', '.join(settings)} cannot be given with it. Leave them "
            f"out to continue, or leave {CACHE_ARGUMENT}= out for a new cache."
        )
