"""One forward of several requests: their tokens, and which of them stay.

Where attention reads is not decided here; see `StockStep` for transformers' pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..queries.observer import Queries
from .layout import Layout
from .live_request import LiveRequest, alone
from .pages import Kept, Tokens
from .table import RequestTable


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
    def waiting(self) -> int:
        """Number of tokens before that have no codes yet, where tokens are rounded."""
        return self.seen - self.request.coded

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
        self.entries: list[Entry] = []
        self.count = 0

    # ---- before the first layer ----------------------------------------------------------------------------------

    def add(self, request: LiveRequest, count: int) -> None:
        """Add the next `count` tokens of a request."""
        shares = request.shares
        if count == 1 and shares.foreseen is not None and request.seen == shares.capacity:
            self._share_out(request, shares.limits(shares.foreseen, request.spans))
        request.seen += count
        layout = None
        if count > 1 and request.seen > shares.capacity:
            layout = request.layout.choosing(shares.limits(request.seen, request.spans), request.seen, count)
        self.entries.append(Entry(request, self.count, count, layout))
        self.count += count

    def _due(self) -> Sequence[LiveRequest]:
        """Requests that bring one token, for which some set needs another block."""
        size = self._request_table.block_size
        return [
            entry.request
            for entry in self.entries
            if entry.count == 1 and entry.request.layout.is_due(entry.seen, size)
        ]

    def _for_all(self, work: Callable[[Sequence[LiveRequest]], None], requests: Sequence[LiveRequest]) -> None:
        """Do this for all these requests; if that fails, for each alone, to find those that fail."""
        try:
            work(requests)
        except Exception:
            for request in requests:
                with alone(request, "scored"):
                    work([request])

    def _share_out(self, request: LiveRequest, limits: Sequence[int]) -> None:
        """Let the sets of a request that single tokens have filled keep their best tokens, within new limits."""
        table, seen = self._request_table, request.seen
        if table.early:
            table.score_newest([request])
        if table.pages.rounds:
            table.encode([request])
            request.coded = seen
        layout = request.layout.choosing(limits, seen, 0)
        kept_tokens = [
            table.best(request, layer, layout, table.tokens(request, layer, seen), 0) for layer in range(table.layers)
        ]
        table.give(request, layout)
        for layer, tokens in enumerate(kept_tokens):
            table.put(request, layer, tokens)

    # ---- each layer ----------------------------------------------------------------------------------------------

    def _see_single(self, request: LiveRequest, layer: int, queries: Queries) -> None:
        """Note the queries of a request that brings one token."""
        table, size = self._request_table, self._request_table.block_size
        observer = table.observer(request, layer, queries.key)
        observer.keep(queries, None)
        of_layer = request.layout.of(table.of_layer(layer))  # a layer knows nothing of when others are full
        if of_layer.is_due(request.seen, size):
            keys, _, positions = table.tokens(request, layer, request.seen)
            (_, seen), due = table.numbers([request]), torch.ones(1, dtype=torch.bool, device=table.device)
            observer.observe_block(keys, positions, seen, due, of_layer.in_step(size))

    def _with_held(self, entry: Entry, layer: int, keys: Tensor, values: Tensor) -> Tokens:
        """The held tokens of a request in a layer, followed by its new ones; `[tokens, H, D]` of the whole forward."""
        table, request = self._request_table, entry.request
        came = torch.arange(entry.seen, request.seen, device=table.device).expand(1, table.sets, -1)
        new = tuple(tensor[entry.tokens].transpose(0, 1)[None] for tensor in (keys, values))
        if not entry.seen:
            return new[0], new[1], came
        *states, positions = table.tokens(request, layer, entry.seen)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(states, new, strict=True))
        return keys, values, torch.cat([positions, came], dim=-1)

    def _seen_together(self, entry: Entry, layer: int, queries: Queries, tokens: Tokens) -> None:
        """Note the queries of a request that brings several tokens, and choose those that stay."""
        table, request, positions = self._request_table, entry.request, tokens[2]
        if table.observes:
            observer, held = table.observer(request, layer, queries.key), positions.shape[-1] - entry.count
            observer.observe_many(queries, positions, positions[:, 0, held:], held, all_real=True)
            if entry.layout is None:
                observer.settle(None, request.capacity)
        if entry.layout is not None:
            self._keep(entry, layer, entry.layout, table.best(request, layer, entry.layout, tokens, entry.count))

    def _keep(self, entry: Entry, layer: int, layout: Layout, kept: Kept) -> None:
        """Replace the tokens of a layer, before those of the layers behind it are read."""
        table = self._request_table
        table.pages.give(entry.request.number, layout.limits, table.of_layer(layer))
        table.put(entry.request, layer, kept)
