"""Keys and values in transformers' pages: where each slot of each request lies."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pages:
    """Keys and values of all paged layers, and the rows of each seat's slots.

    A row is one token of one layer; where KV heads evict on their own, each has a token of its own in it. The same
    number is the row of a slot in every layer: each layer has views of its own that begin elsewhere.

    Shapes: `R` seats, `C` slots of a request, `H` KV heads, `D` head size.

    Attributes:
        keys, values: one view per layer, `[rows, H, D]`.
        rows: `[R, C]` int64, row of each slot.

    Args:
        keys, values: views, in the order of the layers.
        slots: `C`.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], slots: int) -> None:
        self.keys, self.values = list(keys), list(values)
        self.device = self.keys[0].device
        self._heads = torch.arange(self.keys[0].shape[1], device=self.device)
        self.rows = torch.zeros(0, slots, dtype=torch.int64, device=self.device)

    def seat(self, number: int, seats: int, starts: Sequence[int], page_size: int) -> None:
        """The pages that begin at the rows `starts` belong to this seat from now on; there are so many seats."""
        if seats > len(self.rows):
            self.rows = torch.cat([self.rows, self.rows.new_zeros(seats - len(self.rows), self.rows.shape[1])])
        first = torch.tensor(starts, dtype=torch.int64, device=self.device)
        rows = (first[:, None] + torch.arange(page_size, device=self.device)).flatten()
        slots = min(len(rows), self.rows.shape[1])
        self.rows[number, :slots] = rows[:slots]

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write `[n, H, D]` to the rows `[n, 1]`, or `[n, H]` where each head has one of its own."""
        for to, states in ((self.keys[layer], keys), (self.values[layer], values)):
            if rows.shape[1] == 1:
                to.index_copy_(0, rows[:, 0], states)
            else:
                to[rows, self._heads] = states

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the rows `[n]`: `[n, H, D]`."""
        return self.keys[layer].index_select(0, rows), self.values[layer].index_select(0, rows)

    def states(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the rows `[n, 1 or H, slots]`, as a cache shows them: `[n, H, slots, D]`."""
        if rows.shape[1] > 1:
            heads = self._heads[:, None]
            return self.keys[layer][rows, heads], self.values[layer][rows, heads]
        keys, values = self.read(layer, rows.flatten())
        shape = (rows.shape[0], rows.shape[2], *keys.shape[1:])
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
