"""Which layers of which models may lose tokens."""

import sys
import warnings
from typing import Any

from transformers import MODEL_MAPPING, DynamicCache
from transformers.cache_utils import DynamicLayer

# Attention scores of these models depend on the slot a key lies in, not on a position stored with the key.
_SLOT_DEPENDENT = {
    "bloom": "ALiBi",
    "cpmant": "a relative position bias",
    "inkling": "a relative position bias",
    "longt5": "a relative position bias",
    "mpt": "ALiBi",
    "mt5": "a relative position bias",
    "pix2struct": "a relative position bias",
    "pop2piano": "a relative position bias",
    "reformer": "axial positions and hashing",
    "switch_transformers": "a relative position bias",
    "t5": "a relative position bias",
    "udop": "a relative position bias",
    "umt5": "a relative position bias",
    "xlnet": "a relative position bias",
}
_RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "hybrid")


def check_model(config: Any, inside_encoder_decoder: bool = False) -> None:
    """Refuse models in which eviction would be silently wrong.

    Raises:
        ValueError: with the reason and the way out.
    """
    if config.is_encoder_decoder and not inside_encoder_decoder:
        _check_positions(config)
        raise ValueError(
            f"{config.model_type} is an encoder-decoder model: build its cache with "
            "`paged_encoder_decoder_cache(model.config, budget=...)`."
        )
    _check_positions(config)
    _check_positions(config.get_text_config(decoder=True))


def _check_positions(config: Any) -> None:
    reason = _SLOT_DEPENDENT.get(config.model_type)
    if reason is None and getattr(config, "alibi", False):
        reason = "ALiBi"
    if reason is None and getattr(config, "relative_attention_num_buckets", None):
        reason = "a relative position bias"
    if reason is not None:
        raise ValueError(
            f"{config.model_type} uses {reason}: its attention depends on the slot a key lies in, so evicting tokens "
            "would give wrong results without a message. Use DynamicCache for this model."
        )


def is_latent_attention(config: Any) -> bool:
    """Whether layers cache latents (multi-head latent attention) instead of keys and values."""
    return getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None


def layer_plan(config: Any) -> list[Any]:
    """The layers `DynamicCache` makes for this model, with None where a layer is to be paged.

    Raises:
        ValueError: `DynamicCache` cannot be made for this model, or this transformers release keeps its recurrent state
            outside its cache classes.
    """
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None) or []
    cross_attention = set(getattr(text, "cross_attention_layers", None) or [])
    plan: list[Any] = []
    for index, layer in enumerate(_dynamic_layers(config)):
        paged = type(layer) is DynamicLayer and index not in cross_attention
        if paged and index < len(types) and any(name in types[index] for name in _RECURRENT):
            raise ValueError(
                f"This transformers release keeps the {types[index]!r} state of {text.model_type} in a cache class of "
                "its own. Upgrade transformers (5.14 or later serves hybrid models)."
            )
        plan.append(None if paged else layer)
    return plan


def _dynamic_layers(config: Any) -> list[Any]:
    try:
        return list(DynamicCache(config=config).layers)
    except Exception as error:  # whatever the configuration lacks
        raise ValueError(
            f"transformers cannot make a DynamicCache for {config.model_type} ({type(error).__name__}: {error}), so it "
            "is not known which of its layers may lose tokens. Run it without a cache of this package."
        ) from error


def asks_for_mask_sizes(config: Any) -> bool:
    """Whether the model builds its masks with `transformers.masking_utils`, which asks the cache what it holds.

    Before transformers 5.14 some models (OPT, GPT-J, Falcon, BART, ...) work the mask out of the number of tokens seen.
    True where the model is not one of transformers' own.
    """
    text = config.get_text_config(decoder=True)
    found = [MODEL_MAPPING[type(part)] for part in (text, config) if type(part) in MODEL_MAPPING]
    classes = [cls for entry in found for cls in (entry if isinstance(entry, tuple) else (entry,))]
    modules = [sys.modules[cls.__module__] for cls in classes]
    return not modules or any(
        getattr(value, "__module__", None) == "transformers.masking_utils"
        for module in modules
        for value in vars(module).values()
    )


def warn_of_surprises(config: Any, plan: list[Any], stacklevel: int) -> None:
    """One warning where the cache cannot do what its user expects, pointing `stacklevel` calls up."""
    text = config.get_text_config(decoder=True)
    if all(layer is not None for layer in plan):
        warnings.warn(
            f"No layer of this {text.model_type} model can evict: all are sliding-window, linear or shared layers, "
            "which hold a fixed number of tokens already. The cache behaves like DynamicCache.",
            stacklevel=stacklevel,
        )
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
        limit = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
        warnings.warn(
            f"{text.model_type} uses longrope: when the text crosses {limit} tokens, `generate` drops this cache and "
            "goes on with a plain DynamicCache of the whole text. Keep prompt plus answer on one side of that length.",
            stacklevel=stacklevel,
        )
