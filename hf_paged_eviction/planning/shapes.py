"""What a model computes with, found on the meta device: no weight is loaded, and nothing is computed."""

import copy
import weakref
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from ..integration.cache_argument import CACHE_ARGUMENT
from ..integration.models import is_paged, layer_plan


class Shapes:
    """Sizes of a model.

    Attributes:
        config: its configuration.
        weights: bytes of weights and buffers.
        dtype: of keys and values.
        states: keys and values of one token in each layer with a cache, `[1, kv_heads, 1, dim]` on the meta device, by
            index of the layer.
        windows: tokens that a layer with a sliding window holds, by index; layers that are not here are paged.

    Args:
        dtype: of the weights, for a configuration; None = what it says, else bfloat16.

    Raises:
        TypeError: this is neither a model nor a configuration.
        ValueError: transformers cannot make the model on the meta device, or it cannot run there.
    """

    def __init__(self, model: Module | PretrainedConfig, dtype: torch.dtype | None = None) -> None:
        if not isinstance(model, Module | PretrainedConfig):
            raise TypeError(f"plan takes a model or its configuration, got {type(model).__name__}.")
        self.config = cast(Any, model.config if isinstance(model, Module) else model)
        dtype = dtype or getattr(model, "dtype", None) or getattr(self.config, "dtype", None)
        self.dtype: torch.dtype = dtype or torch.bfloat16
        try:
            with torch.device("meta"):
                self._shadow = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), dtype=self.dtype).eval()
        except Exception as error:  # each family has its own reasons
            raise ValueError(f"This {self.config.model_type} model cannot be planned: {error}.") from error
        whole = model if isinstance(model, Module) else self._shadow
        self.weights = sum(tensor.nbytes for tensor in chain(whole.parameters(), whole.buffers()))
        cache = DynamicCache(config=self._shadow.config)
        self._read(cache, 1, 1)
        self.states: dict[int, tuple[Tensor, Tensor]] = {
            index: (layer.keys[:, :, :1], layer.values[:, :, :1])
            for index, layer in enumerate(cache.layers)
            if isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.ndim == 4
        }
        self.windows: dict[int, int] = {
            index: layer.sliding_window
            for index, layer in enumerate(layer_plan(self.config))
            if index in self.states and not is_paged(layer) and getattr(layer, "sliding_window", None)
        }

    def token_bytes(self, index: int) -> int:
        """Bytes of keys and values of one token of a row in a layer, in 16 bits."""
        keys, values = self.states[index]
        return 2 * (keys.numel() + values.numel())

    @property
    def paged(self) -> list[int]:
        """Layers that evict."""
        return [index for index in self.states if index not in self.windows]

    def passing(self, past: int, chunk: int, rows: int, copies: bool, waits: bool) -> int:
        """Most bytes of temporary tensors while a chunk is read behind `past` tokens, with what attention reads.

        Args:
            chunk: tokens that are read at once.
            rows: texts at a time.
            copies, waits: see `_Behind`.
        """
        cache = _Behind(self._shadow.config, copies, waits)
        for index, states in self.states.items():
            cache.layers[index].update(*(one.expand(rows, -1, past, -1) for one in states))
        live = LiveBytes()
        with live:
            self._read(cache, chunk, rows)
        return live.peak

    @torch.inference_mode()
    def _read(self, cache: DynamicCache, count: int, rows: int) -> None:
        ids = torch.zeros(rows, count, dtype=torch.int64, device="meta")
        try:
            self._shadow(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        except Exception as error:  # operators that read numbers have none to read
            raise ValueError(
                f"This {self.config.model_type} model cannot be planned, because it does not run without numbers: "
                f"{error}"
            ) from error


class _Behind(DynamicCache):  # type: ignore[misc]
    """A cache whose layers hold what they got first, and forget what comes.

    Args:
        copies: whether what is held is decoded before it can be read.
        waits: whether a layer keeps what attention read until the next layer.
    """

    def __init__(self, config: Any, copies: bool, waits: bool) -> None:
        super().__init__(config=config)
        self._copies, self._waits, self._kept = copies, waits, None

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


class LiveBytes(TorchDispatchMode):
    """Counts the tensors that operators inside this context make, until they are freed. Temporaries inside of one
    operator do not count.

    Attributes:
        now: bytes that are alive.
        peak: most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage(), given)
        return output

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = id(storage), storage.nbytes()
        if key in given or key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
