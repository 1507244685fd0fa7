"""One forward of transformers' continuous batching: the slots of its tokens and their attention."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..masks.visible import visible
from ..queries.observer import Queries
from .comparing import compare
from .failures import alone
from .layout import Layout, size_classes
from .live_requests import LiveRequest
from .request_table import Kept, RequestTable
from .step import Entry, Step
from .stock_pages import StockPages

#: Bytes of keys and values that a CPU reads in the time that the operators of one group of sets take.
_WORTH_A_GROUP = 2 << 20


class StockStep(Step):
    """A forward over transformers' pages, in which a failure ends one request alone.

    Args:
        request_table: positions, scores and victims of all live requests.
        pages: keys and values.
    """

    def __init__(self, request_table: RequestTable, pages: StockPages) -> None:
        super().__init__(request_table)
        self._pages, self.begun = pages, False
        self._written: Tensor | None = None
        self._places = torch.empty(0, device="cpu")
        self._singles: list[Entry] = []
        self._counts: list[Sequence[int]] = []  # tokens of each set, with these
        self._widths: list[int] = []  # of each set, most tokens of a request
        self._numbers = self._seen = self._first = torch.empty(0, dtype=torch.int64, device="cpu")
        self._new: tuple[Tensor, Tensor] | None = None
        self._moves: list[tuple[Entry, int, Kept]] = []

    # ---- the first layer -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Choose victims for blocks that are used up, and the slots of all tokens. Reads no tensor."""
        self.begun = True
        request_table = self._request_table
        self._singles = [entry for entry in self.entries if entry.count == 1]
        self._counts = [entry.request.layout.held(entry.request.seen) for entry in self._singles]
        self._widths = [max(set_counts) for set_counts in zip(*self._counts, strict=True)]
        due = self._due()
        if due:
            self._choose(due)
        rows = [row for entry in self.entries if entry.layout is None for row in _tokens(entry)]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).to(request_table.device)
        first, numbers, positions = table.unbind(-1)
        if len(rows) < self.count:
            self._written = first
        places = request_table.next_places(numbers, positions)
        self._places = places.unflatten(1, (request_table.layers, request_table.sets)).transpose(0, 1).flatten(1)
        single = [(entry.first, entry.request.number, entry.request.seen) for entry in self._singles]
        self._first, self._numbers, self._seen = (
            torch.tensor(single, dtype=torch.int64, device="cpu").view(-1, 3).to(request_table.device).unbind(-1)
        )

    def _choose(self, due: Sequence[LiveRequest]) -> None:
        """Choose victims of all these requests; if that fails, of each alone, to find those that fail."""
        try:
            self._request_table.choose(due)
        except Exception:
            for request in due:
                with alone(request, "scored"):
                    self._request_table.choose([request])

    # ---- each layer ----------------------------------------------------------------------------------------------

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take in the new tokens of a layer, `[new, H, D]`, all requests one after the other."""
        written = self._written
        states = (keys, values) if written is None else (keys[written], values[written])
        own = (tensor.reshape(-1, *self._pages.keys.shape[1:]) for tensor in states)
        self._pages.write(layer, self._places[layer], *own)
        self._new = keys, values

    def attend(self, layer: int, query: Tensor, logits: Logits) -> Tensor:
        """Attention of the new tokens of a layer, followed by eviction.

        Args:
            query: `[1, query_heads, new, D]`.

        Returns:
            `[1, new, query_heads, D]`.
        """
        if self._new is None:
            raise RuntimeError("Attention ran before the cache had the new tokens of this layer.")
        (keys, values), self._new = self._new, None
        output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        if self._singles:
            self._attend_one_by_one(layer, query, logits, output)
            if self._request_table.observers.any:
                self._see_singles(layer, query, keys, logits)
        for entry in self.entries:
            if entry.count > 1 and entry.request.error is None:
                with alone(entry.request, "read"):
                    own = query[:, :, entry.tokens]
                    output[entry.tokens] = self._attend_together(entry, layer, own, keys, values, logits)
            if entry.request.error is not None:
                output[entry.tokens] = 0
        if layer == self._request_table.layers - 1:
            self._end()
        return output[None]

    def _attend_one_by_one(self, layer: int, query: Tensor, logits: Logits, output: Tensor) -> None:
        """The requests that bring one token each."""
        request_table = self._request_table
        single_queries = query[0, :, self._first].transpose(0, 1)[:, :, None]  # [n, query_heads, 1, D]
        counts = [held[request_table.of_layer(layer)] for held in self._counts]
        groups = size_classes(self._widths[request_table.of_layer(layer)], self._least_saved())
        if len(groups) == 1:
            output[self._first] = self._attend_sets(layer, single_queries, logits, counts, None)[:, :, 0]
        else:
            of_sets, set_outputs = (
                single_queries.unflatten(1, (request_table.sets, -1)),
                torch.empty_like(single_queries),
            )
            for group in groups:
                sets = torch.tensor(group, device=request_table.device)
                sinks = None if logits.sinks is None else logits.sinks.view(request_table.sets, -1)[sets].flatten()
                own = [[held[at] for at in group] for held in counts]
                part = self._attend_sets(layer, of_sets[:, sets].flatten(1, 2), replace(logits, sinks=sinks), own, sets)
                set_outputs.unflatten(1, (request_table.sets, -1))[:, sets] = part.unflatten(1, (len(group), -1))
            output[self._first] = set_outputs[:, :, 0]

    def _least_saved(self) -> float:
        """Tokens of a set that must not have to be read for a further group of sets to be worth its operators."""
        if self._pages.device.type != "cpu":
            return inf
        of_token = 2 * self._pages.keys[0].numel() * self._pages.keys.element_size()
        return _WORTH_A_GROUP / (of_token * len(self._singles))

    def _attend_sets(
        self, layer: int, query: Tensor, logits: Logits, counts: Sequence[Sequence[int]], sets: Tensor | None
    ) -> Tensor:
        """Attention of the query heads of some sets, or of all: `[n, query_heads, 1, D]`.

        Args:
            counts: tokens of these sets, by request.
        """
        request_table = self._request_table
        places, used = request_table.held(layer, self._numbers, self._seen, max(map(max, counts)), sets)
        keys, values = self._pages.read(layer, places)
        mask = None if len({count for held in counts for count in held}) == 1 else used[:, :, None]
        return compare(query, keys, values, mask, logits)

    def _see_singles(self, layer: int, query: Tensor, new: Tensor, logits: Logits) -> None:
        """Note the queries of the requests that bring one token each; `new` `[new, H, D]` keys of the forward."""
        for entry in self._singles:
            with alone(entry.request, "observed"):
                own = Queries(query[:, :, entry.tokens], new[entry.tokens].transpose(0, 1)[None], logits)
                self._see_single(entry.request, layer, own)

    def _attend_together(
        self, entry: Entry, layer: int, query: Tensor, new_keys: Tensor, new_values: Tensor, logits: Logits
    ) -> Tensor:
        """A request that brings several tokens: `[new, query_heads, D]`."""
        keys, values, positions = self._with_held(entry, layer, new_keys, new_values)
        mask = None
        if entry.seen:
            mask = visible(positions, positions[:, 0, -entry.count :])
        output = compare(query, keys, values, mask, logits, causal=mask is None)
        self._seen_together(entry, layer, Queries(query, keys, logits), (keys, values, positions))
        return output[0].transpose(0, 1)

    def _keep(self, entry: Entry, layer: int, layout: Layout, tokens: Kept) -> None:
        """See `Step._keep`. Slots of another layout may belong to a layer that is not read yet."""
        if layout.limits == entry.before.limits:
            self._request_table.put(entry.request, layer, tokens)
        else:
            self._moves.append((entry, layer, tokens))

    def _end(self) -> None:
        """Finish the forward, after all layers."""
        request_table = self._request_table
        for entry in self.entries:
            if entry.layout is not None and entry.request.error is None:
                with alone(entry.request, "evicted"):
                    request_table.give(entry.request, entry.layout)
                    entry.request.scored = True
        for entry, layer, tokens in self._moves:
            if entry.request.error is None:
                with alone(entry.request, "evicted"):
                    request_table.put(entry.request, layer, tokens)
        self._moves = []


def _tokens(entry: Entry) -> Iterator[tuple[int, int, int]]:
    """Of each token: its place in the forward, its row and its position."""
    for at in range(entry.count):
        yield entry.first + at, entry.request.number, entry.seen + at
