"""Keys and values in few bits in transformers' pages, by request and slot."""

from collections.abc import Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

from hf_paged_eviction.internals import (
    LEVELS,
    Codec,
    Columns,
    Exact,
    FewBits,
    InCodes,
    Kept,
    Logits,
    fused,
    gather_slots,
    grown,
    map_tensors,
)

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
        self._alike: list[list[int]] = []  # layers whose tokens are encoded together
        for layer, codecs in enumerate(self.codecs):
            groups = (group for group in self._alike if all(map(Codec.alike, self.codecs[group[0]], codecs)))
            group = next(groups, None)
            if group is None:
                self._alike.append(group := [])
            group.append(layer)

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

    def save(self, number: int, places: Tensor) -> tuple[Tensor, ...]:
        """See `StockPages.save`: records, and what is not rounded of each layer."""
        beside = [held.clone() for exact in self.exact for held in _of(exact, number).tensors()]
        return *self.copy(places), *beside

    def load(self, number: int, places: Tensor, states: tuple[Tensor, ...]) -> None:
        """See `StockPages.load`."""
        records, *beside = states
        self.write(0, places, (records,))
        targets = [held for exact in self.exact for held in _of(exact, number).tensors()]
        for target, held in zip(targets, beside, strict=True):
            target.copy_(held)

    # ---- records --------------------------------------------------------------------------------------------------

    def copy(self, places: Tensor) -> tuple[Tensor, ...]:
        """Copy places `[...]` to records `[..., words]`."""
        return (self.keys[self.rows.view(-1)[places][..., None] + self._word],)

    def write(self, layer: int, places: Tensor, states: tuple[Tensor, ...]) -> None:
        """See `Pages.write`."""
        self.keys[self.rows.view(-1)[places][..., None] + self._word] = states[0]

    def _encode(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, exact: Exact) -> Tensor:
        """Records `[n, S, m, words]` of tokens at `positions` `[n, S, m]`."""
        columns = self._coders[layer].encode(keys, values, positions, exact)
        return self.layout.pack({**columns, "positions": positions[..., None]})

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read`, of all sets of a layer; decodes."""
        numbers = places[:, 0, 0] // self.rows.shape[1]
        exact, columns = _rows_of(self.exact[layer], numbers), self.layout.unpack(*self.copy(places))
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

    def newest(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.newest`; zeros for places without such a token."""
        numbers, parts = places[:, 0, 0, 0] // self.rows.shape[1], []
        for layer, whole in enumerate(self.exact):
            exact, zero = _rows_of(whole, numbers), whole.keys.new_zeros(())
            parts.append(exact.instead(self._in_sets(layer, numbers, places[:, layer]), zero, zero))
        keys, values = (torch.stack(states, dim=1) for states in zip(*parts, strict=True))
        return keys, values

    def encode(self, numbers: Tensor, first: Sequence[int] = ()) -> None:
        """See `Pages.encode`: layers that are alike at once."""
        for codecs, exact in zip(self.codecs, self.exact, strict=True):
            for number in first:
                _of(exact, number).meet_blocks(codecs)
        for alike in self._alike:
            self._encode_waiting(alike, numbers)
        for exact in self.exact:
            exact.coded.index_copy_(0, numbers, exact.count[numbers])

    def _encode_waiting(self, alike: Sequence[int], numbers: Tensor) -> None:
        """Write the records of tokens that wait, in layers that are alike."""
        exact = map_tensors(_joined, *(_rows_of(self.exact[layer], numbers) for layer in alike))
        newest = exact.newest_tokens()
        slots, positions, waits = (part[:, : self._sets] for part in (newest.slots, newest.positions, newest.waits))
        records = self._encode(alike[0], newest.keys, newest.values, positions, exact)
        of_layers = zip(alike, slots.split(len(numbers)), strict=True)
        places = torch.cat([self.places(numbers, own, self._sets_of(layer)) for layer, own in of_layers])
        self.write(0, places, (torch.where(waits[..., None], records, *self.copy(places)),))

    # ---- attention ------------------------------------------------------------------------------------------------

    def least_saved(self, requests: int) -> float:
        """See `StockPages.least_saved`: all sets are read at once."""
        return inf

    def attend(
        self, layer: int, numbers: Tensor, places: Tensor, used: Tensor | None, query: Tensor, logits: Logits
    ) -> Tensor:
        """See `StockPages.attend`, of all sets of a layer."""
        columns, exact = Columns(), _rows_of(self.exact[layer], numbers)
        held = InCodes(self.codecs[layer], columns, exact, visible=used)
        if query.device.type == "cpu" and fused.obstacle(held, query) is None:
            return self._attend_in_place(layer, places, used, exact, query, logits)
        columns.use(self.layout.unpack(*self.copy(places)))
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

    def meet(self, layer: int, number: int, keys: Tensor, values: Tensor, waiting: int) -> None:
        """See `StockPages.meet`: the statistics of its codes, and the records of its tokens that wait."""
        _of(self.exact[layer], number).meet(self.codecs[layer], (keys, values), None, waiting > 0)
        if waiting:
            self._encode_waiting([layer], torch.tensor([number], device=self.device))

    def pick(self, number: int, layer: int, tokens: Kept, keys: Tensor, values: Tensor, new: int) -> tuple[Tensor, ...]:
        """See `Pages.pick`: records; those that are not rounded are found again at once."""
        exact, held, indices = _of(self.exact[layer], number), keys.shape[2] - new, tokens.indices[None]
        row, at = torch.tensor([number], device=self.device), torch.arange(held, device=self.device)
        beyond = (number + 1) * self.rows.shape[1] - 1  # behind the shorter sets there is no token to be chosen
        places = self.places(row, at.expand(1, self._sets, -1), self._sets_of(layer)).clamp_max(beyond)
        records, seen = [*self.copy(places)], exact.count + new
        if new:
            came = torch.arange(new, device=self.device) + exact.count[:, None, None]
            parts = keys[:, :, held:], values[:, :, held:], came.expand(1, self._sets, -1)
            records.append(self._encode(layer, *parts, exact))

        def states(slots: Tensor) -> tuple[Tensor, Tensor]:
            place = indices.expand(-1, slots.shape[1], -1).gather(-1, slots)
            return gather_slots(keys, place), gather_slots(values, place)

        exact.find(tokens.positions[None], seen, states)
        return (gather_slots(torch.cat(records, dim=2), indices[..., tokens.first :]).flatten(0, 2),)


def _of(exact: Exact, number: int) -> Exact:
    """Views of the row of a request."""
    return exact.change(lambda held: held[number : number + 1])


def _rows_of(exact: Exact, numbers: Tensor) -> Exact:
    """Copies of the rows of these requests."""
    return exact.change(lambda held: held.index_select(0, numbers))


def _joined(*rows: Tensor) -> Tensor:
    return torch.cat(rows)
