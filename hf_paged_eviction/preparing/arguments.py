"""Refuse what `prepare` cannot be called with."""

from pathlib import Path
from typing import Any

from ..integration.models import is_latent_attention, paged_layers, why_not_ours
from ..learned.measured import OF_USE
from ..options.cache_options import AUTO
from .effort import NORMAL, QUICK, THOROUGH, Effort


def check_arguments(model: Any, tokenizer: Any, use: object) -> None:
    """Raise TypeError or ValueError if these are not a model, its tokenizer and a use."""
    if isinstance(model, str | Path):
        raise TypeError(
            f"prepare takes a loaded model, not the name {str(model)!r}: "
            f"prepare(AutoModelForCausalLM.from_pretrained({str(model)!r}), tokenizer)."
        )
    if _is_tokenizer(model):
        raise TypeError("prepare got a tokenizer in place of the model: write prepare(model, tokenizer).")
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"prepare takes a model of transformers, got {type(model).__name__}.")
    if tokenizer is not None and not _is_tokenizer(tokenizer):
        raise TypeError(f"tokenizer must be the model's tokenizer, got {type(tokenizer).__name__}.")
    if use not in OF_USE:
        raise ValueError(f"use must be one of {', '.join(map(repr, OF_USE))}, got {use!r}.")


def chosen_effort(thorough: bool, quick: bool) -> Effort:
    """The effort that was asked for.

    Raises:
        ValueError: `thorough` and `quick` exclude each other.
    """
    if thorough and quick:
        raise ValueError("thorough=True and quick=True exclude each other: leave one of them out.")
    return THOROUGH if thorough else QUICK if quick else NORMAL


def check_model(config: Any) -> None:
    """Refuse models of which nothing can be measured.

    Raises:
        ValueError: the message says which default their caches get instead.
    """
    if is_latent_attention(config):
        reason: str | None = "this model caches latents (MLA) instead of keys and values"
    elif not paged_layers(config):
        kinds = sorted({*(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())})
        raise ValueError(
            f"There is nothing to prepare: no layer of this {config.model_type} model evicts"
            f"{f' (its layers are {kinds})' if kinds else ''}. Layers with a sliding window and recurrent ones hold a "
            "fixed number of tokens already, so use the model without a cache of this package."
        )
    else:
        reason = why_not_ours(config)
    if reason is not None:
        raise ValueError(
            f"There is nothing to prepare: {reason}. PagedEvictionCache(model.config, policy={AUTO!r}) uses a "
            "default that needs no profile."
        )


def _is_tokenizer(thing: object) -> bool:
    return callable(thing) and hasattr(thing, "decode") and not hasattr(thing, "forward")
