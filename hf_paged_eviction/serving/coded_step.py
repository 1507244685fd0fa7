"""One forward of transformers' continuous batching over pages with tokens in few bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..parts import map_tensors
from ..precision.exact import Newest
from ..queries.observer import Queries
from ..queries.observers import Watched
from .coded_pages import CodedPages
from .failures import alone
from .live_requests import LiveRequest
from .request_table import RequestTable
from .step import Entry, Tokens
from .stock_step import StockStep


class CodedStep(StockStep):
    """A forward in which single tokens wait for their codes, and several tokens of a request are encoded once they
    have been attended to.

    Args:
        request_table: positions, scores and victims of all live requests.
        pages: records of tokens.
    """

    def __init__(self, request_table: RequestTable, pages: CodedPages) -> None:
        super().__init__(request_table, pages)
        self._coded = pages
        self._of_singles = torch.empty(0, dtype=torch.int64, device="cpu")

    def add(self, request: LiveRequest, count: int) -> None:
        """See `Step.add`."""
        shares = request.shares
        if count == 1 and shares.foreseen is not None and request.seen == shares.capacity:
            self._encode([request])
        super().add(request, count)

    def begin(self) -> None:
        """See `StockStep.begin`. Tokens that wait are encoded, of all requests at once, when one has a block of them or
        brings several tokens."""
        waiting, size = self._coded.waiting, self._request_table.block_size
        requests = [entry.request for entry in self.entries]
        if any(waiting[entry.request.number] >= (size if entry.count == 1 else 1) for entry in self.entries):
            self._encode(requests)
        elif self._request_table.early and (due := self._due()):
            self._score(due, self._coded.newest(self._request_table.numbers(due)[0]))
        super().begin()
        for entry in self._singles:
            waiting[entry.request.number] += 1
        written = [entry for entry in self.entries if entry.layout is None for _ in range(entry.count)]
        singles = [at for at, entry in enumerate(written) if entry.count == 1]
        self._of_singles = torch.tensor(singles, dtype=torch.int64, device=self._request_table.device)

    def _encode(self, requests: Sequence[LiveRequest]) -> None:
        waiting = self._coded.waiting
        if wait := [request for request in requests if waiting[request.number]]:
            self._score(wait, self._coded.encode(self._request_table.numbers(wait)[0]))
            waiting.update(dict.fromkeys((request.number for request in wait), 0))

    def _score(self, requests: Sequence[LiveRequest], newest: Sequence[Newest]) -> None:
        """Score the tokens of these requests that wait or waited; if that fails, of each alone, to find those that
        fail."""
        try:
            self._score_waiting(requests, newest)
        except Exception:
            for at, request in enumerate(requests):
                own = [map_tensors(lambda part, at=at: part[at : at + 1], layer) for layer in newest]
                with alone(request, "scored"):
                    self._score_waiting([request], own)

    def _score_waiting(self, requests: Sequence[LiveRequest], newest: Sequence[Newest]) -> None:
        self._request_table.note_waiting(*self._request_table.numbers(requests), newest)

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `StockStep.take`; requests with several tokens attend first."""
        self._new = keys, values
        if self._singles:
            places = self._places[layer].view(-1, self._request_table.sets)[self._of_singles]
            own = (states[self._first][:, :, None] for states in (keys, values))
            self._coded.put_singles(layer, self._numbers, places, *own)

    def _attend_one_by_one(self, layer: int, query: Tensor, logits: Logits, output: Tensor) -> None:
        table = self._request_table
        counts = {count for held in self._counts for count in held[table.of_layer(layer)]}
        places, used = table.held(layer, self._numbers, self._seen, max(counts))
        single_queries = query[0, :, self._first].transpose(0, 1)[:, :, None]
        attended = self._coded.attend(layer, self._numbers, places, used, len(counts) == 1, single_queries, logits)
        output[self._first] = attended[:, :, 0].to(output.dtype)

    def _seen_together(self, entry: Entry, layer: int, queries: Queries, tokens: Tokens) -> None:
        """See `Step._seen_together`."""
        keys, values, positions = tokens
        number, new = entry.request.number, entry.count
        if not entry.seen:
            self._coded.meet(layer, number, keys, values)
        super()._seen_together(entry, layer, queries, tokens)
        if entry.layout is None:
            self._request_table.note_new(entry.request, layer, Watched(*tokens, ({}, None)), new)
            self._coded.append(layer, number, keys, values, positions, new)
