"""The model of `verify`: its calls, and its restoration."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_paged_eviction.internals import PAGED_EVICTION, cache_argument, cache_kwargs, unwrapped

from .text import Calls, Text, embeddings

#: Logits are compared for so many ids at least, evenly spread over the vocabulary.
_IDS = 2048


class NotCovered(Exception):  # noqa: N818 (what happened, not a mistake)
    """A check is not possible; the message is the reason."""


class Subject:
    """One model, and the way to call it.

    Attributes:
        dtype: dtype of its weights.
        coarse: whether the weights are in half precision.
        attention: its own attention implementation.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype: torch.dtype = embeddings(model).dtype
        self.coarse, self.attention = coarse(self.dtype), _attention_of(model)
        forward = unwrapped(model).forward
        self._takes_positions = "position_ids" in inspect.signature(forward).parameters
        self._takes_cache = cache_argument(forward) is not None

    def use(self, attention: str) -> None:
        """Change the attention implementation, inside of `untouched`.

        Raises:
            NotCovered: the model does not support it.
        """
        if _attention_of(self.model) == attention:
            return
        refused = f"the model does not take the attention implementation {attention!r}"
        try:
            self.model.set_attn_implementation(attention)
        except (ValueError, ImportError, AttributeError, KeyError) as error:
            raise NotCovered(f"{refused}: {error}") from error
        if _attention_of(self.model) != attention:
            own = " It computes attention in its own code." if attention == PAGED_EVICTION else ""
            raise NotCovered(f"{refused}.{own}")

    def feed(self, text: Text, cache: Any, calls: Calls, after: Callable[[int, int], None] | None = None) -> Tensor:
        """Logits `[rows, columns, some of the vocabulary]`, float32, of all columns fed.

        Args:
            after: called with the columns of each forward after it.

        Raises:
            NotCovered: the model does not take this cache, or does not return logits of all tokens.
        """
        if not self._takes_cache:
            raise NotCovered("the model takes no cache")
        logits = []
        for start, stop in calls:
            ids = text.ids[:, start:stop]
            how = {"input_ids": ids, "attention_mask": text.mask[:, :stop]}
            how |= {"position_ids": text.positions[:, start:stop]} if self._takes_positions else {}
            output = self.model(**how, **cache_kwargs(self.model, cache), use_cache=True)
            some = output.logits if hasattr(output, "logits") else output.last_hidden_state
            if some.shape[1] != stop - start:
                raise NotCovered(f"the model returns logits of {some.shape[1]} of {stop - start} tokens")
            logits.append(some[..., :: max(some.shape[-1] // _IDS, 1)].float())
            if after is not None:
                after(start, stop)
        return torch.cat(logits, dim=1)

    def dynamic(self) -> DynamicCache:
        """The cache that transformers would use."""
        return DynamicCache(config=self.model.config)


def _attention_of(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def coarse(dtype: torch.dtype) -> bool:
    """Whether this dtype has half precision or less."""
    return torch.finfo(dtype).bits < 32


@contextmanager
def nudged(model: Any) -> Iterator[None]:
    """Context manager: change each number of the embeddings by about one unit in its last place.

    That is three to four times the rounding error of a number, and simulates the rounding of later layers.
    """
    generator = torch.Generator().manual_seed(0)

    def nudge(module: Any, args: Any, states: Tensor) -> Tensor:
        way = torch.randint(0, 2, states.shape, generator=generator, device="cpu").to(states.device) * 2 - 1
        return (states.float() * (1 + torch.finfo(states.dtype).eps * way)).to(states.dtype)

    handle = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Context manager: evaluation mode without gradients. At the end, the model and its configurations are restored.

    Restored are the attributes of modules (mode, remembered positions and others), their buffers as objects, hooks, and
    the configurations with their attention implementations.
    """
    before = [(part, _shallow(vars(part))) for part in [*model.modules(), *_configs(model)]]
    logger = logging.getLogger("transformers")
    disabled, level = logger.disabled, logger.level
    try:
        model.eval()
        logger.setLevel(logging.ERROR)  # it warns at every change of the attention implementation
        with torch.no_grad():
            yield
    finally:
        logger.disabled = disabled
        logger.setLevel(level)
        for part, attributes in before:
            now = vars(part)
            for name in now.keys() - attributes.keys():
                del now[name]
            for name, value in attributes.items():
                if isinstance(value, dict) and isinstance(now.get(name), dict):
                    now[name].clear()  # other objects may hold the same dictionary
                    now[name].update(value)
                else:
                    now[name] = value


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy in which dictionaries (buffers, hooks) are copies as well."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}


def _configs(model: Any) -> list[Any]:
    """The configurations of a model and of its parts, each once."""
    configs: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
            waiting += [value for value in vars(config).values() if hasattr(value, "_attn_implementation")]
    return list(configs.values())
