"""Contexts that requests continue from; their tokens are copied into the pages of each request."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.internals import (
    BlockBudget,
    Drop,
    FewBits,
    Layout,
    LiveRequest,
    Observer,
    PagedLayer,
    RequestTable,
    Spans,
    byte_count,
    encode,
    gather_slots,
    spans_in,
)

from .records import NAMES, RecordLayout
from .stock_pages import StockPages


@dataclass(frozen=True)
class ServedContext:
    """The held tokens of one text, from which requests can continue.

    Shapes: `Q` sets of tokens in all layers, `n` held tokens of all sets, `G` KV heads of a set, `D` head size.

    Attributes:
        seen: number of tokens of the text.
        coded: number of these that have codes, where tokens are rounded.
        spans: protected spans of the text, its start included.
        layout: sizes of the sets, if some set is full; None before that.
        block: `[Q]` int64, the block that new tokens overwrite; None = the last one.
        positions: `[n]` int64 positions of the tokens, set by set.
        scores: `[n]` float32, if they were scored before they were rounded; else None.
        states: what pages hold of these tokens: keys and values `[n, G, D]`, or see `CodedPages.save`.
        observed: statistics of its queries, layer by layer.
        weights: those that were active when it was made, see `Weights.key`; "" = of a prompt, known by its digest.
    """

    seen: int
    coded: int
    spans: Spans
    layout: Layout | None
    block: Tensor | None
    positions: Tensor
    scores: Tensor | None
    states: tuple[Tensor, ...]
    observed: list[Observer]
    weights: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        tensors = (self.positions, *self.states, *(() if self.scores is None else (self.scores,)))
        return byte_count(*tensors) + sum(observer.bytes for observer in self.observed)

    @classmethod
    def of(
        cls,
        cache: PagedEvictionCache,
        sizes: BlockBudget,
        layers: Mapping[int, PagedLayer],
        model: Any,
        weights: str = "",
    ) -> "ServedContext":
        """Take over the tokens of a cache, which must not be used afterwards.

        Args:
            sizes, layers: of `ServingOptions`, which the cache has to fit.
            weights: see above.

        Raises:
            ValueError: the options of the cache differ from those of `paged_batching`, or it holds states that pages
                cannot hold.
        """
        reason = _why_not(cache, sizes, layers)
        if reason is not None:
            raise ValueError(f"This context cannot be served: {reason}.")
        paged = [layer for _, layer in cache.paged_layers]
        table, parts = paged[0].table, [_held(layer) for layer in paged]
        columns = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
        positions, scores = columns.pop("positions").to(model.device), columns.pop("scores", None)
        layout = block = None
        if table.full:
            limits = [limit for layer in paged for limit in layer.table.phase.usable(layer.table.capacity)[0].tolist()]
            full_at = [at for layer in paged for at in layer.table.phase.full_at[0].tolist()]
            layout = Layout(tuple(limits), tuple(full_at))
            block = torch.cat([layer.table.choice.block[0] for layer in paged]).to(model.device)
        return cls(
            seen=table.counters.seen,
            coded=max(int(paged[0].store.exact.coded), 0) if paged[0].store.rounds else table.counters.seen,
            spans=spans_in(table.phase.bounds)[0],
            layout=layout,
            block=block,
            positions=positions,
            scores=None if scores is None else scores.to(model.device),
            states=tuple(
                _fitting(part, model) for part in (*columns.values(), *(part for _, beside in parts for part in beside))
            ),
            observed=[observer for layer in paged for observer in _observed(layer)],
            weights=weights,
        )

    @classmethod
    def held_by(cls, request: LiveRequest, table: RequestTable, pages: StockPages) -> "ServedContext":
        """The present tokens of a request, as a context for others."""
        full, counts = request.seen > request.capacity, request.layout.held(request.seen)
        places = pages.first(request.number, counts)
        return cls(
            seen=request.seen,
            coded=request.coded,
            spans=request.spans,
            layout=request.layout if full else None,
            block=table.block[request.number].clone() if full else None,
            positions=table.positions[places],
            scores=table.scores[places] if table.early else None,
            states=pages.save(request.number, places),
            observed=copy.deepcopy(request.observers),
        )

    def begin(self, request: LiveRequest, table: RequestTable, pages: StockPages) -> None:
        """Let a new request continue from this context."""
        request.seen, request.coded = self.seen, self.coded
        if self.layout is not None:
            table.give(request, self.layout)
        if self.block is not None:
            table.block[request.number] = self.block
        places = pages.first(request.number, request.layout.held(request.seen))
        table.positions[places] = self.positions
        if self.scores is not None:
            table.scores[places] = self.scores
        pages.load(request.number, places, self.states)
        request.observers = copy.deepcopy(self.observed)


def _held(layer: PagedLayer) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What a layer of a cache holds, by name, `[n, ...]`; and what lies beside records."""
    encode(layer.state)
    table, store, beside = layer.table, layer.store, list[Tensor]()
    columns, slots = {"positions": table.positions}, _slots(layer)
    if layer.state.early:
        columns["scores"] = table.scores
    columns = {name: column.gather(-1, slots) for name, column in columns.items()}
    sets, held = slots.shape[1:]
    if isinstance(store.coder, FewBits):
        codes = {name: column for name, column in store.columns.first(held).items() if name in NAMES}
        codes = {name: gather_slots(column, slots) for name, column in codes.items()}
        exact = store.exact.change(torch.clone)
        exact.reorder(slots)
        beside = exact.tensors()
        layout = RecordLayout.of(store.coder.codecs, exact.keys.shape[1] // sets, exact.keys.shape[-1])
        columns["records"] = layout.pack({**codes, "positions": columns["positions"][..., None]})
    else:
        for name, states in zip(("keys", "values"), store.read(held), strict=True):
            columns[name] = gather_slots(states, slots).unflatten(1, (sets, -1)).transpose(2, 3)
    counts = (table.positions[0] >= 0).sum(-1).tolist()
    held_of = {name: [column[0, at, :count] for at, count in enumerate(counts)] for name, column in columns.items()}
    return {name: torch.cat(of_sets) for name, of_sets in held_of.items()}, beside


def _slots(layer: PagedLayer) -> Tensor:
    """`[1, S, held]`, the slots of a layer in order, empty ones last."""
    table = layer.table
    slots = torch.arange(table.held, device=table.device).expand_as(table.positions)
    return slots if table.phase.order is None else table.phase.order


def _observed(layer: PagedLayer) -> list[Observer]:
    """Copies of the statistics of a layer, in the order of `_slots`; none if its policy needs none."""
    if layer.recorder is None or not layer.needs.queries:
        return []
    observer = copy.deepcopy(layer.recorder.observer)
    observer.columns.reorder(_slots(layer))
    return [observer]


def _fitting(states: Tensor, model: Any) -> Tensor:
    """On the device of the model, numbers of tokens in its dtype."""
    return states.to(model.device, model.dtype if states.is_floating_point() else None)


def _why_not(cache: PagedEvictionCache, sizes: BlockBudget, served: Mapping[int, PagedLayer]) -> str | None:
    layers, first = dict(cache.paged_layers), next(iter(served.values()))
    if set(layers) != set(served):
        return "it is of another model"
    if len(cache.layers) != len(layers):
        return "some layers of this model do not evict, and pages cannot restore their states"
    if any(layer.state.table is None for layer in layers.values()):
        return "it is empty"
    for layer in layers.values():
        mean, unequal = replace(layer.state.budget.mean, spans=()), layer.state.budget.table.unequal
        reasons = (
            (mean != sizes, f"it was made with {_sizes(mean)}, not {_sizes(sizes)}"),
            (
                layer.policy != first.policy,
                f"it was made with the policy {layer.policy.label!r}, not {first.policy.label!r}",
            ),
            (layer.positions.shape[0] != 1, "it has several rows"),
            (_bits(layer) != _bits(first), f"it was made with bits={_bits(layer)}, not {_bits(first)}"),
            (cache.disposal != Drop(), "it was made with disposal=, which pages do not support"),
            (layer.heads != first.heads, f"it was made with heads={layer.heads!r}, not {first.heads!r}"),
            (layer.shifts.any(), 'it moved tokens to other positions (positions="cache"), which pages do not support'),
            (layer.table.pads.any(), "its text has padding"),
            (unequal != first.state.budget.table.unequal, "it was made with another allocator"),
        )
        for applies, reason in reasons:
            if applies:
                return reason
    return None


def _bits(layer: PagedLayer) -> tuple[int | None, ...] | None:
    return tuple(codec.bits for codec in layer.store.coder.codecs) or None


def _sizes(sizes: Any) -> str:
    return (
        f"budget={sizes.tokens}, block_size={sizes.block_size}, a protected prefix of {sizes.protected} and "
        f"recent_tokens={sizes.recent}"
    )
