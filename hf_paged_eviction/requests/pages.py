"""Where the tokens of requests are: what the bookkeeping of requests asks of memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..store.columns import gather_slots

#: All sets of all layers.
ALL = slice(None)
#: Keys and values `[1, H, n, D]` and positions `[1, S, n]` of a layer of a request.
Tokens = tuple[Tensor, Tensor, Tensor]


class Kept(NamedTuple):
    """The tokens of a layer that stay after a forward of several. Shapes: `n` slots of each set.

    Attributes:
        indices: `[S, n]` int64, which of the tokens at hand comes into each slot.
        positions: `[S, n]` int64, in the order of the text, -1 behind the last of a set.
        slots: `[S, n]` int64, numbers of the tokens in their sets; behind the last, the last is written again.
        scores: `[S, n]` float32; None = not known.
        first: number of slots in front that do not change.
        states: what `Pages.write` writes.
    """

    indices: Tensor
    positions: Tensor
    slots: Tensor
    scores: Tensor | None
    first: int = 0
    states: tuple[Tensor, ...] = ()


class Pages(ABC):
    """Keys and values of the layers that evict, by request, set and number of the token in its set.

    A *place* is the number of one token in one set. It holds the key and the value of the token, and bookkeeping that
    belongs to them is kept under the same number.

    Shapes: `n` requests, `Q` sets in all layers, `S` sets of a layer, `G` KV heads of a set, `H = S * G`, `D` head
    size.

    Attributes:
        device: device of all tensors.
        size: number of places.
        rounds: whether tokens are stored in few bits.
    """

    rounds = False
    device: torch.device
    size: int

    @abstractmethod
    def give(self, number: int, limits: Sequence[int], sets: slice = ALL) -> None:
        """Change how many tokens some sets of a request may hold; the tokens are written anew.

        Args:
            number: row of the request.
            limits: of all its sets.
        """

    @abstractmethod
    def places(self, rows: Tensor, at: Tensor, sets: slice | Tensor = ALL) -> Tensor:
        """Places `[n, q, m]` of tokens of some sets of requests.

        Args:
            rows: `[n]` rows of the requests.
            at: `[n or 1, q or 1, m]` numbers of the tokens in their sets.
        """

    @abstractmethod
    def write(self, layer: int, places: Tensor, states: tuple[Tensor, ...]) -> None:
        """Write keys and values `[n, G, D]`, or what `pick` returned, to the places `[n]` of a layer."""

    @abstractmethod
    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the places `[n, s, m]` of some sets of a layer to keys and values `[n, s * G, m, D]`."""

    def read_first(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, where `places` `[n, S, m]` are those of the first tokens of each set."""
        return self.read(layer, places)

    def newest(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the places `[n, L, S, m]` of newest tokens to keys and values `[n, L, H, m, D]`, not rounded."""
        states = zip(*(self.read(layer, places[:, layer]) for layer in range(places.shape[1])), strict=True)
        keys, values = (torch.stack(parts, dim=1) for parts in states)
        return keys, values

    # ---- tokens that are written after attention ------------------------------------------------------------------

    def pick(self, number: int, layer: int, tokens: Kept, keys: Tensor, values: Tensor, new: int) -> tuple[Tensor, ...]:
        """What has to be written of the tokens that stay in a layer of a request, before any of it is overwritten.

        Args:
            keys, values: `[1, H, n, D]`, the held tokens followed by `new` ones.
        """
        indices, sets = tokens.indices[None, :, tokens.first :], len(tokens.indices)
        kept = (gather_slots(states, indices).unflatten(1, (sets, -1)) for states in (keys, values))
        keys, values = (states.transpose(2, 3).flatten(0, 2) for states in kept)
        return keys, values

    def encode(self, numbers: Tensor, first: Sequence[int] = ()) -> None:
        """Write the codes of single tokens of these requests that have none yet, where tokens are rounded; `first`:
        rows of those whose first block is full now."""
        raise NotImplementedError


def grown(table: Tensor, rows: int) -> Tensor:
    """The table with at least so many rows, new ones zero."""
    more = rows - len(table)
    return torch.cat([table, table.new_zeros(more, *table.shape[1:])]) if more > 0 else table
