"""Contexts that requests continue from; their tokens are copied into the pages of each request."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..cache import PagedEvictionCache
from ..disposals import Drop
from ..layer.paged import PagedLayer
from ..queries.observer import Observer
from ..store.columns import gather_slots
from ..store.tensors import byte_count
from ..table.budget import BlockBudget
from ..table.spans import Spans
from .layout import Layout
from .live_requests import LiveRequest
from .request_table import RequestTable
from .stock_pages import StockPages


@dataclass(frozen=True)
class ServedContext:
    """The held tokens of one text, from which requests can continue.

    Shapes: `Q` sets of tokens in all layers, `n` held tokens of all sets, `G` KV heads of a set, `D` head size.

    Attributes:
        seen: number of tokens of the text.
        limits: number of slots of each set, if some set is full; None before that.
        full_at: see `Layout`.
        positions: `[n]` int64 positions of the tokens, set by set.
        states: what pages hold of these tokens: keys and values `[n, G, D]`, or see `CodedPages.save`.
        block: `[Q]` int64, the block that new tokens overwrite; None = the last one.
        spans: protected spans of the text, its start included.
        observed: statistics of its queries, layer by layer.
        scores: `[n]` float32 of these tokens, if they were scored before they were rounded; else None.
    """

    seen: int
    limits: tuple[int, ...] | None
    full_at: tuple[int, ...]
    positions: Tensor
    states: tuple[Tensor, ...]
    block: Tensor | None
    spans: Spans
    observed: tuple[Observer, ...] = ()
    scores: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        tensors = (self.positions, *self.states, *(() if self.scores is None else (self.scores,)))
        return byte_count(*tensors) + sum(observer.bytes for observer in self.observed)

    @classmethod
    def of(
        cls, cache: PagedEvictionCache, sizes: BlockBudget, layers: Mapping[int, PagedLayer], model: Any
    ) -> "ServedContext":
        """Take over the tokens of a cache, which must not be used afterwards.

        Args:
            sizes, layers: of `ServingOptions`, which the cache has to fit.

        Raises:
            ValueError: the options of the cache differ from those of `paged_batching`, or it holds states that pages
                cannot hold.
        """
        reason = _why_not(cache, sizes, layers)
        if reason is not None:
            raise ValueError(f"This context cannot be served: {reason}.")
        paged = [layer for _, layer in cache.paged_layers]
        first, parts = paged[0].table, [_Part.of(layer) for layer in paged]
        keys, values, positions = (torch.cat([getattr(part, name) for part in parts]) for name in _NAMES)
        full, kind = first.full, {"device": model.device, "dtype": model.dtype}
        return cls(
            first.counters.seen,
            tuple(limit for part in parts for limit in part.limits) if full else None,
            tuple(full_at for layer in paged for full_at in layer.table.phase.full_at[0].tolist()),
            positions.to(model.device),
            (keys.to(**kind), values.to(**kind)),
            torch.cat([layer.table.choice.block[0] for layer in paged]).to(model.device) if full else None,
            first.spans[0],
            tuple(part.observer for part in parts if part.observer is not None),
        )

    @classmethod
    def held_by(cls, request: LiveRequest, table: RequestTable, pages: StockPages) -> "ServedContext":
        """The present tokens of a request, as a context for others."""
        layout, full = request.layout, request.seen > request.capacity
        counts = layout.held(request.seen)
        places = pages.first(request.number, counts)
        return cls(
            request.seen,
            layout.limits if full else None,
            layout.full_at,
            table.positions[places],
            pages.save(request.number, counts),
            table.block[request.number].clone() if full else None,
            request.spans,
            table.observers.copies(request.number),
            table.scores[places] if table.early else None,
        )

    def begin(self, request: LiveRequest, table: RequestTable, pages: StockPages) -> None:
        """Let a new request continue from this context."""
        request.seen = self.seen
        if self.limits is not None:
            table.give(request, Layout(self.limits, self.full_at))
        counts = request.layout.held(request.seen)
        places = pages.first(request.number, counts)
        table.positions[places] = self.positions
        if self.scores is not None:
            table.scores[places] = self.scores
        pages.load(request.number, counts, self.states)
        if self.block is not None:
            table.block[request.number] = self.block
        table.observers.give(request.number, self.observed)


_NAMES = ("keys", "values", "positions")


@dataclass(frozen=True)
class _Part:
    """What one layer of a cache holds, see `ServedContext`."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    limits: list[int]
    observer: Observer | None

    @classmethod
    def of(cls, layer: PagedLayer) -> "_Part":
        table, recorder = layer.table, layer.recorder
        sets, held = table.positions.shape[1:]
        limits = [table.capacity] * sets if table.limits is None else table.limits[0].tolist()
        order = table.phase.order  # slots in order, empty ones last
        slots = torch.arange(held, device=table.device).expand(1, sets, -1) if order is None else order
        counts = (table.positions[0] >= 0).sum(-1).tolist()
        keys, values = (
            gather_slots(states, slots)[0].unflatten(0, (sets, -1)).transpose(1, 2)  # [sets, tokens, G, D]
            for states in layer.store.read(held)
        )
        positions = table.positions.gather(-1, slots)
        observer = None if recorder is None or not layer.needs.queries else copy.deepcopy(recorder.observer)
        if observer is not None and order is not None:
            observer.columns.reorder(order)

        def joined(states: Tensor) -> Tensor:
            """`[sum of counts, ...]` of `[sets, tokens, ...]`."""
            return torch.cat([states[at, :count] for at, count in enumerate(counts)])

        return cls(joined(keys), joined(values), joined(positions[0]), limits, observer)


def _why_not(cache: PagedEvictionCache, sizes: BlockBudget, served: Mapping[int, PagedLayer]) -> str | None:
    layers, first = dict(cache.paged_layers), next(iter(served.values()))
    if set(layers) != set(served):
        return "it is of another model"
    if len(cache.layers) != len(layers):
        return "some layers of this model do not evict, and pages cannot restore their states"
    for layer in layers.values():
        if layer.state.table is None:
            return "it is empty"
        if replace(layer.state.budget.mean, spans=()) != sizes:
            return f"it was made with {_sizes(layer.state.budget.mean)}, not {_sizes(sizes)}"
        if layer.policy != first.policy:
            return f"it was made with the policy {layer.policy.label!r}, not {first.policy.label!r}"
        if layer.positions.shape[0] != 1:
            return "it has several rows"
        if type(layer.store) is not type(first.store) or cache.disposal != Drop():
            return "it was made with bits= or disposal=, which pages do not support"
        if layer.heads != first.heads:
            return f"it was made with heads={layer.heads!r}, not {first.heads!r}"
        if layer.shifts.any():
            return 'it moved tokens to other positions (positions="cache"), which pages do not support'
        if layer.table.pads.any():
            return "its text has padding"
        if layer.state.budget.split.unequal != first.state.budget.split.unequal:
            return "it was made with another allocator"
    return None


def _sizes(sizes: Any) -> str:
    return (
        f"budget={sizes.tokens}, block_size={sizes.block_size}, a protected prefix of {sizes.protected} and "
        f"recent_tokens={sizes.recent}"
    )
