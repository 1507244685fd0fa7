"""Decodes token by token, as `generate` does it, behind contexts of random keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import CACHE_ARGUMENT, cache_kwargs

from ..running.efficiency import Stopwatch
from .variants import Held

#: Tokens per update of a cache that evicts: its peak is the budget and one chunk.
_CHUNK = 1024
#: Caches of one run that share the code of the forward, far more than anybody has in one process.
_GRAPHS = 64


class Decoder:
    """One filled cache, and the steps that are timed on it.

    A step is what `generate` does for a token: inputs prepared by the model (for a compileable cache with the 4-D mask,
    made outside of the compiled forward), the forward, the next token by argmax. Nothing waits for the device in
    between, other than what the model and the cache do.

    Args:
        model: any decoder of transformers.
        forward: its forward, compiled or not.
        held: a filled cache.
        rows: batch size.
    """

    def __init__(self, model: Any, forward: Callable[..., Any], held: Held, rows: int) -> None:
        self.model, self.forward, self.held, self.rows = model, forward, held, rows
        self.token = torch.full((rows, 1), 7, dtype=torch.long, device=model.device)
        self.seen = held.seen
        self._accepted = inspect.signature(model.prepare_inputs_for_generation).parameters

    @torch.no_grad()
    def run(self, steps: int) -> float:
        """Decode `steps` tokens per row; seconds. A cache that grows is taken back first, outside of the timing."""
        if self.held.rewinds:
            self._rewind()
        mask = torch.ones(self.rows, self.seen + 1, dtype=torch.long, device=self.model.device)
        position = torch.full((self.rows, 1), self.seen, dtype=torch.long, device=self.model.device)
        with self.held.around():
            watch = Stopwatch(self.model.device)
            for _ in range(steps):
                self._step(mask, position)
                mask = torch.cat([mask, mask.new_ones(self.rows, 1)], dim=-1)
                position = position + 1
                self.seen += 1
            return watch.lap()

    def _step(self, mask: Tensor, position: Tensor) -> None:
        extra: dict[str, Any] = {}
        if "next_sequence_length" in self._accepted:
            extra["next_sequence_length"] = 1
        inputs = self.model.prepare_inputs_for_generation(
            self.token,
            **{CACHE_ARGUMENT: self.held.cache},
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            **extra,
        )
        logits = self.forward(**inputs, return_dict=True).logits
        self.token = logits[:, -1].argmax(-1, keepdim=True)

    def _rewind(self) -> None:
        cache, grown = self.held.cache, self.seen - self.held.seen
        if not grown:
            return
        static = [layer for layer in cache.layers if getattr(layer, "is_compileable", False)]
        for layer in static:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, Tensor) and not layer.is_sliding:
                length.fill_(self.held.seen)
        # A sliding layer cannot be taken back, and neither can a cache with one: it goes on growing, by few tokens.
        if not static and not any(getattr(layer, "is_sliding", False) for layer in cache.layers):
            cache.crop(-grown)
        elif not static:
            return
        self.seen = self.held.seen


# ---- the compiled forward -------------------------------------------------------------------------------------------


def compiled(model: Any) -> Callable[..., Any]:
    """One full graph of static shapes; CUDA graphs on CUDA."""
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    return torch.compile(model.forward, fullgraph=True, dynamic=False, mode=mode)


def graphs() -> int:
    """Graphs compiled so far in this process."""
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def room_for_graphs() -> Iterator[None]:
    """Many caches in one process do not reach the limit of recompilations; all graphs are forgotten afterwards."""
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    try:
        with config.patch({name: _GRAPHS}):
            yield
    finally:
        torch._dynamo.reset()


# ---- contexts without a prefill -------------------------------------------------------------------------------------


class LayerShape(NamedTuple):
    """`[heads, width]` of what a layer caches."""

    heads: int
    key_width: int
    value_width: int


@torch.no_grad()
def layer_shapes(model: Any) -> dict[int, LayerShape]:
    """What each layer of a model caches, seen in a forward of one token; without layers that cache no keys."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True, **cache_kwargs(model, cache))
    shapes = {}
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == 4:
            shapes[index] = LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
    return shapes


@torch.no_grad()
def fill(cache: Any, shapes: dict[int, LayerShape], rows: int, tokens: int, model: Any) -> None:
    """Feed random keys and values to every layer."""
    chunk = _CHUNK if isinstance(cache, PagedEvictionCache) else max(tokens, 1)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        if isinstance(cache, PagedEvictionCache):
            cache.get_mask_sizes(count, 0)  # as a forward does
        for index, shape in shapes.items():
            sizes = ((rows, shape.heads, count, width) for width in (shape.key_width, shape.value_width))
            keys, values = (torch.randn(size, dtype=model.dtype, device=model.device) for size in sizes)
            cache.update(keys, values, index)
