"""A saved cache that requests begin with: read once, copied into the pages of each."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..cache import PagedEvictionCache
from ..disposals import Drop
from ..layer.paged import PagedLayer
from ..table.budget import BlockBudget
from ..table.spans import Spans


class Served(Protocol):
    """What a context has to fit, see `ServingOptions`."""

    @property
    def sizes(self) -> BlockBudget: ...

    @property
    def layers(self) -> dict[int, PagedLayer]: ...


@dataclass(frozen=True)
class ServedContext:
    """What one text has left in a cache, layer by layer.

    Shapes: `L` paged layers, `S` sets of tokens (1, or one for each KV head), `h` tokens held, `H` KV heads, `D` head
    size.

    Attributes:
        seen: tokens of the text.
        positions: `[L, S, h]` int64, of the token in each slot.
        keys, values: of each layer, `[h, H, D]`.
        block: `[L, S]` int64, the block that new tokens overwrite once all slots are in use.
        full_at: tokens seen when all slots were in use.
        spans: of the text that are never evicted, its beginning included.
    """

    seen: int
    positions: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    block: Tensor
    full_at: int
    spans: Spans

    @classmethod
    def of(cls, cache: PagedEvictionCache, options: Served, model: Any) -> "ServedContext":
        """Take over what a cache holds; it must not be used any more.

        Raises:
            ValueError: its requests would not be bounded and evicted as those of `paged_batching` are, or it holds what
                pages do not.
        """
        reason = _why_not(cache, options)
        if reason is not None:
            raise ValueError(f"This context cannot be served: {reason}.")
        layers = dict(cache.paged_layers)
        tables = [layer.table for layer in layers.values()]
        return cls(
            tables[0].counters.seen,
            torch.stack([table.positions[0] for table in tables]).to(model.device),
            tuple(_slots(layer.keys, layer.held, model) for layer in layers.values()),
            tuple(_slots(layer.values, layer.held, model) for layer in layers.values()),
            torch.stack([table.choice.block[0] for table in tables]).to(model.device),
            int(tables[0].phase.full_at[0, 0]),
            tables[0].spans[0],
        )


def _slots(states: Any, held: int, model: Any) -> Tensor:
    taken: Tensor = states[0, :, :held].transpose(0, 1).to(model.device, model.dtype).contiguous()
    return taken


def _why_not(cache: PagedEvictionCache, options: Served) -> str | None:
    layers, first = dict(cache.paged_layers), next(iter(options.layers.values()))
    if set(layers) != set(options.layers):
        return "it belongs to another model"
    if len(cache.layers) != len(layers):
        return "the layers of this model that do not evict have states of their own, which pages do not take over"
    for layer in layers.values():
        if layer.state.table is None:
            return "it is empty"
        if replace(layer.budget, spans=()) != options.sizes:
            return f"it was made with {_sizes(layer.budget)}, not {_sizes(options.sizes)}"
        if layer.policy != first.policy:
            return f"it was made with the policy {layer.policy.label!r}, not {first.policy.label!r}"
        if layer.positions.shape[0] != 1:
            return "it has several rows"
        if type(layer.store) is not type(first.store) or cache.disposal != Drop():
            return "pages hold keys and values as they came, and forget what leaves them"
        if layer.heads != first.heads:
            return f"it was made with heads={layer.heads!r}, not {first.heads!r}"
        if layer.shifts.any():
            return "tokens keep their places in the text here"
        if layer.table.phase.order is not None or bool((layer.positions < 0).any()):
            return "its text was padded"
    return None


def _sizes(sizes: Any) -> str:
    return (
        f"budget={sizes.tokens}, block_size={sizes.block_size}, a protected prefix of {sizes.protected} and "
        f"recent_tokens={sizes.recent}"
    )
