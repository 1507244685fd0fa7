"""Keys and values in few bits in transformers' pages, by request and slot."""

from collections.abc import Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

from ..attention.weights import Logits
from ..precision import fused
from ..precision.codec import LEVELS, Codec
from ..precision.few_bits import FewBits
from ..precision.in_codes import InCodes
from ..store.columns import Columns, gather_slots
from ..store.exact import Exact, Newest
from ..tensors.parts import map_tensors
from .pages import Kept, Tokens, grown
from .records import NAMES, WORD, RecordLayout
from .stock_pages import StockPages


class CodedPages(StockPages):
    """Pages that hold records of tokens, and beside them the tokens of each request that are not rounded.

    What is rounded, and when, is as with `FewBits`. A single token waits among those that are not rounded, until
    `encode` writes the records of all that wait.

    Attributes:
        keys: the memory of the pages, `[words]` int64.
        rows: first word of the record of each slot; the rest as in `StockPages`.
        page_tokens: number of tokens per page.
        exact: of each layer, the tokens of all requests that are not rounded; slots are counted within a set.

    Args:
        coders: of the layers that evict.
        states, sets, slots, page_size: see `StockPages`.
    """

    rounds = True

    def __init__(self, coders: Sequence[FewBits], states: Tensor, sets: int, slots: int, page_size: int) -> None:
        super().__init__(states, len(coders), sets, slots, page_size)
        heads, dim = states.shape[1:]
        self.keys = self.values = states.view(torch.int64).flatten()
        self._coders, self.codecs = coders, [coder.codecs for coder in coders]
        self.layout = RecordLayout.of(self.codecs[0], heads // sets, dim)
        self.page_tokens = self.layout.per_page(page_size, states.element_size())
        self._row_words = heads * dim * states.element_size() // WORD
        self._of_set = torch.arange(len(coders) * sets, device=self.device) * (self.page_tokens * self.layout.words)
        self._word = torch.arange(self.layout.words, device=self.device)
        self._like = states.new_empty(0, heads, 0, dim)
        kinds = [coder.kinds(self._like, self._like)[1] for coder in coders]
        self.exact = [kind.change(lambda part: torch.empty_like(part, device=self.device)) for kind in kinds]

    # ---- requests -------------------------------------------------------------------------------------------------

    def reserve(self, number: int, requests: int, starts: Sequence[int], capacity: int) -> None:
        """See `StockPages.reserve`. No number of another request is left."""
        super().reserve(number, requests, starts, capacity)
        words = len(self._of_set) * self.page_tokens * self.layout.words
        for start in starts:
            self.keys[start * self._row_words : start * self._row_words + words] = 0
        for layer, exact in enumerate(self.exact):
            if requests > len(exact.count):
                exact = self.exact[layer] = exact.change(partial(grown, rows=requests))
            _of(exact, number).clear()

    def _rows_of(self, starts: Tensor) -> Tensor:
        tokens = torch.arange(self.page_tokens, device=self.device) * self.layout.words
        return (starts[:, None] * self._row_words + tokens).flatten()[: self._slots] + self._of_set[:, None]

    def save(self, number: int, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """See `StockPages.save`: records, and what is not rounded of each layer."""
        beside = [held.clone() for exact in self.exact for held in _of(exact, number).tensors()]
        return self._records(self.first(number, counts)), *beside

    def load(self, number: int, counts: Sequence[int], states: tuple[Tensor, ...]) -> None:
        """See `StockPages.load`."""
        records, *beside = states
        self._write(self.first(number, counts), records)
        targets = [held for exact in self.exact for held in _of(exact, number).tensors()]
        for target, held in zip(targets, beside, strict=True):
            target.copy_(held)

    # ---- records --------------------------------------------------------------------------------------------------

    def _records(self, places: Tensor) -> Tensor:
        """`[..., words]` of these places."""
        return self.keys[self.rows.view(-1)[places][..., None] + self._word]

    def _write(self, places: Tensor, records: Tensor) -> None:
        self.keys[self.rows.view(-1)[places][..., None] + self._word] = records

    def _encode(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, exact: Exact) -> Tensor:
        """Records `[n, S, m, words]` of tokens at `positions` `[n, S, m]`."""
        columns = self._coders[layer].encode(keys, values, positions, exact)
        return self.layout.pack({**columns, "positions": positions[..., None]})

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read`, of all sets of a layer; decodes."""
        numbers = places[:, 0, 0] // self.rows.shape[1]
        exact, columns = _rows_of(self.exact[layer], numbers), self.layout.unpack(self._records(places))
        states = self._coders[layer].decode(columns, exact)
        return exact.instead(self._in_sets(layer, numbers, places), *states)

    def _in_sets(self, layer: int, numbers: Tensor, places: Tensor) -> Tensor:
        """Numbers `[n, S, m]` of tokens in their sets."""
        firsts = numbers[:, None] * self.rows.shape[1] + self.starts[numbers][:, self._sets_of(layer)]
        return places - firsts[..., None]

    def _sets_of(self, layer: int) -> slice:
        return slice(layer * self._sets, (layer + 1) * self._sets)

    # ---- single tokens --------------------------------------------------------------------------------------------

    def put_singles(self, layer: int, numbers: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `StockPages.put_singles`."""
        exact = self.exact[layer]
        rows = len(exact.count)
        slots = self._in_sets(layer, numbers, places[..., None])[..., 0]

        def of_all(states: Tensor) -> Tensor:
            return states.new_zeros(rows, *states.shape[1:]).index_copy_(0, numbers, states)

        real = of_all(torch.ones_like(numbers, dtype=torch.bool)[:, None])
        exact.put(of_all(slots), of_all(keys[:, :, None]), of_all(values[:, :, None]), real)
        exact.counted(real)

    def newest(self, numbers: Tensor) -> list[Newest]:
        """See `Pages.newest`."""
        return [_rows_of(exact, numbers).newest_tokens() for exact in self.exact]

    def encode(self, numbers: Tensor) -> None:
        """See `Pages.encode`: layers that are alike at once."""

        def joined(*parts: Tensor) -> Tensor:
            return torch.cat(parts)

        layers = [_rows_of(exact, numbers) for exact in self.exact]
        all_newest = [exact.newest_tokens() for exact in layers]
        todo = list(range(len(layers)))
        while todo:
            first = self.codecs[todo[0]]
            alike = [layer for layer in todo if all(map(Codec.alike, first, self.codecs[layer]))]
            todo = [layer for layer in todo if layer not in alike]
            newest = map_tensors(joined, *(all_newest[layer] for layer in alike))
            exact = map_tensors(joined, *(layers[layer] for layer in alike))
            sets = slice(None, self._sets)
            records = self._encode(alike[0], newest.keys, newest.values, newest.positions[:, sets], exact)
            places = torch.cat(
                [self.places(numbers, all_newest[layer].slots[:, sets], self._sets_of(layer)) for layer in alike]
            )
            waits = newest.waits[:, sets, :, None]
            self._write(places, torch.where(waits, records, self._records(places)))
        for exact in self.exact:
            exact.coded.index_copy_(0, numbers, exact.count[numbers])

    # ---- attention ------------------------------------------------------------------------------------------------

    def least_saved(self, requests: int) -> float:
        """See `StockPages.least_saved`: all sets are read at once."""
        return inf

    def attend(
        self, layer: int, numbers: Tensor, places: Tensor, used: Tensor | None, query: Tensor, logits: Logits
    ) -> Tensor:
        """See `StockPages.attend`, of all sets of a layer."""
        exact = _rows_of(self.exact[layer], numbers)
        held = InCodes(self.codecs[layer], Columns(), exact)
        if query.device.type == "cpu" and fused.obstacle(held, query) is None:
            return self._attend_in_place(layer, places, used, exact, query, logits)
        columns = Columns()
        columns.use(self.layout.unpack(self._records(places)))
        held = InCodes(self.codecs[layer], columns, exact, visible=used)
        return fused.attend(held, query, None, logits).transpose(1, 2).to(query.dtype)

    def _attend_in_place(
        self, layer: int, places: Tensor, used: Tensor | None, exact: Exact, query: Tensor, logits: Logits
    ) -> Tensor:
        """By the function in C, which reads records where they lie."""
        first = self.rows.view(-1)[places] * WORD
        of_heads = torch.arange(self.layout.heads, device=self.device)[:, None] * self.layout.head
        records = (first[:, :, None] + of_heads).flatten(1, 2)  # [n, H, m]
        lengths = places.new_full(places.shape[:2], places.shape[2]) if used is None else used.sum(-1)
        lengths = lengths.repeat_interleave(self.layout.heads, 1)
        positions = self.keys.view(torch.int32)[(first + self.layout.position) // 4]
        memory = self.keys.view(torch.uint8)
        columns = {
            name: memory[start:].view(LEVELS) if name.endswith("levels") else memory[start:]
            for name, start in zip(NAMES, self.layout.offsets, strict=True)
        }
        columns["positions"] = positions[..., None]
        return fused.read_records(self.codecs[layer], columns, exact, records, lengths, query, logits).transpose(1, 2)

    # ---- several tokens -------------------------------------------------------------------------------------------

    def meet(self, layer: int, number: int, keys: Tensor, values: Tensor) -> None:
        """See `StockPages.meet`: the statistics of its codes."""
        _of(self.exact[layer], number).meet(self.codecs[layer], (keys, values), None)

    def append(self, layer: int, number: int, places: Tensor, tokens: Tokens) -> None:
        """See `Pages.append`."""
        (keys, values, positions), new = tokens, places.shape[-1]
        exact = _of(self.exact[layer], number)
        came = keys[:, :, -new:], values[:, :, -new:], positions[..., -new:]
        self._write(places, self._encode(layer, *came, exact))
        exact.find(positions, exact.count + new, lambda slots: (gather_slots(keys, slots), gather_slots(values, slots)))

    def pick(self, number: int, layer: int, tokens: Kept, keys: Tensor, values: Tensor, new: int) -> tuple[Tensor, ...]:
        """See `Pages.pick`: records; those that are not rounded are found again at once."""
        exact, held = _of(self.exact[layer], number), keys.shape[2] - new
        row, at = torch.tensor([number], device=self.device), torch.arange(held, device=self.device)
        beyond = (number + 1) * self.rows.shape[1] - 1  # behind the shorter sets there is no token to be chosen
        places = self.places(row, at.expand(1, self._sets, -1), self._sets_of(layer)).clamp_max(beyond)
        records, seen = [self._records(places)], exact.count + new
        if new:
            came = torch.arange(new, device=self.device) + exact.count[:, None, None]
            parts = keys[:, :, held:], values[:, :, held:], came.expand(1, self._sets, -1)
            records.append(self._encode(layer, *parts, exact))
        indices = tokens.indices[None]

        def states(slots: Tensor) -> tuple[Tensor, Tensor]:
            place = indices.expand(-1, slots.shape[1], -1).gather(-1, slots)
            return gather_slots(keys, place), gather_slots(values, place)

        exact.find(tokens.positions[None], seen, states)
        candidates = torch.cat(records, dim=2)[0]
        chosen = candidates.gather(1, tokens.indices[..., None].expand(-1, -1, candidates.shape[-1]))
        return (chosen.flatten(0, 1)[tokens.at],)

    def put(self, layer: int, places: Tensor, picked: tuple[Tensor, ...]) -> None:
        """See `Pages.put`."""
        self._write(places, *picked)


def _of(exact: Exact, number: int) -> Exact:
    """Views of the row of a request."""
    return exact.change(lambda held: held[number : number + 1])


def _rows_of(exact: Exact, numbers: Tensor) -> Exact:
    """Copies of the rows of these requests."""
    return exact.change(lambda held: held.index_select(0, numbers))
