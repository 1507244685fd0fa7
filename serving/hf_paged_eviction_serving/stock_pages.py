"""Keys and values in transformers' pages, by request and slot."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from hf_paged_eviction.internals import ALL, Logits, Pages, grown

from .attention import compare

#: Bytes of keys and values that a CPU reads in the time that the operators of one group of sets take.
_WORTH_A_GROUP = 2 << 20


class StockPages(Pages):
    """Keys and values of all paged layers, and the rows of the slots of each request.

    A page of transformers has a place for each token in each layer. Here a page is memory for rows: one row holds one
    token of the KV heads that evict together, of any layer. So a request takes the pages that its budget needs, and
    divides them among layers and heads: the slots of a set are contiguous, those of the first set come first.

    Shapes: `R` requests, `L` layers, `S` sets of a layer, `G` KV heads of a set, `C` budget, `D` head size.

    Attributes:
        keys, values: `[rows, G, D]`; the key and the value of a token have the same row.
        rows: `[R, L * S * C]` int64, row of each slot.
        starts: `[R, L * S]` int64, first slot of each set.
        page_tokens: number of tokens of each layer in a page.

    Args:
        states: keys and values of all pages, `[rows, H, D]`.
        layers: `L`.
        sets: `S`.
        slots: `C`.
        page_size: number of tokens per page.
    """

    def __init__(self, states: Tensor, layers: int, sets: int, slots: int, page_size: int) -> None:
        rows = states.view(len(states) * sets, states.shape[1] // sets, states.shape[2])
        self.device = rows.device
        self.keys, self.values = rows, rows[page_size * sets :]
        self.rows = torch.zeros(0, layers * sets * slots, dtype=torch.int64, device=self.device)
        self.starts = torch.zeros(0, layers * sets, dtype=torch.int64, device=self.device)
        self._slots, self.page_tokens = slots, page_size
        in_layer = 2 * page_size * torch.arange(layers, device=self.device)  # keys, then values of each layer
        self._of_set = (in_layer[:, None] * sets + torch.arange(sets, device=self.device)).flatten()
        self._sets = sets

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of slots of all requests."""
        return self.rows.numel()

    def reserve(self, number: int, requests: int, starts: Sequence[int], capacity: int) -> None:
        """Give the pages that begin at the token rows `starts` to request `number` of `requests`.

        All its sets have equally many slots: `capacity`, or fewer for a request that stays short and has fewer pages.
        """
        self.rows, self.starts = grown(self.rows, requests), grown(self.starts, requests)
        rows = self._rows_of(torch.tensor(starts, dtype=torch.int64, device=self.device))
        self.rows[number, : rows.numel()] = rows.flatten()
        self.starts[number] = torch.arange(len(rows), device=self.device) * min(rows.shape[1], capacity)

    def _rows_of(self, starts: Tensor) -> Tensor:
        """Rows `[L * S, n]` of the slots of each set in these pages."""
        tokens = (starts[:, None] + torch.arange(self.page_tokens, device=self.device)).flatten()[: self._slots]
        return tokens * self._sets + self._of_set[:, None]

    def give(self, number: int, limits: Sequence[int], sets: slice = ALL) -> None:
        """See `Pages.give`."""
        starts = torch.tensor([0, *accumulate(limits[:-1])], dtype=torch.int64, device=self.device)
        self.starts[number, sets] = starts[sets]

    def places(self, rows: Tensor, at: Tensor, sets: slice | Tensor = ALL) -> Tensor:
        """See `Pages.places`."""
        starts = rows[:, None] * self.rows.shape[1] + self.starts[rows][:, sets]
        return starts[..., None] + at

    def first(self, number: int, counts: Sequence[int]) -> Tensor:
        """Places `[sum of counts]` of the first tokens of each set of a request, set by set."""
        slots, total = torch.tensor([*counts], device=self.device), sum(counts)
        begins = self.starts[number] - (slots.cumsum(0) - slots) + number * self.rows.shape[1]
        return begins.repeat_interleave(slots, output_size=total) + torch.arange(total, device=self.device)

    # ---- contexts: all that a request holds -----------------------------------------------------------------------

    def save(self, number: int, places: Tensor) -> tuple[Tensor, ...]:
        """Copies of the tokens in all places `[n]` of a request, see `first`."""
        return self.copy(places)

    def load(self, number: int, places: Tensor, states: tuple[Tensor, ...]) -> None:
        """Write what `save` returned of another request."""
        self.write(0, places, states)

    # ---- attention ------------------------------------------------------------------------------------------------

    def least_saved(self, requests: int) -> float:
        """Tokens of a set that must not have to be read for a further group of sets to be worth its operators."""
        of_token = 2 * self.keys[0].numel() * self.keys.element_size()
        return _WORTH_A_GROUP / (of_token * requests) if self.device.type == "cpu" else inf

    def put_singles(self, layer: int, numbers: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put a token `[n, H, D]` of each of these requests into the places `[n, S]`."""
        of_sets = (part.reshape(-1, *self.keys.shape[1:]) for part in (keys, values))
        self.write(layer, places.flatten(), tuple(of_sets))

    def attend(
        self, layer: int, numbers: Tensor, places: Tensor, used: Tensor | None, query: Tensor, logits: Logits
    ) -> Tensor:
        """Attention of one token of each of these requests to the tokens of some sets.

        Args:
            places: `[n, s, m]`.
            used: `[n, s, m]` bool, which of the places hold tokens; None = all.
            query: `[n, query_heads, 1, D]`, of these sets.
        """
        return compare(query, *self.read(layer, places), None if used is None else used[:, :, None], logits)

    def meet(self, layer: int, number: int, keys: Tensor, values: Tensor, waiting: int) -> None:
        """Learn from the first tokens `[1, H, n, D]` of a request how to encode the others; `waiting` single tokens
        came before."""

    # ---- tokens ---------------------------------------------------------------------------------------------------

    def write(self, layer: int, places: Tensor, states: tuple[Tensor, ...]) -> None:
        """See `Pages.write`."""
        rows = self.rows.view(-1)[places]
        for memory, part in zip((self.keys, self.values), states, strict=True):
            memory.index_copy_(0, rows, part)

    def copy(self, places: Tensor) -> tuple[Tensor, ...]:
        """Copy places `[...]` to keys and values `[..., G, D]`."""
        rows, memories = self.rows.view(-1)[places.flatten()], (self.keys, self.values)
        return tuple(memory.index_select(0, rows).view(*places.shape, *memory.shape[1:]) for memory in memories)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.read`."""
        keys, values = (states.transpose(2, 3).flatten(1, 2) for states in self.copy(places))
        return keys, values

    def newest(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Pages.newest`."""
        keys, values = (states.transpose(3, 4).flatten(2, 3) for states in self.copy(places))
        return keys, values
