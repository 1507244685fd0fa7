"""One forward of continuous batching: its tokens, their slots and their attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..queries.observer import Queries
from ..queries.observers import Watched
from ..table.spans import Spans
from .comparing import compare
from .failures import alone
from .layout import Layout, size_classes
from .live_requests import LiveRequest
from .request_table import Kept, RequestTable

#: Bytes of keys and values that a CPU reads in the time that the operators of one group of sets take.
_WORTH_A_GROUP = 2 << 20


@dataclass(frozen=True)
class Entry:
    """The tokens of one request.

    Attributes:
        request: the request, which counts these tokens as seen.
        first: index of the first token in the forward.
        count: number of tokens.
        layout: layout after the forward, if the sets have to choose their best tokens; None = all tokens fit, or one
            token overwrites another.
    """

    request: LiveRequest
    first: int
    count: int
    layout: Layout | None

    @property
    def seen(self) -> int:
        """Number of tokens seen before this forward."""
        return self.request.seen - self.count

    @property
    def tokens(self) -> slice:
        """Indices in the forward."""
        return slice(self.first, self.first + self.count)


class Step:
    """The plan of a forward, which all its layers share.

    Args:
        request_table: positions, scores and victims of all live requests.
    """

    def __init__(self, request_table: RequestTable) -> None:
        self._request_table = request_table
        self._entries: list[Entry] = []
        self.begun = False
        self._count = 0
        self._written: Tensor | None = None
        self._rows = torch.empty(0, device="cpu")
        self._singles: list[Entry] = []
        self._counts: list[Sequence[int]] = []  # tokens of each set, with these
        self._widths: list[int] = []  # of each set, most tokens of a request
        self._numbers = self._seen = self._places = torch.empty(0, dtype=torch.int64, device="cpu")
        self._new: tuple[Tensor, Tensor] | None = None
        self._moves: list[tuple[Entry, int, Layout, Kept]] = []

    def add(self, request: LiveRequest, count: int, spans: Spans) -> None:
        """Add the next `count` tokens of a request, which protects these spans."""
        shares = request.shares
        if count == 1 and shares.foreseen is not None and request.seen == shares.capacity:
            self._share_out(request, shares.limits(shares.foreseen, spans))
        request.seen += count
        layout = None
        if count > 1 and request.seen > shares.capacity:
            layout = request.layout.choosing(shares.limits(request.seen, spans), request.seen, count)
        self._entries.append(Entry(request, self._count, count, layout))
        self._count += count

    # ---- the first layer -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Choose victims for blocks that are used up, and the slots of all tokens. Reads no tensor."""
        self.begun = True
        request_table, size = self._request_table, self._request_table.block_size
        self._singles = [entry for entry in self._entries if entry.count == 1]
        self._counts = [entry.request.layout.held(entry.request.seen) for entry in self._singles]
        self._widths = [max(set_counts) for set_counts in zip(*self._counts, strict=True)]
        due = [entry.request for entry in self._singles if entry.request.layout.is_due(entry.seen, size)]
        if due:
            self._choose(due)
        rows = [row for entry in self._entries if entry.layout is None for row in _tokens(entry)]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4).to(request_table.device)
        places, numbers, positions, behind = table.unbind(-1)
        if len(rows) < self._count:
            self._written = places
        slots = request_table.slots(numbers, positions, behind.bool())
        request_table.note(numbers, slots, positions)
        of_layers = (
            request_table.pages.rows[numbers].gather(1, slots).unflatten(1, (request_table.layers, request_table.sets))
        )
        self._rows = of_layers.transpose(0, 1).flatten(1)  # [L, n * S]
        for entry in self._entries:
            if entry.layout is None and entry.count > 1:
                with alone(entry.request, "read"):
                    request_table.grown(entry.request)
        single = [(entry.first, entry.request.number, entry.request.seen) for entry in self._singles]
        self._places, self._numbers, self._seen = (
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

    def _share_out(self, request: LiveRequest, limits: list[int]) -> None:
        """Let the sets of a request that single tokens have filled keep their best tokens, within new limits."""
        request_table, layout = self._request_table, request.layout.choosing(limits, request.seen, 0)
        kept_tokens = [
            request_table.best(request, layer, layout, self._watched(request, layer))
            for layer in range(request_table.layers)
        ]
        request_table.give(request, layout)
        request_table.grown(request)
        for layer, tokens in enumerate(kept_tokens):
            request_table.put(request, layer, layout, tokens)
        request.scored = True

    def _watched(self, request: LiveRequest, layer: int) -> Watched:
        """What a request holds in a layer, and what has been seen of queries."""
        keys, values, positions = self._held(request, layer, request.seen)
        return Watched(
            keys, values, positions, self._request_table.observers.statistics(request.number, layer, positions)
        )

    # ---- each layer ----------------------------------------------------------------------------------------------

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take in the new tokens of a layer, `[new, H, D]`, all requests one after the other."""
        written, pages = self._written, self._request_table.pages
        states = (keys, values) if written is None else (keys[written], values[written])
        pages.write(self._rows[layer], *(tensor.reshape(-1, *pages.keys.shape[1:]) for tensor in states))
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
        for entry in self._entries:
            if entry.count > 1 and entry.request.error is None:
                new = tuple(tensor[entry.tokens].transpose(0, 1)[None] for tensor in (keys, values))
                with alone(entry.request, "read"):
                    output[entry.tokens] = self._attend_together(entry, layer, query[:, :, entry.tokens], new, logits)
            if entry.request.error is not None:
                output[entry.tokens] = 0
        if layer == self._request_table.layers - 1:
            self._end()
        return output[None]

    def _attend_one_by_one(self, layer: int, query: Tensor, logits: Logits, output: Tensor) -> None:
        """The requests that bring one token each."""
        request_table = self._request_table
        single_queries = query[0, :, self._places].transpose(0, 1)[:, :, None]  # [n, query_heads, 1, D]
        counts = [held[request_table.of_layer(layer)] for held in self._counts]
        groups = size_classes(self._widths[request_table.of_layer(layer)], self._least_saved())
        if len(groups) == 1:
            output[self._places] = self._attend_sets(layer, single_queries, logits, counts, None)[:, :, 0]
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
            output[self._places] = set_outputs[:, :, 0]

    def _least_saved(self) -> float:
        """Tokens of a set that must not have to be read for a further group of sets to be worth its operators."""
        pages = self._request_table.pages
        if pages.device.type != "cpu":
            return inf
        of_token = 2 * pages.keys[0].numel() * pages.keys.element_size()
        return _WORTH_A_GROUP / (of_token * len(self._singles))

    def _attend_sets(
        self, layer: int, query: Tensor, logits: Logits, counts: Sequence[Sequence[int]], sets: Tensor | None
    ) -> Tensor:
        """Attention of the query heads of some sets, or of all: `[n, query_heads, 1, D]`.

        Args:
            counts: tokens of these sets, by request.
        """
        request_table = self._request_table
        slots, used = request_table.held(layer, self._numbers, self._seen, max(map(max, counts)), sets)
        keys, values = request_table.states(self._numbers, slots)
        mask = None if len({count for held in counts for count in held}) == 1 else used[:, :, None]
        return compare(query, keys, values, mask, logits)

    def _see_singles(self, layer: int, query: Tensor, new: Tensor, logits: Logits) -> None:
        """Note the queries of the requests that bring one token each; `new` `[new, H, D]` keys of the forward."""
        for entry in self._singles:
            with alone(entry.request, "observed"):
                own = Queries(query[:, :, entry.tokens], new[entry.tokens].transpose(0, 1)[None], logits)
                self._see_single(entry.request, layer, own)

    def _see_single(self, request: LiveRequest, layer: int, queries: Queries) -> None:
        request_table, size = self._request_table, self._request_table.block_size
        request_table.observers.see_one(request.number, layer, queries)
        if request.layout.is_due(request.seen, size):
            keys, _, positions = self._held(request, layer, request.seen)
            in_step = request.layout.in_step(size)
            request_table.observers.block_filled(request.number, layer, keys, positions, request.seen, in_step)

    def _attend_together(
        self, entry: Entry, layer: int, query: Tensor, new: tuple[Tensor, ...], logits: Logits
    ) -> Tensor:
        """A request that brings several tokens: `[new, query_heads, D]`."""
        keys, values, positions = self._with_held(entry, layer, new)
        mask = None
        if entry.seen:
            last = positions[0, 0, -entry.count :]
            mask = (positions >= 0)[..., None, :] & (positions[..., None, :] <= last[:, None])  # [1, S, new, tokens]
        output = compare(query, keys, values, mask, logits, causal=mask is None)
        self._seen_together(entry, layer, Queries(query, keys, logits), (keys, values, positions))
        return output[0].transpose(0, 1)

    def _with_held(self, entry: Entry, layer: int, new: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The held tokens of a request in a layer, followed by new ones `[1, H, n, D]`, and their positions."""
        request_table, request = self._request_table, entry.request
        came = torch.arange(entry.seen, request.seen, device=request_table.device).expand(1, request_table.sets, -1)
        if not entry.seen:
            return new[0], new[1], came
        *states, positions = self._held(request, layer, entry.seen)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(states, new, strict=True))
        return keys, values, torch.cat([positions, came], dim=-1)

    def _held(self, request: LiveRequest, layer: int, seen: int) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values `[1, H, n, D]` that a request holds in a layer after `seen` tokens, and their
        positions."""
        request_table = self._request_table
        row, count = (torch.tensor([number], device=request_table.device) for number in (request.number, seen))
        width = max(request.layout.held(seen)[request_table.of_layer(layer)])
        slots, used = request_table.held(layer, row, count, width)
        return (*request_table.states(row, slots), request_table.positions_in(row, slots, used))

    def _seen_together(self, entry: Entry, layer: int, queries: Queries, tokens: tuple[Tensor, Tensor, Tensor]) -> None:
        request_table, number, positions = self._request_table, entry.request.number, tokens[2]
        held = positions.shape[-1] - entry.count
        observed = request_table.observers.see_several(number, layer, queries, positions, held)
        if entry.layout is None:
            request_table.observers.settle(number, layer, None)
            return
        best = request_table.best(entry.request, layer, entry.layout, Watched(*tokens, observed))
        if entry.layout.same_slots(entry.request.layout):
            request_table.put(entry.request, layer, entry.layout, best)
        else:  # its slots may belong to a layer that is not read yet
            self._moves.append((entry, layer, entry.layout, best))

    def _end(self) -> None:
        """Finish the forward, after all layers."""
        request_table = self._request_table
        for entry in self._entries:
            if entry.layout is not None and entry.request.error is None:
                with alone(entry.request, "evicted"):
                    request_table.give(entry.request, entry.layout)
                    request_table.grown(entry.request)
                    entry.request.scored = True
        for entry, layer, layout, best in self._moves:
            if entry.request.error is None:
                with alone(entry.request, "evicted"):
                    request_table.put(entry.request, layer, layout, best)
        self._moves = []


def _tokens(entry: Entry) -> Iterator[tuple[int, int, int, int]]:
    """Of each token: its place in the forward, its row, its position, and whether it is put behind those held
    whatever block is overwritten."""
    for at in range(entry.count):
        yield entry.first + at, entry.request.number, entry.seen + at, int(entry.count > 1)
