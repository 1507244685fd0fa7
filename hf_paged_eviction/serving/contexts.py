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
from ..layer.scores import encode
from ..precision.few_bits import FewBits
from ..queries.observer import Observer
from ..store.columns import gather_slots
from ..store.tensors import byte_count
from ..table.bounds import spans_in
from ..table.budget import BlockBudget
from ..table.spans import Spans
from .layout import Layout
from .live_request import LiveRequest
from .records import NAMES, RecordLayout
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
        coded: number of tokens of the text that have codes, where tokens are rounded.
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
    coded: int
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
        full, scores = first.full, [part.scores for part in parts if part.scores is not None]
        return cls(
            first.counters.seen,
            tuple(limit for part in parts for limit in part.limits) if full else None,
            tuple(full_at for layer in paged for full_at in layer.table.phase.full_at[0].tolist()),
            torch.cat([part.positions for part in parts]).to(model.device),
            tuple(_fitting(states, model) for states in _joined_parts([part.states for part in parts])),
            torch.cat([layer.table.choice.block[0] for layer in paged]).to(model.device) if full else None,
            first.counters.seen,
            spans_in(first.phase.bounds)[0],
            tuple(part.observer for part in parts if part.observer is not None),
            torch.cat(scores).to(model.device) if scores else None,
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
            request.coded,
            request.spans,
            table.observers.copies(request.number),
            table.scores[places] if table.early else None,
        )

    def begin(self, request: LiveRequest, table: RequestTable, pages: StockPages) -> None:
        """Let a new request continue from this context."""
        request.seen, request.coded = self.seen, self.coded
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


@dataclass(frozen=True)
class _Part:
    """What one layer of a cache holds, see `ServedContext`.

    Attributes:
        states: keys and values, or records, `[sum of counts, ...]`; behind records what is not rounded.
    """

    states: tuple[Tensor, ...]
    positions: Tensor
    limits: list[int]
    observer: Observer | None
    scores: Tensor | None

    @classmethod
    def of(cls, layer: PagedLayer) -> "_Part":
        encode(layer.state)
        table, recorder, early = layer.table, layer.recorder, layer.state.early
        sets, held = table.positions.shape[1:]
        limits = [table.capacity] * sets if table.limits is None else table.limits[0].tolist()
        order = table.phase.order  # slots in order, empty ones last
        slots = torch.arange(held, device=table.device).expand(1, sets, -1) if order is None else order
        counts = (table.positions[0] >= 0).sum(-1).tolist()
        positions = table.positions.gather(-1, slots)
        observer = None if recorder is None or not layer.needs.queries else copy.deepcopy(recorder.observer)
        if observer is not None and order is not None:
            observer.columns.reorder(order)

        def joined(states: Tensor) -> Tensor:
            """`[sum of counts, ...]` of `[1, sets, tokens, ...]`."""
            return torch.cat([states[0, at, :count] for at, count in enumerate(counts)])

        states, beside = _states(layer, slots, positions)
        scores = joined(table.scores.gather(-1, slots)) if early else None
        return cls((*map(joined, states), *beside), joined(positions), limits, observer, scores)


def _states(layer: PagedLayer, slots: Tensor, positions: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What pages hold of the tokens in the slots `[1, S, n]`, `[1, S, n, ...]`, and beside them."""
    store, (sets, held) = layer.store, slots.shape[1:]
    if not isinstance(store.coder, FewBits):
        by_set = (gather_slots(states, slots).unflatten(1, (sets, -1)).transpose(2, 3) for states in store.read(held))
        return list(by_set), []
    columns = {name: gather_slots(column, slots) for name, column in store.columns.first(held).items() if name in NAMES}
    exact = store.exact.change(torch.clone)
    exact.reorder(slots)
    layout = RecordLayout.of(store.coder.codecs, exact.keys.shape[1] // sets, exact.keys.shape[-1])
    return [layout.pack({**columns, "positions": positions[..., None]})], list(exact.tensors())


def _joined_parts(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Of all layers: keys and values, or records and what lies beside."""
    if len(parts[0]) == 2:
        return [torch.cat(states) for states in zip(*parts, strict=True)]
    return [torch.cat([records for records, *_ in parts]), *(held for _, *beside in parts for held in beside)]


def _fitting(states: Tensor, model: Any) -> Tensor:
    """On the device of the model, numbers of tokens in its dtype."""
    return states.to(model.device, model.dtype if states.is_floating_point() else None)


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
        if _bits(layer) != _bits(first):
            return f"it was made with bits={_bits(layer)}, not {_bits(first)}"
        if cache.disposal != Drop():
            return "it was made with disposal=, which pages do not support"
        if layer.heads != first.heads:
            return f"it was made with heads={layer.heads!r}, not {first.heads!r}"
        if layer.shifts.any():
            return 'it moved tokens to other positions (positions="cache"), which pages do not support'
        if layer.table.pads.any():
            return "its text has padding"
        if layer.state.budget.table.unequal != first.state.budget.table.unequal:
            return "it was made with another allocator"
    return None


def _bits(layer: PagedLayer) -> tuple[int | None, ...] | None:
    return tuple(codec.bits for codec in layer.store.coder.codecs) or None


def _sizes(sizes: Any) -> str:
    return (
        f"budget={sizes.tokens}, block_size={sizes.block_size}, a protected prefix of {sizes.protected} and "
        f"recent_tokens={sizes.recent}"
    )
