"""Which models and which of their layers can evict."""

import inspect
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    DynamicCache,
    cache_utils,
)
from transformers.cache_utils import DynamicLayer

from .cache_argument import CACHE_NAMES

#: Of models that keep a linear state and growing keys and values in the same layer.
LINEAR_AND_FULL: type = cache_utils.LinearAttentionAndFullAttentionLayer
_FIXED_SIZE_NAMES = (
    "DummyLayer",  # checked one by one, because they came in different releases
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionCacheLayerMixin",
)
_OF_FIXED_SIZE = tuple(getattr(cache_utils, name) for name in _FIXED_SIZE_NAMES if hasattr(cache_utils, name))

# Attention scores of these models depend on the slot a key lies in, not on a position stored with the key.
_SLOT_DEPENDENT = {"bloom": "ALiBi", "mpt": "ALiBi", "reformer": "axial positions and hashing"} | dict.fromkeys(
    "cpmant longt5 mt5 pix2struct pix2struct_text_model pop2piano prophetnet switch_transformers t5 udop umt5 "
    "xlnet".split(),
    "a relative position bias",
)
# States of models other than keys and values, and the arguments that carry them between forwards.
_OTHER_STATE = {"openai-gpt": "reads the whole text in every forward", "xlstm": "keeps a recurrent state of its own"}
_STATE_ARGUMENTS = ("cache_params", "state")
# Models that take keys and values out of the cache's layers themselves, unused slots included, or copy its layers.
_READS_STORAGE = ("diffusion_gemma", "diffusion_gemma_text", "dory")
# These models multiply attention weights of one KV head with values of others.
_MIXING_HEADS = {
    "diffllama": "weighs the values of two KV heads with the keys of one",
    "doge": "works out its mask from the values of all KV heads",
}
# Attention implementations of another name get from these models what only eager attention can use.
_OWN_MASKS = {
    "deepseek_v4": "adds compressed keys, and a mask for them that only eager attention understands",
    "jetmoe": "repeats all of its KV heads together, so it does not show which queries belong to which of them",
}


#: Names in a configuration whose values must be equal for one model to use what was measured on another.
SHAPE = "model_type num_hidden_layers hidden_size vocab_size num_attention_heads num_key_value_heads head_dim".split()


def shape_facts(config: Any, *more: str) -> dict[str, Any]:
    """The values under these names, and under `more`, in the configuration of a decoder; those that it has."""
    facts = {name: named(config, name) for name in (*SHAPE, *more)}
    return {name: value for name, value in facts.items() if value is not None}


def named(config: Any, name: str) -> Any:
    """A value of a configuration, or a list of values if layers have their own; None if there is none."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises its own class for attributes that only layers have
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def check_model(config: Any, heads: str = "shared") -> None:
    """Refuse models whose results would be wrong without an error.

    Args:
        heads: the option `heads` of the cache.

    Raises:
        ValueError: with the reason and the way out.
    """
    _check_positions(config)
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder model: use transformers' EncoderDecoderCache.")
    text = config.get_text_config(decoder=True)
    _check_positions(text)
    _check_generates(text)
    if heads == "separate" and mixes_heads(config):
        raise ValueError(
            f"{text.model_type} {_MIXING_HEADS[text.model_type]}, so heads that evict on their own would give wrong "
            "results without a message. Use heads='shared'."
        )


def _check_generates(text: Any) -> None:
    """Refuse models of transformers that never use a cache: encoders, of text or of anything else."""
    masked, way_out = type(text) in MODEL_FOR_MASKED_LM_MAPPING, ""
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        encodes = masked and getattr(text, "is_decoder", None) is False
        way_out = " If it was trained to generate, set config.is_decoder = True before the model is made."
    else:
        classes = _model_classes(text) or _classes_beside(text)
        encodes = masked or (bool(classes) and not _takes(classes, *CACHE_NAMES, *_STATE_ARGUMENTS))
    if encodes:
        raise ValueError(
            f"{text.model_type} is an encoder: it reads a whole text (or image, or sound) at once, and no forward uses "
            f"a cache, so there is nothing to evict. Call it without a cache.{way_out}"
        )


def _classes_beside(config: Any) -> list[Any]:
    """transformers' own models with this configuration that no table names, such as the text part of SigLIP."""
    module = type(config).__module__
    if not module.startswith("transformers.models."):
        return []
    with suppress(ImportError):
        beside = vars(import_module(module.replace(".configuration_", ".modeling_"))).values()
        return [cls for cls in beside if getattr(cls, "config_class", None) is type(config)]
    return []


def mixes_heads(config: Any) -> bool:
    """Whether the model sums over the KV heads of a slot, so that all heads have to hold the same tokens."""
    return config.get_text_config(decoder=True).model_type in _MIXING_HEADS


def why_not_ours(config: Any) -> str | None:
    """Why the attention implementation "paged_eviction" would give wrong results in this model; None if it is right.

    None also for a model that is not part of transformers.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type in _OWN_MASKS:
        return f"{text.model_type} {_OWN_MASKS[text.model_type]}"
    for cls in _model_classes(text):
        if not cls._can_set_attn_implementation():
            return f"{text.model_type} computes attention by code of its own"
        if not (cls._supports_sdpa or cls._supports_attention_backend):
            return f"transformers says that attention of {text.model_type} cannot be computed by other implementations"
    return None


def _model_classes(config: Any) -> list[Any]:
    """The classes of transformers' own models with such a configuration."""
    entries = []
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        with suppress(ValueError):  # some names in these tables belong to private classes of transformers
            entries.append(mapping.get(type(config), ()))
    return [cls for entry in entries for cls in (entry if isinstance(entry, tuple) else (entry,))]


def _takes(classes: list[Any], *names: str) -> bool:
    """Whether `forward` of some of these classes has an argument of one of these names."""
    return any(not inspect.signature(cls.forward).parameters.keys().isdisjoint(names) for cls in classes)


def _check_positions(config: Any) -> None:
    reason = _SLOT_DEPENDENT.get(config.model_type)
    if config.model_type in _READS_STORAGE:
        raise ValueError(
            f"{config.model_type} reads keys and values from the layers of its cache by itself, so it would see slots "
            "that are not in use and give wrong results without a message. Use DynamicCache for this model."
        )
    if reason is None and getattr(config, "alibi", False):
        reason = "ALiBi"
    if reason is None and any(getattr(config, name, None) for name in ("relative_attention_num_buckets", "rel_extent")):
        reason = "a relative position bias"
    if reason is None and "local" in (getattr(config, "attention_layers", None) or ()):
        reason = "local layers that cut their window by slots"
    if reason is not None:
        raise ValueError(
            f"{config.model_type} uses {reason}: its attention depends on the slot a key lies in, so evicting tokens "
            "would give wrong results without a message. Use DynamicCache for this model."
        )


def rope_parameters(text: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary parameters in the configuration, for this type of layer, under the names of transformers 4 or 5."""
    parameters: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(parameters, dict) and layer_type in parameters:
        parameters = parameters[layer_type] or {}
    return parameters if isinstance(parameters, dict) else {}


def is_latent_attention(config: Any) -> bool:
    """Whether layers cache latents (multi-head latent attention) instead of keys and values."""
    return getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None


def layer_plan(config: Any) -> list[Any]:
    """The layers `DynamicCache` makes for this model, with None where a layer is to be paged.

    A layer with a linear state next to keys and values is the one that `DynamicCache` makes; `is_paged` is true for it.

    Raises:
        ValueError: `DynamicCache` cannot be made for this model, or it keeps a state of its own.
    """
    text = config.get_text_config(decoder=True)
    cross_attention = cross_attention_layers(config)
    plan: list[Any] = []
    for index, layer in enumerate(_dynamic_layers(config)):
        paged = type(layer) is DynamicLayer and index not in cross_attention
        plan.append(None if paged else layer)
    if any(is_paged(layer) for layer in plan):
        _check_keeps_no_other_state(text)
    return plan


def cross_attention_layers(config: Any) -> set[int]:
    """Layers that attend to an image only. Without an image they hold nothing."""
    return set(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or [])


def _check_keeps_no_other_state(text: Any) -> None:
    """Refuse models that are known to keep their state elsewhere. Others show it in their first forward."""
    classes, reason = _model_classes(text), _OTHER_STATE.get(text.model_type)
    state = next((name for name in _STATE_ARGUMENTS if _takes(classes, name)), None)
    if reason is None and state is not None and not _takes(classes, *CACHE_NAMES):
        reason = f"keeps a state of its own ({state}=)"
    if reason is not None:
        raise ValueError(
            f"In this transformers release {text.model_type} {reason}, so it would not use this cache. Run it without "
            "one."
        )


def _dynamic_layers(config: Any) -> list[Any]:
    try:
        return list(DynamicCache(config=config).layers)
    except Exception as error:  # a configuration may lack any attribute
        raise ValueError(
            f"transformers cannot make a DynamicCache for {config.model_type} ({type(error).__name__}: {error}), so it "
            "is not known which of its layers may lose tokens. Run it without a cache of this package."
        ) from error


def is_paged(layer: Any) -> bool:
    """Whether a layer of `layer_plan` is paged, completely or in part."""
    return layer is None or type(layer) is LINEAR_AND_FULL


def paged_layers(config: Any) -> list[int]:
    """Indices of the layers of `layer_plan` that are paged, completely or in part."""
    return [index for index, layer in enumerate(layer_plan(config)) if is_paged(layer)]


def warn_of_surprises(config: Any, plan: list[Any], known_bad: str | None, stacklevel: int) -> None:
    """Warn where the cache cannot do what its user expects.

    Args:
        config: `model.config`.
        plan: the layers that transformers would make.
        known_bad: a warning about the precision of the cache; None = nothing to warn of.
        stacklevel: calls up to the user's line.
    """
    if known_bad is not None:
        warnings.warn(known_bad, stacklevel=stacklevel)
    text = config.get_text_config(decoder=True)
    growing, fixed = (_types_of(text, plan, of_fixed_size) for of_fixed_size in (False, True))
    grows = f" Layers of type {growing} are not paged: they grow with the text without limit." if growing else ""
    if not any(is_paged(layer) for layer in plan):
        holds = f" Layers of type {fixed} hold a fixed number of tokens already." if fixed else ""
        warnings.warn(
            f"No layer of this {text.model_type} model can evict.{holds}{grows} The cache behaves like DynamicCache.",
            stacklevel=stacklevel,
        )
    elif growing:
        warnings.warn(f"{text.model_type}:{grows}", stacklevel=stacklevel)
    rope = rope_parameters(text)
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        limit = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
        warnings.warn(
            f"{text.model_type} uses longrope: when the text crosses {limit} tokens, `generate` drops this cache and "
            "goes on with a plain DynamicCache of the whole text. Keep prompt plus answer on one side of that length.",
            stacklevel=stacklevel,
        )


def _types_of(text: Any, plan: list[Any], of_fixed_size: bool) -> str:
    """The names, in the configuration, of the types of layers that are not paged and that grow, or do not."""
    types = getattr(text, "layer_types", None) or []
    cross_attention = cross_attention_layers(text)
    names = [
        # A layer without a type has a window if the model has one.
        types[index] if index < len(types) else "sliding_attention"
        for index, layer in enumerate(plan)
        if not is_paged(layer) and index not in cross_attention and isinstance(layer, _OF_FIXED_SIZE) == of_fixed_size
    ]
    return ", ".join(repr(name) for name in dict.fromkeys(names))
