"""Where the tokens of requests are: what the bookkeeping of requests asks of memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

#: All sets of all layers.
ALL = slice(None)


class Pages(ABC):
    """Keys and values of the layers that evict, by request, set and number of the token in its set.

    A *place* is the number of one token in one set. It holds the key and the value of the token, and bookkeeping that
    belongs to them is kept under the same number.

    Shapes: `n` requests, `Q` sets in all layers, `S` sets of a layer, `G` KV heads of a set, `H = S * G`, `D` head
    size.

    Attributes:
        device: device of all tensors.
        size: number of places.
    """

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
    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write `[n, G, D]` to the places `[n]` of a layer."""

    @abstractmethod
    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the places `[n, s, m]` of some sets of a layer to keys and values `[n, s * G, m, D]`."""

    def read_first(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, where `places` `[n, S, m]` are those of the first tokens of each set."""
        return self.read(layer, places)

    def read_all(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the places `[n, L, S, m]` of all layers to keys and values `[n, L, H, m, D]`."""
        states = zip(*(self.read(layer, places[:, layer]) for layer in range(places.shape[1])), strict=True)
        keys, values = (torch.stack(parts, dim=1) for parts in states)
        return keys, values
