"""The shares of a cache's layers, decided while a forward walks through them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.heads import HeadShare
from ..parts import Snapshot, map_tensors, persistent
from ..queries.observer import Queries, fold
from ..table.budget import BlockBudget
from .base import LayerAllocator
from .share import share_out


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

    Attributes:
        layers: how many there are so far.

    Args:
        allocator: weighs the layers.
        budget: mean share.
    """

    def __init__(self, allocator: LayerAllocator, budget: BlockBudget) -> None:
        self._allocator = allocator
        self._budget = budget
        self.layers = 0
        self._preferences: dict[int, Tensor] = {}  # by place, [B]
        self._shares: dict[int, Tensor] = {}  # by place, [B, 1] tokens
        self._real: Tensor | None = None  # [B] real tokens in the last forward of several tokens

    def add(self) -> None:
        """One more layer, in the order of the model."""
        self.layers += 1

    def share(self, place: int) -> Tensor | None:
        """`[B, 1]` tokens that the layer at this place may hold; None before anything was decided."""
        return self._shares.get(place)

    def attended(
        self, place: int, share: HeadShare, queries: Queries, key_positions: Tensor, query_positions: Tensor
    ) -> None:
        """Share out anew. The other layers have to fit what they may hold then, so that the total holds.

        Args:
            place: of the layer whose queries these are.
            share: which of its heads this process holds.
            key_positions: `[B, kv_heads, tokens]`.
            query_positions: `[B, q]`.
        """
        zero = torch.zeros((), device=key_positions.device)
        allocator = self._allocator
        start = {name: zero for name in allocator.token_statistics}
        found = fold(allocator.observe, start, queries, key_positions, query_positions, allocator.window, share)
        found = {name: share.gather(values) for name, values in found.items()}
        self._preferences[place] = self._allocator.preference(found, share.gather(key_positions))
        self._real = key_positions[:, 0].amax(-1) + 1
        self._share_out(self._real)

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
        total = self._budget.capacity // size * self.layers
        most = (-(-real // size)).cpu()
        blocks = share_out(weights, total, smallest // size, most)
        if len(places) < self.layers:
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
