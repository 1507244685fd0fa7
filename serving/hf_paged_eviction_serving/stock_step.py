"""One forward of transformers' continuous batching: the slots of its tokens and their attention."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_paged_eviction.internals import Entry, Kept, Layout, Logits, Queries, RequestTable, Step, alone, visible

from .attention import compare
from .stock_pages import StockPages


class StockStep(Step):
    """A forward over transformers' pages, in which a failure ends one request alone. Single tokens are written before
    attention, and several tokens of a request after it.

    Args:
        request_table: positions, scores and victims of all live requests.
        pages: keys and values.
    """

    def __init__(self, request_table: RequestTable, pages: StockPages) -> None:
        super().__init__(request_table)
        self._pages, self.begun = pages, False
        self._singles: list[Entry] = []
        self._counts: list[Sequence[int]] = []  # tokens of each set, with these
        self._widths: list[int] = []  # of each set, most tokens of a request
        self._meets: set[int] = set()  # entries whose tokens are the first to be encoded, by the first of each
        self._moves = defaultdict[int, list[tuple[int, Kept]]](list)  # layers and tokens, by the first of a request

    # ---- the first layer -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Choose victims for blocks that are used up, and the slots of all tokens. Reads no tensor."""
        self.begun, table = True, self._request_table
        self._encode_waiting()
        self._singles = [entry for entry in self.entries if entry.count == 1]
        self._counts = [entry.request.layout.held(entry.request.seen) for entry in self._singles]
        self._widths = [max(set_counts) for set_counts in zip(*self._counts, strict=True)]
        if due := self._due():
            self._for_all(table.choose, due)
        single = [(entry.first, entry.request.number, entry.request.seen) for entry in self._singles]
        first, self._numbers, self._seen = (
            torch.tensor(single, dtype=torch.int64, device="cpu").view(-1, 3).to(table.device).unbind(-1)
        )
        self._first = slice(None) if len(single) == self.count else first
        positions = self._seen - 1
        places = table.pages.places(self._numbers, table.next_in_set(self._numbers, positions)[..., None])[..., 0]
        table.positions[places] = positions[:, None].expand_as(places)
        self._places = places.unflatten(1, (table.layers, table.sets)).transpose(0, 1)  # [L, n, S]

    def _encode_waiting(self) -> None:
        """Encode the tokens that wait, of all requests, when one has a block of them or brings several tokens."""
        size = self._request_table.block_size
        waits = [entry for entry in self.entries if entry.waiting and (entry.request.coded or entry.waiting >= size)]
        if self._pages.rounds and any(entry.count > 1 or entry.waiting >= size for entry in waits):
            self._for_all(self._request_table.encode, [entry.request for entry in waits])
            for entry in waits:
                entry.request.coded = entry.seen
        several = [entry for entry in self.entries if entry.count > 1]
        self._meets = {entry.first for entry in several if not entry.request.coded}
        for entry in several:
            entry.request.coded = entry.request.seen

    # ---- each layer ----------------------------------------------------------------------------------------------

    def attend(self, layer: int, keys: Tensor, values: Tensor, query: Tensor, logits: Logits) -> Tensor:
        """Attention of the new tokens of a layer, followed by eviction.

        Args:
            keys, values: `[new, H, D]`, all requests one after the other.
            query: `[1, query_heads, new, D]`.

        Returns:
            `[1, new, query_heads, D]`.
        """
        output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        if self._singles:
            single_k, single_v = keys[self._first], values[self._first]
            self._pages.put_singles(layer, self._numbers, self._places[layer], single_k, single_v)
            output[self._first] = self._attend_one_by_one(layer, query[0, :, self._first].transpose(0, 1), logits)
        for entry in self.entries:
            if entry.request.error is None and (entry.count > 1 or self._request_table.observes):
                with alone(entry.request, "read"):
                    own = query[:, :, entry.tokens]
                    if entry.count > 1:
                        output[entry.tokens] = self._attend_together(entry, layer, own, keys, values, logits)
                    else:
                        new = keys[entry.tokens].transpose(0, 1)[None]
                        self._see_single(entry.request, layer, Queries(own, new, logits))
            if entry.request.error is not None:
                output[entry.tokens] = 0
        if layer == self._request_table.layers - 1:
            self._end()
        return output[None]

    def _attend_one_by_one(self, layer: int, query: Tensor, logits: Logits) -> Tensor:
        """The requests that bring one token each; `[n, query_heads, D]`. Sets that hold many more tokens than others
        are read apart."""
        table = self._request_table
        of_layer, sets = table.of_layer(layer), table.sets
        groups = size_classes(self._widths[of_layer], self._pages.least_saved(len(self._singles)))
        of_sets, output = query.unflatten(1, (sets, -1)), torch.empty_like(query)
        for group in groups:
            some, own, own_logits = None, query, logits
            if len(groups) > 1:
                some = torch.tensor(group, device=table.device)
                sinks = None if logits.sinks is None else logits.sinks.view(sets, -1)[some].flatten()
                own, own_logits = of_sets[:, some].flatten(1, 2), replace(logits, sinks=sinks)
            counts = {held[of_layer.start + at] for held in self._counts for at in group}
            places, used = table.held(layer, self._numbers, self._seen, max(counts), some)
            mask = None if len(counts) == 1 else used
            part = self._pages.attend(layer, self._numbers, places, mask, own[:, :, None], own_logits)[:, :, 0]
            if some is None:
                return part
            output.unflatten(1, (sets, -1))[:, some] = part.unflatten(1, (len(group), -1))
        return output

    def _attend_together(
        self, entry: Entry, layer: int, query: Tensor, new_keys: Tensor, new_values: Tensor, logits: Logits
    ) -> Tensor:
        """A request that brings several tokens: `[new, query_heads, D]`."""
        keys, values, positions = tokens = self._with_held(entry, layer, new_keys, new_values)
        mask = visible(positions, positions[:, 0, -entry.count :]) if entry.seen else None
        output = compare(query, keys, values, mask, logits, causal=mask is None)
        if entry.first in self._meets:
            new_k, new_v = (states[:, :, -entry.count :] for states in (keys, values))
            self._pages.meet(layer, entry.request.number, new_k, new_v, waiting=entry.seen)
        self._seen_together(entry, layer, Queries(query, keys, logits), tokens)
        if entry.layout is None:
            table = self._request_table
            table.put(entry.request, layer, table.all_of(entry.request, layer, tokens, entry.count))
        return output[0].transpose(0, 1)

    def _keep(self, entry: Entry, layer: int, layout: Layout, kept: Kept) -> None:
        """See `Step._keep`. Slots of another layout may belong to a layer that is not read yet."""
        if layout.limits == entry.request.layout.limits:
            self._request_table.put(entry.request, layer, kept)
        else:
            self._moves[entry.first].append((layer, kept))

    def _end(self) -> None:
        """Finish the forward, after all layers."""
        table = self._request_table
        for entry in self.entries:
            if entry.layout is not None and entry.request.error is None:
                with alone(entry.request, "evicted"):
                    table.give(entry.request, entry.layout)
                    for layer, kept in self._moves.pop(entry.first, ()):
                        table.put(entry.request, layer, kept)


def size_classes(widths: Sequence[int], least_saved: float) -> list[list[int]]:
    """Group sets by their number of tokens. A read of a group is as wide as its largest set.

    Args:
        widths: number of tokens of each set.
        least_saved: a group is split if that saves reading at least this many tokens.

    Returns:
        Groups of indices into `widths`, largest sets first; one group if no split is worth it.
    """
    if max(widths) - min(widths) < least_saved / len(widths):
        return [[*range(len(widths))]]
    return _split(sorted(range(len(widths)), key=lambda place: -widths[place]), widths, least_saved)


def _split(places: list[int], widths: Sequence[int], least_saved: float) -> list[list[int]]:
    saved = [(widths[places[0]] - widths[place]) * (len(places) - at) for at, place in enumerate(places)]
    if max(saved) < least_saved:
        return [places]
    cut = saved.index(max(saved))
    return [*_split(places[:cut], widths, least_saved), *_split(places[cut:], widths, least_saved)]
