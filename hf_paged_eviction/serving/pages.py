"""Keys and values in transformers' pages, by request and slot."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pages:
    """Keys and values of all paged layers, and the rows of the slots of each request.

    A page of transformers has a place for each token in each layer. Here a page is memory for rows: one row holds one
    token of the KV heads that evict together, of any layer. So a request takes the pages that its budget needs, and its
    `Layout` divides them among layers and heads.

    Shapes: `R` requests, `L` layers, `S` sets of a layer, `G` KV heads of a set, `C` budget, `D` head size.

    Attributes:
        keys, values: `[rows, G, D]`; the key and the value of a token have the same row.
        rows: `[R, L * S * C]` int64, row of each slot.

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
        self._slots, self._page_size = slots, page_size
        in_layer = 2 * page_size * torch.arange(layers, device=self.device)  # keys, then values of each layer
        self._of_set = (in_layer[:, None] * sets + torch.arange(sets, device=self.device)).flatten()
        self._sets = sets

    def reserve(self, number: int, requests: int, starts: Sequence[int]) -> int:
        """Give the pages that begin at the token rows `starts` to request `number` of `requests`.

        Returns the number of slots per set, if all sets get the same number.
        """
        if requests > len(self.rows):
            self.rows = torch.cat([self.rows, self.rows.new_zeros(requests - len(self.rows), self.rows.shape[1])])
        first = torch.tensor(starts, dtype=torch.int64, device=self.device)
        tokens = (first[:, None] + torch.arange(self._page_size, device=self.device)).flatten()[: self._slots]
        rows = (tokens * self._sets + self._of_set[:, None]).flatten()
        self.rows[number, : len(rows)] = rows
        return len(tokens)

    def write(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write `[n, G, D]` to the rows `[n]`."""
        self.keys.index_copy_(0, rows, keys)
        self.values.index_copy_(0, rows, values)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the rows `[n, S, slots]` to keys and values `[n, S * G, slots, D]`."""
        keys, values = (
            self._shown(states.index_select(0, rows.flatten()), rows) for states in (self.keys, self.values)
        )
        return keys, values

    def _shown(self, states: Tensor, rows: Tensor) -> Tensor:
        return states.view(*rows.shape, *states.shape[1:]).transpose(2, 3).flatten(1, 2)
