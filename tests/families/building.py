"""Tiny random models of families found in transformers' own tables."""

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from families.listing import Family
from families.shrinking import shrink
from models import randomise

MOST_PARAMETERS = 20_000_000


class UnbuildableError(Exception):
    """Why no tiny model of a family can be made."""


def tiny_config(family: Family) -> Any:
    """A tiny configuration of this family."""
    config = shrink(family.config_class(), **family.settings)
    wanted = family.model_class.config_class
    part = next((name for name, cls in config.sub_configs.items() if cls is wanted is not type(config)), None)
    if part is not None:
        config = getattr(config, part)  # the table names a whole for the class of its text part
    if family.task == "causal":
        for part in (config, config.get_text_config(decoder=True)):
            if getattr(part, "is_decoder", None) is False:
                part.is_decoder = True  # BERT and its kin generate only when told so
    return config


def build(family: Family, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of this family, in float32 on the CPU; the same weights for the same seed.

    Raises:
        Unbuildable: with the error of transformers, or the size that such a model would have.
    """
    try:
        config = tiny_config(family)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in family.model_class(config).parameters())
    except Exception as error:
        raise UnbuildableError(f"{type(error).__name__}: {error}") from error
    if size > MOST_PARAMETERS:
        raise UnbuildableError(f"{size / 1e6:.0f} million parameters")
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            model = family.model_class._from_config(config, dtype=torch.float32)
    except Exception as error:
        raise UnbuildableError(f"{type(error).__name__}: {error}") from error
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return randomise(model, seed)
