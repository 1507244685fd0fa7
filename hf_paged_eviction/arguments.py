"""Refusing arguments of a cache that cannot be meant, before anything is made of them."""

from typing import Any

from torch.nn import Module
from transformers import PretrainedConfig


def check_config(config: object) -> None:
    """Raise TypeError unless `config` is the configuration of a model."""
    if isinstance(config, PretrainedConfig):
        return
    if isinstance(config, Module):
        raise TypeError(
            f"The first argument is a model ({type(config).__name__}): pass its configuration, model.config."
        )
    given = "None" if config is None else f"a {type(config).__name__}"
    raise TypeError(f"The first argument must be the configuration of the model, model.config; got {given}.")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_instance(name: str, value: object, kind: type[Any]) -> None:
    """Raise TypeError unless `value` is None or of this class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__} object or None, got {value!r}.")
