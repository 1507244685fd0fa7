"""A model as it was, whatever happened in between."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...queries.attention import PAGED_EVICTION


class NotCovered(Exception):  # noqa: N818 (what happened, not a mistake)
    """There is nothing to compare with; the message is the reason."""


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards all that the model and its configurations hold is as before.

    That is: attributes of modules (mode, remembered positions and the like), which tensors are their buffers, hooks,
    and the configurations with their attention implementations.
    """
    modules = [(module, _shallow(vars(module))) for module in model.modules()]
    configs = [(config, dict(vars(config))) for config in _configs(model)]
    logger = logging.getLogger("transformers")
    silent = logger.disabled, logger.level
    try:
        model.eval()
        logger.setLevel(logging.ERROR)  # it warns of every change of the attention implementation
        with torch.no_grad():
            yield
    finally:
        logger.disabled, logger.level = silent
        logger.setLevel(silent[1])
        for module, before in modules:
            _restore(module, before)
        for config, before in configs:
            vars(config).clear()
            vars(config).update(before)


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy in which dictionaries (buffers, hooks) are copies as well."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}


def _restore(module: torch.nn.Module, before: dict[str, Any]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        if isinstance(value, dict) and isinstance(now.get(name), dict):
            now[name].clear()  # others may hold the same dictionary
            now[name].update(value)
        else:
            now[name] = value


def _configs(model: Any) -> list[Any]:
    """The configurations of a model and of its parts, each once."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation"):
            continue
        found[id(config)] = config
        waiting += [value for value in vars(config).values() if hasattr(value, "_attn_implementation")]
    return list(found.values())


def attention_name(model: Any) -> str:
    """The attention implementation of the part of the model that has a cache."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def use_attention(model: Any, name: str) -> None:
    """Change the attention implementation, inside of `untouched`.

    Raises:
        NotCovered: the model does not take it.
    """
    if attention_name(model) == name:
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError, AttributeError, KeyError) as error:
        raise NotCovered(f"the model does not take the attention implementation {name!r}: {error}") from error
    if attention_name(model) != name:
        own = " It computes attention in its own code." if name == PAGED_EVICTION else ""
        raise NotCovered(f"the model does not take the attention implementation {name!r}.{own}")
