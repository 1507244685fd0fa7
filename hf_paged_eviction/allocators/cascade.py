"""The shares of a cache's layers, decided while a forward walks through them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..integration.heads import HeadShare
from ..parts import map_tensors, persistent
from ..queries.observer import Queries, fold
from ..table.budget import BlockBudget
from .base import LayerAllocator
from .share import share_out
from .sharing import Sharing, SharingSnapshot


@dataclass(frozen=True)
class CascadeSnapshot(SharingSnapshot):
    """What was decided.

    Attributes:
        preferences: by the layer's place, `[B]`.
        real: `[B]` real tokens in the last forward of several tokens.
    """

    preferences: dict[int, Tensor]
    real: Tensor | None


class Cascade(Sharing):
    """What each layer may hold (CAKE's cascade, arXiv 2503.12491).

    The total is shared out among the layers that have attended so far. Each new one takes from the others, so their sum
    never exceeds the total; until the last one is through, none gets more than its row has tokens.

    Args:
        allocator: weighs the layers.
        budget: mean share.
    """

    def __init__(self, allocator: LayerAllocator, budget: BlockBudget) -> None:
        super().__init__(budget)
        self._allocator = allocator
        self._preferences: dict[int, Tensor] = {}  # by place, [B]
        self._real: Tensor | None = None  # [B] real tokens in the last forward of several tokens

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
        """See `Sharing.shrink`: decide anew."""
        super().shrink(budget)
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
        """See `Sharing.map_rows`."""
        super().map_rows(change)
        self._preferences = {place: change(preference) for place, preference in self._preferences.items()}
        self._real = None if self._real is None else change(self._real)

    def clear(self) -> None:
        """See `Sharing.clear`."""
        super().clear()
        self._preferences, self._real = {}, None

    def snapshot(self) -> CascadeSnapshot:
        """See `Sharing.snapshot`."""
        return CascadeSnapshot(self._shares, self._preferences, self._real)

    def restore(self, saved: SharingSnapshot, device: torch.device) -> None:
        """See `Sharing.restore`."""
        super().restore(saved, device)
        if isinstance(saved, CascadeSnapshot):
            found = map_tensors(lambda tensor: persistent(tensor.to(device)), saved)
            self._preferences, self._real = dict(found.preferences), found.real
