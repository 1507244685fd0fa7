"""The shares of a cache's layers, decided while a forward walks through them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..integration.heads import HeadShare
from ..parts import Snapshot, map_tensors, persistent
from ..queries.observer import Queries, fold
from ..table.budget import BlockBudget
from .base import LayerAllocator
from .share import share_out


class Sharer(Protocol):
    """A layer that holds as much as it is told."""

    @property
    def held(self) -> int: ...

    @property
    def share(self) -> HeadShare: ...

    def resize(self) -> None: ...


@dataclass(frozen=True)
class CascadeSnapshot(Snapshot):
    """What was decided.

    Attributes:
        preferences, shares: by the layer's place, `[B]` and `[B, 1]` tokens.
        real: `[B]` real tokens in the last forward of several tokens.
    """

    preferences: dict[int, Tensor]
    shares: dict[int, Tensor]
    real: Tensor | None


class Cascade:
    """What each layer may hold (CAKE's cascade, arXiv 2503.12491).

    The total is shared out among the layers that have attended so far. Each new one takes from the others, so their sum
    never exceeds the total; until the last one is through, none gets more than its row has tokens.

    Args:
        allocator: weighs the layers.
        budget: mean share.
    """

    def __init__(self, allocator: LayerAllocator, budget: BlockBudget) -> None:
        self._allocator = allocator
        self._budget = budget
        self._layers: list[Sharer] = []
        self._preferences: dict[int, Tensor] = {}  # by place, [B]
        self._shares: dict[int, Tensor] = {}  # by place, [B, 1] tokens
        self._real: Tensor | None = None  # [B] real tokens in the last forward of several tokens

    @property
    def layers(self) -> int:
        """How many there are so far."""
        return len(self._layers)

    def add(self, layer: Sharer) -> None:
        """One more layer, in the order of the model."""
        self._layers.append(layer)

    def share(self, place: int) -> Tensor | None:
        """`[B, 1]` tokens that the layer at this place may hold; None before anything was decided."""
        return self._shares.get(place)

    def attended(self, layer: Sharer, queries: Queries, key_positions: Tensor, query_positions: Tensor) -> None:
        """Share out anew; the other layers are resized at once, so that the total holds.

        Args:
            layer: the one whose queries these are.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
        """
        place = self._layers.index(layer)
        if place == 0 and layer.held == 0:
            self.clear()  # another prompt
        zero = torch.zeros((), device=key_positions.device)
        allocator = self._allocator
        start = {name: zero for name in allocator.token_statistics}
        found = fold(allocator.observe, start, queries, key_positions, query_positions, allocator.window, layer.share)
        found = {name: layer.share.gather(values) for name, values in found.items()}
        self._preferences[place] = self._allocator.preference(found, layer.share.gather(key_positions))
        self._real = key_positions[:, 0].amax(-1) + 1
        self._share_out(self._real)
        for other in self._layers:
            if other is not layer:
                other.resize()

    def shrink(self, budget: BlockBudget) -> None:
        """Another mean share: decide anew. The layers follow when they are asked to shrink."""
        self._budget = budget
        if self._real is not None:
            self._share_out(self._real)

    def _share_out(self, real: Tensor) -> None:
        size, smallest = self._budget.block_size, self._budget.smallest
        places = sorted(self._preferences)
        preferences = torch.stack([self._preferences[place] for place in places], dim=1)
        weights = self._allocator.weights(preferences, self._budget.capacity)
        total = self._budget.capacity // size * len(self._layers)
        most = (-(-real // size)).cpu()
        blocks = share_out(weights, total, smallest // size, most)
        if len(places) < len(self._layers):
            blocks = blocks.minimum(most.clamp_min(smallest // size)[:, None])
        shares = (blocks * size).to(real.device)
        self._shares = {place: shares[:, at : at + 1] for at, place in enumerate(places)}

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply an indexing of dimension 0 to all that belongs to a row."""
        self._preferences = {place: change(preference) for place, preference in self._preferences.items()}
        self._shares = {place: change(share) for place, share in self._shares.items()}
        self._real = None if self._real is None else change(self._real)

    def clear(self) -> None:
        """Forget the prompt."""
        self._preferences, self._shares, self._real = {}, {}, None

    def snapshot(self) -> CascadeSnapshot:
        """What was decided."""
        return CascadeSnapshot(self._preferences, self._shares, self._real)

    def restore(self, saved: CascadeSnapshot, device: torch.device) -> None:
        """Share out as another cascade did."""
        saved = map_tensors(lambda tensor: persistent(tensor.to(device)), saved)
        self._preferences, self._shares, self._real = dict(saved.preferences), dict(saved.shares), saved.real
