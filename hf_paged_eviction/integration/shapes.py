"""What a model computes with, found on the meta device: no weight is loaded, and nothing is computed."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from .cache_argument import CACHE_ARGUMENT
from .live import LiveBytes
from .models import is_paged, layer_plan


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
        reader: reads chunks on the meta device.
    """

    config: Any
    weights: int
    dtype: torch.dtype
    states: dict[int, tuple[Tensor, Tensor]]
    windows: dict[int, int]
    reader: "Reader"

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
        reader = Reader(shadow, chunk)
        cache = reader.first()
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
        return cls(config, weights, dtype, states, windows, reader)

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


class _Behind(DynamicCache):  # type: ignore[misc]
    """A cache whose layers have read some tokens, and forget what comes.

    Args:
        before: the cache of one token, on the meta device.
        past: tokens that were read; layers with a sliding window hold fewer.
        copies: whether what is held is decoded before it can be read.
        waits: whether a layer keeps what attention read until the next layer.
    """

    def __init__(self, config: Any, before: DynamicCache, past: int, copies: bool, waits: bool) -> None:
        super().__init__(config=config)
        self._copies, self._waits, self._kept = copies, waits, None
        for layer, one in zip(self.layers, before.layers, strict=True):
            if isinstance(getattr(one, "keys", None), Tensor) and one.keys.ndim == 4:
                layer.update(*(states[:, :, :1].expand(-1, -1, past, -1) for states in (one.keys, one.values)))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layer = self.layers[layer_idx]
        if not isinstance(getattr(layer, "keys", None), Tensor):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._kept = None
        held = layer.keys, layer.values
        shown = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer.keys, layer.values = held
        if self._copies:  # the tokens are decoded for attention, and again to choose which of them stay
            decoded = [states.clone() for states in held]
            pairs = zip(decoded, (key_states, value_states), strict=True)
            again = [torch.cat(pair, dim=-2) for pair in pairs]
            del decoded, again
        if self._waits:
            self._kept = shown
        return shown


class Reader:
    """Reads chunks of tokens on the meta device, and counts the bytes of what is alive beside the cache.

    Args:
        shadow: the model on the meta device.
        chunk: tokens that are read at once.
    """

    def __init__(self, shadow: Any, chunk: int) -> None:
        self._shadow, self._chunk = shadow, chunk
        self._known: dict[tuple[int, int, bool, bool], int] = {}

    def first(self) -> DynamicCache:
        """The cache after one token of a text."""
        return self._after_one(1)

    def passing(self, past: int, rows: int, copies: bool, waits: bool) -> int:
        """Most bytes of temporary tensors while a chunk is read behind `past` tokens, with what attention reads.

        Args:
            rows: texts at a time.
            copies, waits: see `_Behind`.
        """
        key = past, rows, copies, waits
        if key not in self._known:
            cache = _Behind(self._shadow.config, self._after_one(rows), past, copies, waits)
            with LiveBytes() as live:
                self._read(cache, self._chunk, rows)
            self._known[key] = live.peak
        return self._known[key]

    def _after_one(self, rows: int) -> DynamicCache:
        cache = DynamicCache(config=self._shadow.config)
        self._read(cache, 1, rows)
        return cache

    @torch.inference_mode()
    def _read(self, cache: DynamicCache, count: int, rows: int) -> None:
        ids = torch.zeros(rows, count, dtype=torch.int64, device="meta")
        try:
            self._shadow(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        except Exception as error:  # operators that read numbers have none to read
            name = self._shadow.config.model_type
            raise ValueError(
                f"This {name} model cannot be planned, because it does not run without numbers: {error}"
            ) from error
