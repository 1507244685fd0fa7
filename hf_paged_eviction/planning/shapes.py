"""What a model computes with, found on the meta device: no weight is loaded, and nothing is computed."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from ..integration.cache_argument import CACHE_ARGUMENT
from ..integration.models import is_paged, layer_plan
from .live import LiveBytes


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model.

    Attributes:
        config: its configuration.
        weights: bytes of weights and buffers.
        dtype: of keys and values.
        states: keys and values of one token in each layer with a cache, `[1, kv_heads, 1, dim]` on the meta device, by
            index of the layer.
        windows: tokens that a layer with a sliding window holds, by index; layers that are not here are paged.
        passing: most bytes of activations while a chunk is read into an empty cache, keys and values not counted.
        attending: the same at the moment when a layer hands keys and values to its cache.
    """

    config: Any
    weights: int
    dtype: torch.dtype
    states: dict[int, tuple[Tensor, Tensor]]
    windows: dict[int, int]
    passing: int
    attending: int

    @classmethod
    def of(cls, model: Module | PretrainedConfig, dtype: torch.dtype | None, chunk: int) -> "Shapes":
        """Find the sizes.

        Args:
            dtype: of the weights, for a configuration; None = what it says, else bfloat16.
            chunk: tokens that are read at once.

        Raises:
            TypeError: this is neither a model nor a configuration.
            ValueError: transformers cannot make the model on the meta device, or it cannot run there.
        """
        if isinstance(model, Module):
            config = model.config
            weights = sum(tensor.nbytes for tensor in _unique([*model.parameters(), *model.buffers()]))
            dtype = dtype or getattr(model, "dtype", None)
        elif isinstance(model, PretrainedConfig):
            config, weights = model, None
        else:
            raise TypeError(f"plan takes a model or its configuration, got {type(model).__name__}.")
        dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
        plan = layer_plan(config)
        shadow = _shadow(config, dtype)
        if weights is None:
            weights = sum(tensor.nbytes for tensor in _unique([*shadow.parameters(), *shadow.buffers()]))
        cache, passing, attending = _read(shadow, chunk)
        states = {
            index: (layer.keys[:, :, :1], layer.values[:, :, :1])
            for index, layer in enumerate(cache.layers)
            if getattr(layer, "keys", None) is not None and layer.keys.ndim == 4
        }
        windows = {
            index: layer.sliding_window
            for index, layer in enumerate(plan)
            if index in states and not is_paged(layer) and getattr(layer, "sliding_window", None)
        }
        return cls(config, weights, dtype, states, windows, passing, attending)

    def token_bytes(self, index: int) -> int:
        """Bytes of keys and values of one token of a row in a layer, in 16 bits."""
        return 2 * sum(states.numel() for states in self.states[index])

    @property
    def paged(self) -> list[int]:
        """Layers that evict."""
        return [index for index in self.states if index not in self.windows]


def prompt_bytes(model: Module | PretrainedConfig, tokens: int = 1) -> int:
    """Bytes of keys and values of a row of so many tokens in 16 bits, over all layers that evict.

    Raises:
        ValueError: see `Shapes.of`.
    """
    shapes = Shapes.of(model, None, 1)
    return tokens * sum(map(shapes.token_bytes, shapes.paged))


def _unique(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _shadow(config: Any, dtype: torch.dtype) -> Any:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    except Exception as error:  # each family has its own reasons
        raise ValueError(f"This {config.model_type} model cannot be planned: {error}.") from error


class _Noting(DynamicCache):  # type: ignore[misc]
    """Notes what is alive beside keys and values when a layer hands over new ones."""

    live: LiveBytes
    attending = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.attending = max(self.attending, self.live.now - held_bytes(self))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def held_bytes(cache: DynamicCache) -> int:
    """Bytes of keys and values of all layers."""
    both = ((getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers)
    return sum(states.untyped_storage().nbytes() for pair in both for states in pair if isinstance(states, Tensor))


@torch.inference_mode()
def _read(shadow: Any, chunk: int) -> tuple[DynamicCache, int, int]:
    """The cache after a chunk, and `Shapes.passing` and `Shapes.attending`."""
    cache, ids = _Noting(config=shadow.config), torch.zeros(1, chunk, dtype=torch.int64, device="meta")
    try:
        with LiveBytes() as cache.live:
            shadow(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    except Exception as error:  # operators that read numbers have none to read
        raise ValueError(
            f"This {shadow.config.model_type} model cannot be planned, because it does not run without numbers: {error}"
        ) from error
    return cache, max(cache.live.peak - held_bytes(cache), 0), cache.attending
