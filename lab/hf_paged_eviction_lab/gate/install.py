"""Gates in a model: forward pre-hooks compute the scores, and hand them to the cache of the forward."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import (
    KeyOwner,
    LayerAllocator,
    PagedLayer,
    Queries,
    hand_over,
    model_fingerprint,
)

from .gates import GateLayer, Gates, load_gates
from .marks import in_place_of
from .modules import attention_modules, hidden_states, hooked
from .policy import Gate


def install_gates(model: Any, file: str | Path | Gates) -> ExitStack:
    """Let gates read the hidden states of a model, for caches with `policy=Gate(file)`.

    >>> with install_gates(model, "gates.safetensors"):  # doctest: +SKIP
    ...     cache = PagedEvictionCache(model.config, budget=1024, policy=Gate("gates.safetensors"))
    ...     model.generate(**inputs, past_key_values=cache)

    Registers one forward pre-hook in each self-attention module whose layer has a gate. A forward with another cache,
    or with other gates, is not changed.

    Args:
        model: a decoder.
        file: file that `paged-eviction fit-gate` wrote for this model, or `Gates`.

    Returns:
        A context manager; its end, or `close()`, removes the hooks.

    Raises:
        ValueError: there is no such file, it belongs to another model, or this model has no place for gates.
    """
    gates = file if isinstance(file, Gates) else load_gates(file)
    gates.check_fingerprint(model_fingerprint(model))
    modules = attention_modules(model)
    if modules.keys() != gates.layers.keys():
        raise ValueError(
            f"These gates are for the layers {sorted(gates.layers)}, and this model evicts in {sorted(modules)}. "
            f"Train some for this model with `{gates.command}`."
        )
    return hooked({module: GateHook(index, gates) for index, module in modules.items()})


class GateHook:
    """The forward pre-hook of one attention module.

    Args:
        layer_idx: index in the model.
        gates: of all layers.
    """

    def __init__(self, layer_idx: int, gates: Gates) -> None:
        self._layer_idx, self._digest = layer_idx, gates.digest
        self._layer: GateLayer = gates.layers[layer_idx]
        self._device: torch.device | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, PagedEvictionCache)), None)
        layer = None if cache is None else cache.layers[self._layer_idx]
        if cache is None or not isinstance(layer, PagedLayer) or not self._serves(layer):
            return None
        _check(cache, layer)
        hidden = hidden_states(args, kwargs)
        if hidden.device != self._device:
            self._layer, self._device = self._layer.to(hidden.device), hidden.device
        log_scores = self._layer.log_scores(hidden.detach()).mT
        gated = GatedCache(cache, layer, log_scores)

        def replaced(value: Any) -> Any:
            return gated if value is cache else value

        return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}

    def _serves(self, layer: PagedLayer) -> bool:
        policy = layer.policy
        return isinstance(policy, Gate) and policy.gates.digest == self._digest


def _check(cache: PagedEvictionCache, layer: PagedLayer) -> None:
    if layer.is_compileable:
        raise ValueError("static=True compiles steps without the hooks of gates: use static=False.")
    if isinstance(cache.allocator, LayerAllocator):
        raise ValueError(
            f"The allocator {cache.allocator.label!r} reads the queries of a prompt, and with gates it gets scores in "
            "their place. Use allocator='uniform', 'pyramid', 'heads' or 'ada_kv'."
        )


class GatedCache:
    """A cache for the forward of one attention module: `update` makes the layer expect scores.

    Args:
        cache: the real one.
        layer: of this module.
        log_scores: `[batch, KV heads of the model, q]` float32.
    """

    def __init__(self, cache: PagedEvictionCache, layer: PagedLayer, log_scores: Tensor) -> None:
        self._cache, self._owner = cache, GatedLayer(layer, log_scores)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `PagedEvictionCache.update`."""
        updated = self._cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        hand_over(cast(KeyOwner, self._owner), *updated, key_states.shape[2])
        return updated


class GatedLayer:
    """A `KeyOwner` in front of a layer, which hands it the scores of gates in place of queries.

    Args:
        layer: the layer.
        log_scores: see `GatedCache`.
    """

    def __init__(self, layer: PagedLayer, log_scores: Tensor) -> None:
        self._layer, self._log_scores = layer, log_scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property
    def kv_unchanged(self) -> bool:
        """See `KeyOwner`."""
        return self._layer.kv_unchanged

    @kv_unchanged.setter
    def kv_unchanged(self, unchanged: bool) -> None:
        self._layer.kv_unchanged = unchanged

    def attended(self, queries: Queries) -> None:
        """See `KeyOwner.attended`."""
        heads = self._layer.state.heads
        first = self._layer.state.scorer.local_heads.first_head(heads)
        self._layer.attended(in_place_of(queries, self._log_scores[:, first : first + heads]))
